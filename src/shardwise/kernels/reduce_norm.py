"""What lies between two products of a model's inference in fused mode, on memory that the ranks reach in each other.

Each rank has its partial sum ``[n, h]`` in its buffer and owns some of the rows. Of these it sums the partial sums of
all ranks, adds the residual and a bias, which makes the new residual, and writes the norm of that into the same rows of
every buffer: reduce-scatter, residual, norm and all-gather in one pass over each row. No row is anybody else's, so that
nothing is read after it was written.

``reduce_norm_`` is the definition. ``fused_reduce_norm_`` does it on CUDA devices by one Triton kernel, between two
barriers: all products are in the buffers before it, and all norms after it.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import dispatch

# A program holds a row.
MAX_WIDTH = 1 << 14


def reduce_norm_(
    buffers: Sequence[Tensor],
    start: int,
    residual: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
) -> Tensor:
    """The work of the rank that owns the rows from ``start`` on.

    Args:
        buffers: each rank's partial sum, ``[n, h]``; of these rows overwritten with the norm of the new residual.
        start: the first row.
        residual: ``[m, h]``, of these rows; not modified.
        bias: ``[h]`` or None, added once.
        weight: ``[h]``, of the norm.
        norm_bias: ``[h]`` of LayerNorm; None for RMSNorm.
        eps: added to the variance.

    Returns:
        The new residual, ``[m, h]``. Sums and norm are in fp32 (fp64 for fp64), and the norm is that of what is
        returned, after rounding.
    """
    rows = slice(start, start + residual.size(0))
    wide = torch.promote_types(residual.dtype, torch.float32)
    total = residual.to(wide) if bias is None else residual.to(wide) + bias.to(wide)
    for buffer in buffers:
        total = total + buffer[rows].to(wide)
    new = total.to(residual.dtype)
    centered = new.to(wide)
    if norm_bias is not None:
        centered = centered - centered.mean(-1, keepdim=True)
    normed = centered * (centered.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(wide)
    if norm_bias is not None:
        normed = normed + norm_bias.to(wide)
    for buffer in buffers:
        buffer[rows] = normed.to(buffer.dtype)
    return new


def runs_fused(buffer: Tensor) -> bool:
    """Whether ``fused_reduce_norm_`` takes a buffer ``[..., h]`` in symmetric memory; the same on every rank."""
    return dispatch.REDUCE_NORM.runs(buffer, fits=lambda: 0 < buffer.size(-1) <= MAX_WIDTH)


def fused_reduce_norm_(
    handle: Any,
    addresses: Tensor,
    start: int,
    residual: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
) -> Tensor:
    """``reduce_norm_`` on every rank at once.

    Args:
        handle: PyTorch's symmetric-memory handle of the buffers.
        addresses: int64 ``[t]``, where each rank's buffer lies in this rank's address space.
        start, residual, bias, weight, norm_bias, eps: as there.
    """
    kernels = importlib.import_module("shardwise.kernels.reduce_norm_triton")
    handle.barrier(channel=0)
    new: Tensor = kernels.reduce_norm_(addresses, start, residual.contiguous(), bias, weight, norm_bias, eps)
    handle.barrier(channel=0)
    return new
