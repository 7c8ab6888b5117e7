"""Triton kernels for the forward and the backward of ``norms.add_rms_norm``, and for ``norms.reduce_norm_``.

Two operations would read the sum once more, in the forward and in the backward; here a program holds a whole row. In
the backward each program processes many rows and adds up its part of the weight's gradient, so that few partial sums
remain. The number of programs, and with it the bits of the sum, depends only on the number of rows.

``reduce_norm_`` has one program per row that this rank owns. It reads and writes the row in every rank's buffer, at
addresses that are valid in this process. The norm needs a sum over the row, so the program reads the whole row before
it writes any of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.elementwise import rows_of

# Triton's convention: compile-time constants have names in capitals.
# ruff: noqa: N803

# Programs of the backward: two for each multiprocessor of the largest GPUs.
_PROGRAMS = 264


@triton.jit
def add_rms_norm_kernel(
    residual,
    added,
    weight,
    total,
    normed,
    scale,
    residual_stride,
    added_stride,
    num_columns,
    EPS: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row."""
    wide = tl.float64 if IS_DOUBLE else tl.float32
    dtype = total.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    x = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(wide)
    x += tl.load(added + row * added_stride + columns, mask=inside, other=0.0).to(wide)
    # The norm uses the stored sum, which is rounded.
    rounded = x.to(dtype)
    tl.store(total + row * num_columns + columns, rounded, mask=inside)
    x = rounded.to(wide)
    row_scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / num_columns + EPS)
    tl.store(scale + row, row_scale)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(wide)
    tl.store(normed + row * num_columns + columns, (x * row_scale * w).to(dtype), mask=inside)


