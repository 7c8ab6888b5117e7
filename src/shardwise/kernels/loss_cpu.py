"""The loss' work on this rank's logits on a CPU, in C, compiled when first needed (``dispatch.LOSS_CPU``).

Plain PyTorch goes over the logits once for each operation, even if in cache. ``loss_cpu.c`` reads them once for the
statistics, and reads and writes them once for the gradient. ``loss_reference`` says what each function computes; there
is no softcap here, and columns lie side by side.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.kernels import compiled
from shardwise.kernels.compiled import address, over_rows, tell_autograd

_DEFINES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}


def why_not_compiled(dtype: torch.dtype = torch.float32) -> str | None:
    """Why there is no compiled code for ``dtype`` on this machine; None if there is. Compiles when first asked."""
    return compiled.why_not("loss_cpu.c", _DEFINES[dtype])


def row_statistics(
    logits: Tensor,
    target_local: Tensor,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    want_sum: bool = False,
    exponentiate_: bool = False,
) -> Tensor:
    """``loss_reference.row_statistics``."""
    assert softcap is None
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
            ctypes.c_int(exponentiate_),
            address(statistics, start),
        )

    over_rows(compute, *logits.shape)
    if exponentiate_:
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


def _matrix(tensor: Tensor, row: int) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    return address(tensor, row), ctypes.c_int64(tensor.stride(0))


def _kernel(dtype: torch.dtype, name: str) -> Callable[..., None]:
    return compiled.function(name, "loss_cpu.c", _DEFINES[dtype])
