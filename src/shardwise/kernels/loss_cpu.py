"""The loss' work on this rank's logits on a CPU: C for large logits, compiled when first needed, else the reference.

Plain PyTorch goes over the logits once for each operation, even if in cache. ``loss_cpu.c`` reads them once for the
statistics, and reads and writes them once for the gradient. The machine's own compiler takes a fraction of a second for
it. Nothing is kept on disk: the library is built in a temporary folder and loaded from there. Where there is no
compiler, ``why_not_compiled`` says so and the reference computes the same.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwise.kernels import loss_reference

# What is saved at this size, a quarter of a millisecond a step, is worth the compilation in a thousand steps. The
# choice depends on nothing but the call, so that a run that is resumed computes the same bits.
MIN_ELEMENTS = 1 << 18

_DEFINES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
# No exceptions for wrong or inexact results are read, which lets the compiler use vectors; no sum is reordered.
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-shared", "-fPIC")
# Of this machine, for its own use; compilers for ARM know the second. The last is what every compiler knows.
_TUNING = (("-march=native",), ("-mcpu=native",), ())
_COMPILE_SECONDS = 60


def why_not_compiled(dtype: torch.dtype = torch.float32) -> str | None:
    """Why there is no compiled code for ``dtype`` on this machine; None if there is. Compiles when first asked."""
    library = _library(dtype)
    return library if isinstance(library, str) else None


def applies(logits: Tensor, softcap: float | None) -> bool:
    """Whether compiled code is for these logits, ``[n, v]``: large, of a layout that it knows, and it can be had."""
    return (
        logits.numel() >= MIN_ELEMENTS
        and logits.is_cpu
        and logits.dtype in _DEFINES
        and softcap is None
        and logits.stride(1) == 1
        # A subclass (fake, functional, distributed) has no memory of its own.
        and type(logits) in (Tensor, Parameter)
        and why_not_compiled(logits.dtype) is None
    )


def row_statistics(
    logits: Tensor,
    target_local: Tensor,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    want_sum: bool = False,
) -> Tensor:
    """``loss_reference.row_statistics``."""
    if not applies(logits, softcap):
        return loss_reference.row_statistics(
            logits, target_local, softcap=softcap, temperature=temperature, want_sum=want_sum
        )
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
    if not applies(logits, softcap):
        return loss_reference.exponentials_(
            logits, target_local, softcap=softcap, temperature=temperature, want_sum=want_sum
        )
    statistics = _statistics(logits, target_local, temperature, want_sum, exponentiate=True)
    _tell_autograd(logits)
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
    if not (applies(logits, softcap) and out.stride(1) == 1):
        loss_reference.gradient_(
            out, logits, target_local, shift, scale, at_target, rest, softcap=softcap, temperature=temperature
        )
        return
    kernel = _kernel(logits.dtype, "gradient")
    of_rows = [x.contiguous() for x in (target_local, shift, scale, at_target, *([] if rest is None else [rest]))]
    padding = [] if rest is not None else [ctypes.c_void_p(None)]

    def compute(start: int, stop: int) -> None:
        kernel(
            *_matrix(logits, start),
            *_matrix(out, start),
            ctypes.c_int64(stop - start),
            ctypes.c_int64(logits.size(1)),
            *(_address(x, start) for x in of_rows),
            *padding,
            ctypes.c_float(1.0 / temperature),
        )

    _over_rows(compute, logits.size(0))
    _tell_autograd(out)


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
            _address(target_local, start),
            ctypes.c_float(1.0 / temperature),
            ctypes.c_int(want_sum),
            ctypes.c_int(exponentiate),
            _address(statistics, start),
        )

    _over_rows(compute, logits.size(0))
    return statistics


def _address(tensor: Tensor, row: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size())


def _matrix(tensor: Tensor, row: int) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    return _address(tensor, row), ctypes.c_int64(tensor.stride(0))


def _tell_autograd(written: Tensor) -> None:
    # PyTorch did not see the writing; autograd must not take what is there now for what it saved.
    torch.autograd.graph.increment_version(written)


def _over_rows(compute: Callable[[int, int], None], num_rows: int) -> None:
    """``compute(start, stop)`` on runs of rows, one for each of PyTorch's threads."""
    num_threads = min(torch.get_num_threads(), num_rows)
    if num_threads <= 1:
        compute(0, num_rows)
        return
    bounds = [num_rows * k // num_threads for k in range(num_threads + 1)]
    # The kernels run without Python's lock.
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(compute, bounds[:-1], bounds[1:]))


def _kernel(dtype: torch.dtype, name: str) -> Callable[..., None]:
    library = _library(dtype)
    assert isinstance(library, ctypes.CDLL), library
    kernel: Callable[..., None] = getattr(library, name)
    return kernel


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The compiled file, or why there is none."""
    compiler = _compiler()
    if compiler is None:
        return "no C compiler: neither $CC nor cc, gcc or clang is there"
    source = Path(__file__).with_name("loss_cpu.c")
    refusal = ""
    try:
        with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
            built = Path(folder) / "loss_cpu.so"
            for tuning in _TUNING:
                command = [compiler, *_FLAGS, *tuning, *_DEFINES[dtype], str(source), "-o", str(built), "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
                if done.returncode == 0:
                    # Loaded, it no longer needs the file.
                    return ctypes.CDLL(str(built))
                refusal = refusal or f"{compiler}: {(done.stderr.strip() or 'failed').splitlines()[0]}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler}: {error}"
    return refusal


def _compiler() -> str | None:
    candidates = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((path for name in candidates if name and (path := shutil.which(name))), None)
