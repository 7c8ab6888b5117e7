"""The loss' work on this rank's logits on a CPU, in C, compiled when first needed (``dispatch.LOSS_CPU``).

Plain PyTorch goes over the logits once for each operation, even if in cache. ``loss_cpu.c`` reads them once for the
statistics, and reads and writes them once for the gradient. ``loss_reference`` says what each function computes; there
is no softcap here, and columns lie side by side.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.kernels.compiled import address, compile_c, over_rows, tell_autograd

_DEFINES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}


def why_not_compiled(dtype: torch.dtype = torch.float32) -> str | None:
    """Why there is no compiled code for ``dtype`` on this machine; None if there is. Compiles when first asked."""
    library = _library(dtype)
    return library if isinstance(library, str) else None


def row_statistics(
    logits: Tensor,
    target_local: Tensor,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    want_sum: bool = False,
) -> Tensor:
    """``loss_reference.row_statistics``."""
    assert softcap is None
    return _statistics(logits, target_local, temperature, want_sum, exponentiate=False)


def exponentials_(
    logits: Tensor,
    target_local: Tensor,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    want_sum: bool = False,
) -> Tensor:
    """``loss_reference.exponentials_``."""
    assert softcap is None
    statistics = _statistics(logits, target_local, temperature, want_sum, exponentiate=True)
    tell_autograd(logits)
    return statistics


def gradient_(
    out: Tensor,
    logits: Tensor,
    target_local: Tensor,
    shift: Tensor,
    scale: Tensor,
    at_target: Tensor,
    rest: Tensor | None = None,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> None:
    """``loss_reference.gradient_``."""
    assert softcap is None
    kernel = _kernel(logits.dtype, "gradient")
    of_rows = [x.contiguous() for x in (target_local, shift, scale, at_target, *([] if rest is None else [rest]))]
    padding = [] if rest is not None else [ctypes.c_void_p(None)]

    def compute(start: int, stop: int) -> None:
        kernel(
            *_matrix(logits, start),
            *_matrix(out, start),
            ctypes.c_int64(stop - start),
            ctypes.c_int64(logits.size(1)),
            *(address(x, start) for x in of_rows),
            *padding,
            ctypes.c_float(1.0 / temperature),
        )

    over_rows(compute, *logits.shape)
    tell_autograd(out)


def _statistics(
    logits: Tensor, target_local: Tensor, temperature: float, want_sum: bool, *, exponentiate: bool
) -> Tensor:
    kernel = _kernel(logits.dtype, "row_statistics")
    target_local = target_local.contiguous()
    statistics = torch.empty(logits.size(0), 4 if want_sum else 3)

    def compute(start: int, stop: int) -> None:
        kernel(
            *_matrix(logits, start),
            ctypes.c_int64(stop - start),
            ctypes.c_int64(logits.size(1)),
            address(target_local, start),
            ctypes.c_float(1.0 / temperature),
            ctypes.c_int(want_sum),
            ctypes.c_int(exponentiate),
            address(statistics, start),
        )

    over_rows(compute, *logits.shape)
    return statistics


def _matrix(tensor: Tensor, row: int) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    return address(tensor, row), ctypes.c_int64(tensor.stride(0))


def _kernel(dtype: torch.dtype, name: str) -> Callable[..., None]:
    library = _library(dtype)
    assert isinstance(library, ctypes.CDLL), library
    kernel: Callable[..., None] = getattr(library, name)
    return kernel


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The compiled file, or why there is none."""
    return compile_c("loss_cpu.c", _DEFINES[dtype])
