"""One initialisation for every layout: a rank draws the whole parameter's numbers and keeps its slice.

The whole weight is the same bit for bit, whatever the number of ranks, as long as every rank's default generator is in
the same state; and the generator ends in the same state too, so that the next parameter agrees as well. On a CPU the
values are those of ``init_method(torch.empty(global_shape))``. Known methods are drawn a bounded block of rows at a
time, so that no rank ever holds more than its slice and one block; an arbitrary method is given the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.sharding import ParamLayout

InitMethod = Callable[[Tensor], object]

_BLOCK_ELEMENTS = 1 << 20
# PyTorch's CPU normal fills 16 values at a time: a block that is a multiple of 16 elements continues the same stream.
_ROW_MULTIPLE = 16


@dataclass(frozen=True)
class Normal:
    """Fill with independent normal numbers of mean 0."""

    std: float

    def __call__(self, tensor: Tensor) -> Tensor:
        return torch.nn.init.normal_(tensor, mean=0.0, std=self.std)


def init_method_normal(sigma: float) -> Normal:
    """Normal with standard deviation ``sigma``."""
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Normal:
    """Normal with standard deviation ``sigma / sqrt(multiplier * num_layers)``, for weights that write to the residual.

    Source: Radford et al. 2019, section 2.3.
    """
    return Normal(sigma / math.sqrt(multiplier * num_layers))


def _draws_element_by_element(init_method: InitMethod) -> bool:
    return isinstance(init_method, Normal) or init_method in (torch.nn.init.zeros_, torch.nn.init.ones_)


def _blocks_continue_one_stream(device: torch.device) -> bool:
    # Elsewhere a number depends on how many are drawn with it, so that one rank must draw the same blocks as several.
    return device.type == "cpu"


@torch.no_grad()
def initialize_shard_(shard: Tensor, layout: ParamLayout, rank: int, init_method: InitMethod) -> Tensor:
    """Fill ``shard`` with this rank's slice of ``init_method`` applied to the whole parameter.

    Args:
        shard: this rank's part, of shape ``layout.local_shape(rank)``; overwritten.
        layout: where the part lies in the whole.
        rank: this rank in the tensor-parallel group.
        init_method: fills a tensor in place.

    Returns:
        ``shard``.
    """
    if shard.is_meta:
        return shard
    whole_is_here = layout.dim is None or (layout.world_size == 1 and _blocks_continue_one_stream(shard.device))
    if whole_is_here and _draws_element_by_element(init_method):
        init_method(shard)
        return shard
    if not _draws_element_by_element(init_method):
        whole = shard.new_empty(layout.global_shape)
        init_method(whole)
        return shard.copy_(layout.take(whole, rank))
    if layout.dim == 0:
        _fill_rows(shard, layout, rank, init_method)
    else:
        _fill_blocks(shard, layout, rank, init_method)
    return shard


def _row_blocks(num_rows: int, row_elements: int) -> list[tuple[int, int]]:
    """Runs of rows of about a million elements, each run but the last a multiple of 16 rows."""
    rows = max(_ROW_MULTIPLE, _BLOCK_ELEMENTS // max(row_elements, 1) // _ROW_MULTIPLE * _ROW_MULTIPLE)
    starts = list(range(0, num_rows, rows)) or [0]
    if len(starts) > 1 and (num_rows - starts[-1]) * row_elements < _ROW_MULTIPLE:
        # The last 16 values of a fill depend on each other; a shorter tail would be drawn by another rule.
        starts.pop()
    return list(zip(starts, [*starts[1:], num_rows], strict=True))


def _fill_rows(shard: Tensor, layout: ParamLayout, rank: int, init_method: InitMethod) -> None:
    rows, row_shape = layout.global_shape[0], layout.global_shape[1:]
    for start, stop in _row_blocks(rows, math.prod(row_shape)):
        block = shard.new_empty((stop - start, *row_shape))
        init_method(block)
        offset = 0
        for first, last in layout.intervals[rank]:
            low, high = max(first, start), min(last, stop)
            if low < high:
                where = offset + low - first
                shard[where : where + high - low].copy_(block[low - start : high - start])
            offset += last - first


def _fill_blocks(shard: Tensor, layout: ParamLayout, rank: int, init_method: InitMethod) -> None:
    assert layout.dim is not None
    rows, row_shape = layout.global_shape[0], layout.global_shape[1:]
    for start, stop in _row_blocks(rows, math.prod(row_shape)):
        block = shard.new_empty((stop - start, *row_shape))
        init_method(block)
        parts = [block.narrow(layout.dim, first, last - first) for first, last in layout.intervals[rank]]
        shard[start:stop].copy_(torch.cat(parts, layout.dim))
