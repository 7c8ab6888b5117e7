"""``reduce_norm.reduce_norm_`` as one Triton kernel; see there.

One program per row that this rank owns. It reads the row in every rank's buffer and writes it there, by addresses that
are valid in this process. The norm needs a sum over the row, so all of it is read before any of it is written.

This module needs Triton: ``reduce_norm`` imports it where ``dispatch`` says that it can be had.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton's convention: what is known when a kernel is compiled has a name in capitals.
# ruff: noqa: N803


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
    """One row."""
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
    """As ``reduce_norm.reduce_norm_``, on buffers of the residual's dtype.

    Args:
        addresses: of the buffers, int64 ``[t]``, multiples of 16.
        start, residual, bias, weight, norm_bias, eps: as there.
    """
    num_columns = residual.size(-1)
    num_rows = residual.shape[:-1].numel()
    new = torch.empty_like(residual)
    # A rank may own no row.
    if num_rows > 0:
        block = block_size(num_columns)
        with torch.cuda.device_of(residual):
            reduce_norm_kernel[(num_rows,)](
                addresses,
                residual,
                new,
                # Not looked at where there is none.
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
                num_warps=num_warps(block),
            )
    return new


def block_size(num_columns: int) -> int:
    """How many columns a program holds: a row."""
    size: int = triton.next_power_of_2(num_columns)
    return max(16, size)


def num_warps(block: int) -> int:
    """So that a thread holds 16 numbers."""
    return max(1, min(32, block // 512))
