"""The loss' work on this rank's logits as Triton kernels; ``loss_reference`` says what each function computes.

One program per row. It reads the row in blocks, keeping a running maximum and the sum of exponentials below it; what is
read a second time, to become a gradient, is then still in the GPU's second-level cache. Rows are found with 64-bit
offsets, so logits may have more than 2^31 elements.

A program reads columns that lie side by side; there must be some. This module needs Triton: ``dispatch`` imports it
where it can be had.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.loss_reference import compute_dtype

# Triton's convention: what is known when a kernel is compiled has a name in capitals.
# ruff: noqa: N803

_MAX_BLOCK = 4096


@triton.jit
def _transform(x, CAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    """``y`` and its slope. A cap of 0 means no cap."""
    y = x
    slope = tl.full(x.shape, 1.0, x.dtype)
    if CAP > 0.0:
        # tanh, from an exponential that cannot overflow.
        decay = tl.exp(-2.0 * tl.abs(x / CAP))
        tanh = (1.0 - decay) / (1.0 + decay)
        y = tl.where(x < 0.0, -tanh, tanh) * CAP
        # 1 - tanh², without the difference.
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
    BLOCK: tl.constexpr,
):
    """``row_statistics`` of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    wide = statistics.dtype.element_ty
    target = tl.load(target_local + row)
    owned = target >= 0
    target_logit = tl.load(logits + target, mask=owned, other=0.0).to(wide)
    columns = tl.arange(0, BLOCK)
    maximum = tl.full((), float("-inf"), wide)
    shift = tl.zeros((), wide)
    sum_exp = tl.zeros((), wide)
    total = tl.zeros((), wide)
    for start in range(0, num_columns, BLOCK):
        inside = start + columns < num_columns
        x = tl.load(logits + start + columns, mask=inside, other=0.0).to(wide)
        y, _ = _transform(x, CAP, TEMPERATURE)
        y = tl.where(inside, y, float("-inf"))
        before = maximum
        maximum = tl.maximum(before, tl.max(y, 0))
        higher = _finite(maximum)
        # While all was -inf there is nothing to lower, and `before` makes the factor 0.
        sum_exp = sum_exp * tl.exp(before - higher) + tl.sum(tl.exp(y - higher), 0)
        if WANT_SUM:
            total += (shift - higher) * start + tl.sum(tl.where(inside, y - higher, 0.0), 0)
        shift = higher
    at_target, _ = _transform(target_logit, CAP, TEMPERATURE)
    if WANT_SUM:
        statistics += row * 4
        tl.store(statistics + 3, total)
    else:
        statistics += row * 3
    tl.store(statistics, maximum)
    tl.store(statistics + 1, sum_exp)
    tl.store(statistics + 2, tl.where(owned, at_target - shift, float("-inf")))
    if EXPONENTIATE:
        # What a thread reads above (the target's logit, a column that several threads hold) another may overwrite
        # below, so all must have read it first.
        tl.debug_barrier()
        for start in range(0, num_columns, BLOCK):
            inside = start + columns < num_columns
            x = tl.load(logits + start + columns, mask=inside, other=0.0).to(wide)
            y, slope = _transform(x, CAP, TEMPERATURE)
            result = tl.where(start + columns == target, 0.0, tl.exp(y - shift) * slope)
            tl.store(logits + start + columns, result.to(logits.dtype.element_ty), mask=inside)


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
    BLOCK: tl.constexpr,
):
    """``gradient_`` of one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    row_scale = tl.load(scale + row)
    target = tl.load(target_local + row)
    row_target = tl.where(target >= 0, tl.load(at_target + row), 0.0)
    nothing = (row_scale == 0.0) & (row_target == 0.0)
    x = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(shift.dtype.element_ty)
    y, slope = _transform(x, CAP, TEMPERATURE)
    result = tl.exp(y - _finite(tl.load(shift + row))) * row_scale
    if HAS_REST:
        row_rest = tl.load(rest + row)
        nothing = nothing & (row_rest == 0.0)
        result -= row_rest
    result = tl.where(columns == target, row_target, result) * slope
    result = tl.where(nothing, 0.0, result)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


def row_statistics(
    logits: Tensor,
    target_local: Tensor,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    want_sum: bool = False,
    exponentiate_: bool = False,
) -> Tensor:
    """As ``loss_reference.row_statistics``."""
    num_rows, num_columns = logits.shape
    numbers = 4 if want_sum else 3
    statistics = torch.empty(num_rows, numbers, dtype=compute_dtype(logits.dtype), device=logits.device)
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
            BLOCK=block_size(num_columns),
            num_warps=8,
        )
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
    """As ``loss_reference.gradient_``."""
    num_rows, num_columns = logits.shape
    block = block_size(num_columns)
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
            BLOCK=block,
            num_warps=8,
        )


def block_size(num_columns: int) -> int:
    """How many columns a program holds at once."""
    size: int = triton.next_power_of_2(num_columns)
    return max(16, min(_MAX_BLOCK, size))