@triton.jit
def add_rms_norm_gradient_kernel(
    total,
    weight,
    scale,
    grad_normed,
    grad_total,
    grad_input,
    partial_sums,
    normed_stride,
    total_stride,
    num_rows,
    num_columns,
    HAS_GRAD_TOTAL: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute every ``num_programs``-th row, from this program's index on."""
    wide = tl.float64 if IS_DOUBLE else tl.float32
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    w = tl.load(weight + columns, mask=inside, other=0.0).to(wide)
    sums = tl.zeros((BLOCK,), wide)
    row = tl.program_id(0).to(tl.int64)
    for _ in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        normalized = tl.load(total + row * num_columns + columns, mask=inside, other=0.0).to(wide)
        grad = tl.load(grad_normed + row * normed_stride + columns, mask=inside, other=0.0).to(wide)
        row_scale = tl.load(scale + row)
        normalized *= row_scale
        if WANT_WEIGHT:
            sums += grad * normalized
        grad *= w
        mean = tl.sum(grad * normalized, 0) / num_columns
        result = (grad - normalized * mean) * row_scale
        if HAS_GRAD_TOTAL:
            result += tl.load(grad_total + row * total_stride + columns, mask=inside, other=0.0).to(wide)
        tl.store(grad_input + row * num_columns + columns, result.to(grad_input.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)
    if WANT_WEIGHT:
        tl.store(partial_sums + tl.program_id(0).to(tl.int64) * num_columns + columns, sums, mask=inside)


def add_rms_norm(residual: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``norms.add_rms_norm``, and ``rsqrt(mean(x^2) + eps)`` of each row of the sum, ``[n]``."""
    rows, added_rows = rows_of(residual), rows_of(added)
    num_rows, num_columns = rows.shape
    total, normed = (torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) for _ in range(2))
    wide = torch.promote_types(residual.dtype, torch.float32)
    scale = torch.empty(num_rows, dtype=wide, device=residual.device)
    block = block_size(num_columns)
    with torch.cuda.device_of(residual):
        add_rms_norm_kernel[(num_rows,)](
            rows,
            added_rows,
            weight.contiguous(),
            total,
            normed,
            scale,
            rows.stride(0),
            added_rows.stride(0),
            num_columns,
            EPS=eps,
            IS_DOUBLE=residual.dtype == torch.float64,
            BLOCK=block,
            num_warps=num_warps(block),
        )
    return total, normed, scale


def add_rms_norm_gradient(
    total: Tensor, weight: Tensor, scale: Tensor, grad_normed: Tensor, grad_total: Tensor | None, *, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of each term of the sum, and the weight's if needed, from ``add_rms_norm``'s results."""
    grad_rows = rows_of(grad_normed)
    more_rows = grad_rows if grad_total is None else rows_of(grad_total)
    num_rows, num_columns = grad_rows.shape
    grad_input = torch.empty_like(total)
    num_programs = min(num_rows, _PROGRAMS)
    partial_sums = scale.new_empty(num_programs if needs_weight else 0, num_columns)
    block = block_size(num_columns)
    with torch.cuda.device_of(total):
        add_rms_norm_gradient_kernel[(num_programs,)](
            total,
            weight.contiguous(),
            scale,
            grad_rows,
            more_rows,
            grad_input,
            partial_sums,
            grad_rows.stride(0),
            more_rows.stride(0),
            num_rows,
            num_columns,
            HAS_GRAD_TOTAL=grad_total is not None,
            WANT_WEIGHT=needs_weight,
            IS_DOUBLE=total.dtype == torch.float64,
            BLOCK=block,
            num_warps=num_warps(block),
        )
    return grad_input, partial_sums.sum(0).to(weight.dtype) if needs_weight else None


def block_size(num_columns: int) -> int:
    """Return the number of columns that a program holds: a whole row."""
    size: int = triton.next_power_of_2(num_columns)
    return size


def num_warps(block: int) -> int:
    """Return the number of warps whose threads hold 8 numbers each."""
    return max(1, min(32, block // 256))


@triton.jit
def reduce_norm_kernel(
    addresses,
    residual,
    new_residual,
    bias,
    weight,
    norm_bias,
    start,
    num_columns,
    EPS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_LAYER_NORM: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row."""
    dtype = residual.dtype.element_ty
    wide = tl.float64 if IS_DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    total = tl.load(residual + row * num_columns + columns, mask=inside, other=0.0).to(wide)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(wide)
    offsets = (start + row) * num_columns + columns
    for rank in tl.static_range(WORLD_SIZE):
        buffer = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(dtype)), 16)
        total += tl.load(buffer + offsets, mask=inside, other=0.0).to(wide)
    new = total.to(dtype)
    tl.store(new_residual + row * num_columns + columns, new, mask=inside)
    centered = new.to(wide)
    if IS_LAYER_NORM:
        centered = tl.where(inside, centered - tl.sum(centered, 0) / num_columns, 0.0)
    variance = tl.sum(centered * centered, 0) / num_columns
    normed = centered / tl.sqrt(variance + EPS) * tl.load(weight + columns, mask=inside, other=0.0).to(wide)
    if IS_LAYER_NORM:
        normed += tl.load(norm_bias + columns, mask=inside, other=0.0).to(wide)
    for rank in tl.static_range(WORLD_SIZE):
        buffer = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(dtype)), 16)
        tl.store(buffer + offsets, normed.to(dtype), mask=inside)


def reduce_norm_(
    addresses: Tensor,
    start: int,
    residual: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Compute ``norms.reduce_norm_`` on buffers of the residual's dtype at ``addresses``, multiples of 16."""
    num_columns = residual.size(-1)
    num_rows = residual.shape[:-1].numel()
    new = torch.empty_like(residual)
    # A rank may own no row.
    if num_rows > 0:
        block = max(16, block_size(num_columns))
        with torch.cuda.device_of(residual):
            reduce_norm_kernel[(num_rows,)](
                addresses,
                residual,
                new,
                # The kernel ignores this if there is no bias.
                weight if bias is None else bias,
                weight,
                weight if norm_bias is None else norm_bias,
                start,
                num_columns,
                EPS=eps,
                WORLD_SIZE=addresses.numel(),
                HAS_BIAS=bias is not None,
                IS_LAYER_NORM=norm_bias is not None,
                IS_DOUBLE=residual.dtype == torch.float64,
                BLOCK=block,
                num_warps=num_warps(block // 2),
            )
    return new
