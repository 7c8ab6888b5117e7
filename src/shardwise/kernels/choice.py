"""Which implementation of a kernel runs: chosen here, from device, dtype and what is installed, and nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from shardwise.kernels import loss_reference


@dataclass(frozen=True)
class LossKernels:
    """One implementation of the loss' work on this rank's logits; ``loss_reference`` says what each function does.

    Attributes:
        name: ``"triton"``, ``"cpu"`` or ``"reference"``.
        row_statistics: as its namesake in ``loss_reference``, and so are the other two.
        why_not_faster: why a faster one does not run here; None if there is none.
    """

    name: str
    row_statistics: Callable[..., Tensor]
    exponentials_: Callable[..., Tensor]
    gradient_: Callable[..., None]
    why_not_faster: str | None


def choose(device: torch.device, dtype: torch.dtype) -> LossKernels:
    """The fastest implementation for logits of ``dtype`` on ``device``.

    While ``torch.compile`` traces it is the reference, from which the compiler makes its own kernels.
    """
    if torch.compiler.is_compiling():
        return _kernels("reference", loss_reference, "torch.compile makes its own kernels from the reference")
    return _choose(device.type, device.index, dtype)


@cache
def _choose(device_type: str, device_index: int | None, dtype: torch.dtype) -> LossKernels:
    module = {"cpu": "loss_cpu", "cuda": "loss_triton"}.get(device_type)
    if module is None:
        return _kernels("reference", loss_reference, f"there are kernels for CPU and CUDA, none for {device_type}")
    name = module.removeprefix("loss_")
    try:
        kernels = importlib.import_module(f"shardwise.kernels.{module}")
        why_not = kernels.why_not(torch.device(device_type, device_index or 0), dtype) if name == "triton" else None
    # Whatever is wrong with an optional package, the reference runs.
    except Exception as error:
        why_not = f"the {name} kernels cannot be imported: {type(error).__name__}: {error}"
    if why_not is not None:
        return _kernels("reference", loss_reference, why_not)
    return _kernels(name, kernels, None)


def _kernels(name: str, module: ModuleType, why_not_faster: str | None) -> LossKernels:
    return LossKernels(name, module.row_statistics, module.exponentials_, module.gradient_, why_not_faster)
