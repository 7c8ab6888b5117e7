"""Triton kernels for the loss on this rank's logits; ``loss_reference`` defines each function.

For the statistics one program reads one row. Each thread keeps a maximum, and a sum of exponentials relative to it, for
every column of a block that it holds. The program combines them at the end of the row, so that threads wait for each
other only a few times per row of any length. A block has several columns for each sum, which is rescaled to a new
maximum once for all of them.

With ``exponentiate_`` a row is read a second time, from the GPU's second-level cache. Longer rows have more warps
(``launch_shape``). The registers of an H100 then suffice for 132 rows of 2^17 columns at once, which in bf16 take 35 MB
of its 50 MB cache; shorter rows take less. The second pass begins at the end of the row, which was read last, so that
part of a row that does not fit is still in the cache.

Rows have 64-bit offsets, so logits may have more than 2^31 elements. A thread reads 16 bytes at once if rows begin at
multiples of 16 bytes, for any number of columns: the columns after the last 16 bytes are read separately. Columns must
be adjacent in memory, and there must be at least one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.loss_reference import compute_dtype

# Triton's convention: compile-time constants have names in capitals.
# ruff: noqa: N803

_GRADIENT_BLOCK = 4096
_VECTOR_BYTES = 16


@triton.jit
def _transform(x, CAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    """Return ``y`` and its slope. A cap of 0 means no cap."""
    y = x
    slope = tl.full(x.shape, 1.0, x.dtype)
    if CAP > 0.0:
        # tanh from an exponential that cannot overflow.
        decay = tl.exp(-2.0 * tl.abs(x / CAP))
        tanh = (1.0 - decay) / (1.0 + decay)
        y = tl.where(x < 0.0, -tanh, tanh) * CAP
        # 1 - tanh² without a subtraction.
        slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    if TEMPERATURE != 1.0:
        y = y / TEMPERATURE
        slope = slope / TEMPERATURE
    return y, slope


@triton.jit
def _finite(maximum):
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def statistics_kernel(
    logits,
    target_local,
    statistics,
    stride,
    num_columns,
    CAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    WANT_SUM: tl.constexpr,
    EXPONENTIATE: tl.constexpr,
    VECTOR: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute ``row_statistics`` of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += tl.multiple_of(row * stride, VECTOR)
    wide = statistics.dtype.element_ty
    target = tl.load(target_local + row)
    owned = target >= 0
    target_logit = tl.load(logits + target, mask=owned, other=0.0).to(wide)
    columns = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    maximum = tl.full((BLOCK,), float("-inf"), wide)
    sum_exp = tl.zeros((BLOCK,), wide)
    total = tl.zeros((BLOCK,), wide)
    # The compiler knows that this bound cuts through no vector.
    full = num_columns // VECTOR * VECTOR
    num_tiles = tl.cdiv(full, DEPTH * BLOCK)
    for tile in range(num_tiles):
        place = tile * (DEPTH * BLOCK) + columns
        inside = place < full
        x = tl.load(logits + place, mask=inside, other=0.0).to(wide)
        y, _ = _transform(x, CAP, TEMPERATURE)
        y = tl.where(inside, y, float("-inf"))
        before = maximum
        maximum = tl.maximum(before, tl.max(y, 0))
        higher = _finite(maximum)
        # While all values are -inf there is nothing to rescale, and `before` makes the factor 0.
        sum_exp = sum_exp * tl.exp(before - higher) + tl.sum(tl.exp(y - higher[None, :]), 0)
        if WANT_SUM:
            # Blocks before the last are full.
            total += (_finite(before) - higher) * (tile * DEPTH)
            total += tl.sum(tl.where(inside, y - higher[None, :], 0.0), 0)
    # The columns after the last vector; each thread keeps its values.
    last = full + tl.arange(0, 32)
    inside_last = last < num_columns
    x_last = tl.load(logits + last, mask=inside_last, other=0.0).to(wide)
    y_last, slope_last = _transform(x_last, CAP, TEMPERATURE)
    y_last = tl.where(inside_last, y_last, float("-inf"))
    row_maximum = tl.maximum(tl.max(maximum, 0), tl.max(y_last, 0))
    shift = _finite(row_maximum)
    at_target, _ = _transform(target_logit, CAP, TEMPERATURE)
    if WANT_SUM:
        statistics += row * 4
        count = (full - tl.arange(0, BLOCK) + BLOCK - 1) // BLOCK
        total += (_finite(maximum) - shift) * tl.maximum(count, 0).to(wide)
        tl.store(statistics + 3, tl.sum(total, 0) + tl.sum(tl.where(inside_last, y_last - shift, 0.0), 0))
    else:
        statistics += row * 3
    exponentials_last = tl.exp(y_last - shift)
    tl.store(statistics, row_maximum)
    tl.store(statistics + 1, tl.sum(sum_exp * tl.exp(maximum - shift), 0) + tl.sum(exponentials_last, 0))
    tl.store(statistics + 2, tl.where(owned, at_target - shift, float("-inf")))
    if EXPONENTIATE:
        # Below, other threads may overwrite values that this one reads above (the target's logit, the last columns).
        tl.debug_barrier()
        result_last = tl.where(last == target, 0.0, exponentials_last * slope_last)
        tl.store(logits + last, result_last.to(logits.dtype.element_ty), mask=inside_last)
        for tile in range(num_tiles):
            place = (num_tiles - 1 - tile) * (DEPTH * BLOCK) + columns
            inside = place < full
            x = tl.load(logits + place, mask=inside, other=0.0).to(wide)
            y, slope = _transform(x, CAP, TEMPERATURE)
            result = tl.where(place == target, 0.0, tl.exp(y - shift) * slope)
            tl.store(logits + place, result.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(
    out,
    logits,
    target_local,
    shift,
    scale,
    at_target,
    rest,
    out_stride,
    stride,
    num_columns,
    CAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    HAS_REST: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute ``gradient_`` of one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    out += tl.multiple_of(row * out_stride, VECTOR)
    logits += tl.multiple_of(row * stride, VECTOR)
    row_shift = _finite(tl.load(shift + row))
    row_scale = tl.load(scale + row)
    target = tl.load(target_local + row)
    row_target = tl.where(target >= 0, tl.load(at_target + row), 0.0)
    nothing = (row_scale == 0.0) & (row_target == 0.0)
    row_rest = tl.zeros((), row_scale.dtype)
    if HAS_REST:
        row_rest = tl.load(rest + row)
        nothing = nothing & (row_rest == 0.0)
    full = num_columns // VECTOR * VECTOR
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers = (target, row_shift, row_scale, row_target, row_rest, nothing)
    _write_gradient(out, logits, place, place < full, numbers, CAP, TEMPERATURE)
    if tl.program_id(1) == 0:
        # The columns after the last vector.
        last = full + tl.arange(0, 32)
        _write_gradient(out, logits, last, last < num_columns, numbers, CAP, TEMPERATURE)


@triton.jit
def _write_gradient(out, logits, place, inside, numbers, CAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    target, shift, scale, at_target, rest, nothing = numbers
    x = tl.load(logits + place, mask=inside, other=0.0).to(shift.dtype)
    y, slope = _transform(x, CAP, TEMPERATURE)
    result = tl.exp(y - shift) * scale - rest
    result = tl.where(place == target, at_target, result) * slope
    result = tl.where(nothing, 0.0, result)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


def row_statistics(
    logits: Tensor,
    target_local: Tensor,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    want_sum: bool = False,
    exponentiate_: bool = False,
) -> Tensor:
    """Compute ``loss_reference.row_statistics``."""
    num_rows, num_columns = logits.shape
    numbers = 4 if want_sum else 3
    statistics = torch.empty(num_rows, numbers, dtype=compute_dtype(logits.dtype), device=logits.device)
    block, depth, num_warps = launch_shape(num_columns, statistics.element_size())
    with torch.cuda.device_of(logits):
        statistics_kernel[(num_rows,)](
            logits,
            target_local.contiguous(),
            statistics,
            logits.stride(0),
            num_columns,
            CAP=float(softcap or 0.0),
            TEMPERATURE=float(temperature),
            WANT_SUM=want_sum,
            EXPONENTIATE=exponentiate_,
            VECTOR=vector_size(logits),
            DEPTH=depth,
            BLOCK=block,
            num_warps=num_warps,
        )
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
    """Compute ``loss_reference.gradient_``."""
    num_rows, num_columns = logits.shape
    block, num_warps = gradient_shape(num_columns)
    with torch.cuda.device_of(logits):
        gradient_kernel[(num_rows, triton.cdiv(num_columns, block))](
            out,
            logits,
            target_local.contiguous(),
            shift.contiguous(),
            scale.contiguous(),
            at_target.contiguous(),
            # The kernel does not read it without HAS_REST.
            scale if rest is None else rest.contiguous(),
            out.stride(0),
            logits.stride(0),
            num_columns,
            CAP=float(softcap or 0.0),
            TEMPERATURE=float(temperature),
            HAS_REST=rest is not None,
            VECTOR=min(vector_size(out), vector_size(logits)),
            BLOCK=block,
            num_warps=num_warps,
        )
    # PyTorch did not see this write; see ``compiled.gradient_``.
    torch.autograd.graph.increment_version(out)


def launch_shape(num_columns: int, wide_bytes: int = 4) -> tuple[int, int, int]:
    """Return the launch of ``statistics_kernel``: columns with separate sums, rows of a block, and warps."""
    block, depth, num_warps = next(shape for columns, *shape in _SHAPES if num_columns <= columns)
    # Registers hold half as many numbers of twice the size.
    return (block, depth, num_warps) if wide_bytes == 4 else (max(32, block // 2), max(1, depth // 2), num_warps)


# Largest number of columns; columns of a block, rows of a block, and warps. A thread has 8 adjacent columns (16 bytes
# in bf16), or 4 in fp64. These values have not been tuned on a GPU yet.
_SHAPES = ((256, 256, 1, 1), (1024, 1024, 1, 4), (8192, 1024, 4, 4), (32768, 2048, 4, 8), (1 << 62, 4096, 4, 16))


def gradient_shape(num_columns: int) -> tuple[int, int]:
    """Return the number of columns of a program of ``gradient_kernel``, and of its warps."""
    block: int = max(32, min(_GRADIENT_BLOCK, triton.next_power_of_2(num_columns)))
    return block, max(1, block // 512)


def vector_size(matrix: Tensor) -> int:
    """Return the number of elements, of at most 16 bytes, that one load can read at the start of every row."""
    size = matrix.element_size()
    elements = _VECTOR_BYTES // size
    while matrix.data_ptr() % (elements * size) or matrix.stride(0) % elements:
        elements //= 2
    return elements
