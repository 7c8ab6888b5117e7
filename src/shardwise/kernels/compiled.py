"""C for the CPU, compiled by the machine's own compiler when first needed.

Plain PyTorch goes over a tensor once for each operation; a loop in C reads and writes it once. Compiling one of the
files beside this one takes a fraction of a second. Nothing is kept on disk: the library is built in a temporary folder
and loaded from there. Where there is no compiler, callers compute the same with PyTorch.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.core.processes import temporary_prefix

# No exceptions for wrong or inexact results are read, which lets the compiler use vectors; no sum is reordered.
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-shared", "-fPIC")
# Of this machine, for its own use; compilers for ARM know the second. The last is what every compiler knows.
_TUNING = (("-march=native",), ("-mcpu=native",), ())
# The smallest library, with the headers that all files need.
_TRIAL = "#include <math.h>\n#include <stdint.h>\nint32_t trial(void) { return 1; }\n"
# It takes a second or two, and on a busy machine a hundred times as long.
_COMPILE_SECONDS = 600
# Starting threads takes about as long as a thread needs for a quarter of this.
_MIN_ELEMENTS_PER_THREAD = 1 << 21


@cache
def compile_c(source: str, defines: tuple[str, ...] = ()) -> ctypes.CDLL | str:
    """The library of a file of this folder, or why it could not be compiled."""
    return _compiled(*defines, str(Path(__file__).with_name(source)))


@cache
def why_no_compiler() -> str | None:
    """Why nothing can be compiled on this machine; None if a line of C can, which takes a fiftieth of a second."""
    library = _compiled("-x", "c", "-", text=_TRIAL)
    return library if isinstance(library, str) else None


def _compiled(*arguments: str, text: str = "") -> ctypes.CDLL | str:
    """What the compiler makes of a file or of ``text``, or why it makes nothing."""
    compiler = _compiler()
    if compiler is None:
        return "no C compiler: neither $CC nor cc, gcc or clang is there"
    refusal = ""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _COMPILE_SECONDS, "check": False}
    try:
        with tempfile.TemporaryDirectory(prefix=temporary_prefix("kernels")) as folder:
            built = Path(folder) / "kernels.so"
            for tuning in _TUNING:
                command = [compiler, *_FLAGS, *tuning, *arguments, "-o", str(built), "-lm"]
                done = subprocess.run(command, input=text, **options)
                if done.returncode == 0:
                    # Loaded, it no longer needs the file.
                    return ctypes.CDLL(str(built))
                refusal = refusal or f"{compiler}: {(done.stderr.strip() or 'failed').splitlines()[0]}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler}: {error}"
    return refusal


@cache
def compiler_version() -> str | None:
    """The first line of what the compiler says of itself; None if there is none."""
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        command = [compiler, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler}: {error}"
    return next(iter(done.stdout.splitlines()), compiler)


def why_not(source: str, defines: tuple[str, ...] = ()) -> str | None:
    """Why there is no library of a file of this folder; None if there is."""
    library = compile_c(source, defines)
    return library if isinstance(library, str) else None


def function(name: str, source: str, defines: tuple[str, ...] = ()) -> Callable[..., None]:
    """A function of a file of this folder that ``why_not`` says nothing against."""
    library = compile_c(source, defines)
    assert isinstance(library, ctypes.CDLL), library
    found: Callable[..., None] = getattr(library, name)
    return found


def address(tensor: Tensor, row: int) -> ctypes.c_void_p:
    """Where a row of ``tensor`` begins."""
    return ctypes.c_void_p(tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size())


def over_rows(compute: Callable[[int, int], None], num_rows: int, row_length: int) -> None:
    """``compute(start, stop)`` on runs of rows, one for each of PyTorch's threads if there is enough for them."""
    num_threads = min(torch.get_num_threads(), num_rows, 1 + num_rows * row_length // _MIN_ELEMENTS_PER_THREAD)
    if num_threads <= 1:
        compute(0, num_rows)
        return
    bounds = [num_rows * k // num_threads for k in range(num_threads + 1)]
    # The compiled functions run without Python's lock.
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(compute, bounds[:-1], bounds[1:]))


def tell_autograd(written: Tensor) -> None:
    """PyTorch did not see the writing; autograd must not take what is there now for what it saved."""
    torch.autograd.graph.increment_version(written)


def _compiler() -> str | None:
    candidates = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((path for name in candidates if name and (path := shutil.which(name))), None)
