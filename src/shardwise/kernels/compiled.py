"""C kernels for the CPU, compiled on first use by the machine's own compiler.

PyTorch passes over a tensor once per operation, even if it is in cache; a loop in C reads and writes it once.
``elementwise_cpu.c`` has SwiGLU, rotary embedding, RMSNorm and sums of squares, in fp32. ``loss_cpu.c`` has the loss on
this rank's logits, in fp32 and bf16, as ``loss_reference`` defines it. Compiling a file takes a fraction of a second.
Nothing stays on disk: the library is built in a temporary folder and loaded from there. Without a compiler, or if
``dispatch`` chooses so, PyTorch computes the same up to rounding. Autograd does not record these functions.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.core.processes import temporary_prefix
from shardwise.kernels import dispatch
from shardwise.kernels.fake_device import planned_device

# The kernels do not read errno or floating-point exceptions, so the compiler may vectorize; it reorders no sum.
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-shared", "-fPIC")
# Flags for this machine's processor. Compilers for ARM accept the second set, and every compiler accepts the last.
_TUNING = (("-march=native",), ("-mcpu=native",), ())
# The smallest library, with the headers that all files include.
_TRIAL = "#include <math.h>\n#include <stdint.h>\nint32_t trial(void) { return 1; }\n"
# A compilation takes a second or two, and on a busy machine a hundred times as long.
_COMPILE_SECONDS = 600
# A thread processes a quarter of this in about the time that starting threads takes.
_MIN_ELEMENTS_PER_THREAD = 1 << 21

_DEFINES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
# File of each function, and one letter for the type of each argument.
_FUNCTIONS = {
    "swiglu": ("elementwise_cpu.c", "ppll"),
    "swiglu_gradient": ("elementwise_cpu.c", "pppll"),
    "rotate": ("elementwise_cpu.c", "pllplllppf"),
    "rms_norm": ("elementwise_cpu.c", "ppppllf"),
    "rms_norm_gradient": ("elementwise_cpu.c", "ppppppll"),
    "sums_of_squares": ("elementwise_cpu.c", "ppll"),
    "row_statistics": ("loss_cpu.c", "plllpfiip"),
    "gradient": ("loss_cpu.c", "plplllpppppf"),
}


@cache
def compile_c(source: str, defines: tuple[str, ...] = ()) -> ctypes.CDLL | str:
    """Compile a file of this folder and return the library, or why that failed."""
    library = _compiled(*defines, str(Path(__file__).with_name(source)))
    if isinstance(library, ctypes.CDLL):
        for name, (file, types) in _FUNCTIONS.items():
            if file == source:
                getattr(library, name).argtypes = [_TYPES[letter] for letter in types]
    return library


@cache
def why_no_compiler() -> str | None:
    """Return why this machine cannot compile a line of C, which takes a fiftieth of a second; None if it can."""
    library = _compiled("-x", "c", "-", text=_TRIAL)
    return library if isinstance(library, str) else None


def why_not(source: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Return why there is no library of a file for ``dtype``; None if there is. The first call compiles."""
    library = compile_c(source, _DEFINES[dtype])
    return library if isinstance(library, str) else None


def _kernel(name: str, dtype: torch.dtype = torch.float32) -> Callable[..., None]:
    """Return a function for which ``why_not`` returns None; for a plan one that computes nothing."""
    if planned_device() is not None:
        return lambda *args: None
    library = compile_c(_FUNCTIONS[name][0], _DEFINES[dtype])
    assert isinstance(library, ctypes.CDLL), library
    found: Callable[..., None] = getattr(library, name)
    return found


def _compiled(*arguments: str, text: str = "") -> ctypes.CDLL | str:
    """Compile a file or ``text`` and return the library, or why that failed."""
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
                    # A loaded library no longer needs its file.
                    return ctypes.CDLL(str(built))
                refusal = refusal or f"{compiler}: {(done.stderr.strip() or 'failed').splitlines()[0]}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler}: {error}"
    return refusal


@cache
def compiler_version() -> str | None:
    """Return the first line of the compiler's ``--version``; None if there is no compiler."""
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        command = [compiler, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler}: {error}"
    return next(iter(done.stdout.splitlines()), compiler)


def _compiler() -> str | None:
    candidates = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def _address(tensor: Tensor, row: int) -> int:
    """Return the address at which a row of ``tensor`` begins."""
    return tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()


def _rows_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.size(-1))


def _over_rows(compute: Callable[[int, int], None], num_rows: int, row_length: int) -> None:
    """Call ``compute(start, stop)`` on blocks of rows, one for each of PyTorch's threads if there is enough work."""
    num_threads = min(torch.get_num_threads(), num_rows, 1 + num_rows * row_length // _MIN_ELEMENTS_PER_THREAD)
    if num_threads <= 1 or planned_device() is not None:
        compute(0, num_rows)
        return
    bounds = [num_rows * k // num_threads for k in range(num_threads + 1)]
    # The compiled functions run without Python's global interpreter lock.
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(compute, bounds[:-1], bounds[1:]))


def _run(name: str, matrices: Sequence[Tensor], *numbers: float) -> None:
    """Call a function on the same rows of each matrix, with the number of rows and ``numbers``."""
    kernel = _kernel(name)

    def compute(start: int, stop: int) -> None:
        kernel(*(_address(matrix, start) for matrix in matrices), stop - start, *numbers)

    _over_rows(compute, *matrices[0].shape)


def swiglu(inner: Tensor) -> Tensor:
    """Compute ``elementwise.swiglu`` of a contiguous tensor."""
    width = inner.size(-1) // 2
    output = inner.new_empty(*inner.shape[:-1], width)
    _run("swiglu", (_rows_of(inner), _rows_of(output)), width)
    return output


def swiglu_gradient(inner: Tensor, grad_output: Tensor) -> Tensor:
    """Return the gradient of ``swiglu``'s input."""
    grad_inner = torch.empty_like(inner)
    matrices = (_rows_of(inner), _rows_of(grad_output.contiguous()), _rows_of(grad_inner))
    _run("swiglu_gradient", matrices, inner.size(-1) // 2)
    return grad_inner


def rotate_halves(
    input_: Tensor, cos: Tensor, sin: Tensor, *, backwards: bool = False, at_any_size: bool = False
) -> Tensor | None:
    """Rotate the pairs ``(i, i + d/2)`` of every head of ``[s, b, heads, d]`` by the angles ``[s, 1, 1, d/2]``.

    ``backwards`` rotates by the negative angles. ``at_any_size`` accepts small tensors and any strides, so that neither
    affects the choice. None if the compiled code does not support the call.
    """
    if at_any_size:
        input_ = input_.contiguous()
    rows, batch, heads, width = input_.shape
    # The stride of a dimension of size 1 is arbitrary.
    column_stride = input_.stride(2) if heads > 1 else input_.stride(1)

    def fits() -> bool:
        return (
            cos.shape == sin.shape == (rows, 1, 1, width // 2)
            and width % 2 == 0
            and input_.stride(3) == 1
            and (batch == 1 or heads == 1 or input_.stride(1) == heads * column_stride)
        )

    size = dispatch.ELEMENTWISE.min_size if at_any_size else input_.numel()
    if not dispatch.ELEMENTWISE.runs(input_, cos, sin, size=size, fits=fits):
        return None
    output = torch.empty(input_.shape, dtype=input_.dtype, device="cpu")
    cos, sin = cos.contiguous(), sin.contiguous()
    kernel, strides, sign = _kernel("rotate"), (input_.stride(0), column_stride), -1.0 if backwards else 1.0

    def compute(start: int, stop: int) -> None:
        to = _address(output, start), stop - start, batch * heads, width // 2
        kernel(_address(input_, start), *strides, *to, _address(cos, start), _address(sin, start), sign)

    _over_rows(compute, rows, batch * heads * width)
    return output


def rms_norm(input_: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute ``norms.rms_norm`` of contiguous tensors.

    Returns:
        The output, and ``rsqrt(mean(x^2) + eps)`` of each row, ``[..., 1]``.
    """
    output, scale = torch.empty_like(input_), input_.new_empty(*input_.shape[:-1], 1)
    rows = _rows_of(input_)
    _run("rms_norm", (rows, weight.expand(rows.shape), _rows_of(output), _rows_of(scale)), weight.numel(), eps)
    return output, scale


def rms_norm_gradient(
    input_: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    needs_input: bool,
    needs_weight: bool,
    num_parts: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight, where needed, from the arguments and results of ``rms_norm``.

    With ``num_parts`` the weight's gradient is ``[num_parts, n]``: sums over equal blocks of rows.
    """
    grad_input = torch.empty_like(input_) if needs_input else None
    rows, grad_rows, scales = _rows_of(input_), _rows_of(grad_output.contiguous()), _rows_of(scale)
    to_rows = None if grad_input is None else _rows_of(grad_input)
    kernel, sums = _kernel("rms_norm_gradient"), dict[int, Tensor]()
    num_rows, width = rows.shape

    def compute(start: int, stop: int) -> None:
        if needs_weight:
            # Each thread has its own sums.
            sums[start] = torch.zeros(weight.shape, dtype=torch.float64, device="cpu")
        to_input = None if to_rows is None else _address(to_rows, start)
        to_weight = sums[start].data_ptr() if needs_weight else None
        of_rows = _address(rows, start), _address(grad_rows, start), weight.data_ptr(), _address(scales, start)
        kernel(*of_rows, to_input, to_weight, stop - start, width)

    if num_parts is None:
        _over_rows(compute, num_rows, width)
    else:
        each = num_rows // num_parts

        def compute_parts(start: int, stop: int) -> None:
            for part in range(start, stop):
                compute(part * each, (part + 1) * each)

        _over_rows(compute_parts, num_parts, each * width)
    if not needs_weight:
        return grad_input, None
    # Add in the order of the rows, not in the order in which threads finish.
    in_order = torch.stack([sums[start] for start in sorted(sums)])
    return grad_input, (in_order.sum(0) if num_parts is None else in_order).to(weight.dtype)


def sums_of_squares(flat: Tensor, length: int) -> Tensor | None:
    """Return the sum of squares, in fp64, of each run of ``length`` elements of ``[n]``, in a fixed order of addition.

    None if the compiled code does not support the call.
    """
    if not dispatch.ELEMENTWISE.runs(flat, size=dispatch.ELEMENTWISE.min_size, fits=flat.is_contiguous):
        return None
    num_rows = -(-flat.numel() // length)
    kernel, sums = _kernel("sums_of_squares"), torch.empty(num_rows, dtype=torch.float64, device="cpu")

    def compute(start: int, stop: int) -> None:
        first, last = start * length, min(stop * length, flat.numel())
        kernel(_address(flat, first), _address(sums, start), last - first, length)

    _over_rows(compute, num_rows, length)
    return sums


def row_statistics(
    logits: Tensor,
    target_local: Tensor,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    want_sum: bool = False,
    exponentiate_: bool = False,
) -> Tensor:
    """Compute ``loss_reference.row_statistics`` without a softcap; the columns must be adjacent in memory."""
    assert softcap is None
    kernel = _kernel("row_statistics", logits.dtype)
    target_local = target_local.contiguous()
    statistics = torch.empty(logits.size(0), 4 if want_sum else 3, dtype=torch.float32, device="cpu")

    def compute(start: int, stop: int) -> None:
        matrix = _address(logits, start), logits.stride(0), stop - start, logits.size(1)
        options = 1.0 / temperature, want_sum, exponentiate_
        kernel(*matrix, _address(target_local, start), *options, _address(statistics, start))

    _over_rows(compute, *logits.shape)
    if exponentiate_:
        torch.autograd.graph.increment_version(logits)
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
    """Compute ``loss_reference.gradient_`` without a softcap; the columns must be adjacent in memory."""
    assert softcap is None
    kernel = _kernel("gradient", logits.dtype)
    numbers = [x if x is None else x.contiguous() for x in (target_local, shift, scale, at_target, rest)]

    def compute(start: int, stop: int) -> None:
        matrices = _address(logits, start), logits.stride(0), _address(out, start), out.stride(0)
        of_rows = (None if x is None else _address(x, start) for x in numbers)
        kernel(*matrices, stop - start, logits.size(1), *of_rows, 1.0 / temperature)

    _over_rows(compute, *logits.shape)
    # PyTorch did not see this write. Autograd must not mistake the new values for the values that it saved.
    torch.autograd.graph.increment_version(out)
