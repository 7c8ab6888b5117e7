"""The position of each rank's part in the whole parameter.

A dimension may consist of ``stride`` *sections* that are split separately. For example, the gate and the up projection
of a gated MLP are two sections of one weight, so that every rank holds matching halves of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.core.errors import ShardingError
from shardwise.core.sharding.balanced import Interval, checked_dim, checked_sizes, divide, intervals_of_sizes


@dataclass(frozen=True)
class ParamLayout:
    """The rows or columns of one parameter that each rank holds.

    Layers read the layout for initialisation, the optimizer for each rank's gradients, and checkpoints for the offsets
    of the ranks' parts.

    Attributes:
        global_shape: shape of the whole parameter.
        dim: dimension that is split; None if every rank holds the whole parameter.
        intervals: for each rank the intervals of indices along ``dim`` that it holds, in its local order. Different
            ranks may hold the same interval (replicated key-value heads). All intervals together cover the dimension.
            Empty if ``dim`` is None.
        world_size: number of ranks.
        stride: number of sections that were split separately (``partition_stride`` of the parameter).
    """

    global_shape: tuple[int, ...]
    dim: int | None
    intervals: tuple[tuple[Interval, ...], ...]
    world_size: int
    stride: int = 1

    @classmethod
    def replicated(cls, global_shape: Sequence[int], world_size: int) -> ParamLayout:
        """Create a layout in which every rank holds the whole parameter."""
        return cls(tuple(global_shape), None, (), world_size)

    @classmethod
    def split(
        cls,
        global_shape: Sequence[int],
        dim: int,
        world_size: int,
        *,
        stride: int = 1,
        sizes: Sequence[int] | None = None,
    ) -> ParamLayout:
        """Create a layout that splits ``dim`` over the ranks by the balanced rule, or into the given ``sizes``.

        Args:
            global_shape: shape of the whole parameter.
            dim: dimension to split; negative values count from the end.
            world_size: number of ranks.
            stride: number of equal sections of the dimension that are split separately.
            sizes: each rank's size in one section; None means the balanced rule.

        Raises:
            ShardingError: there is no such dimension, ``stride`` does not divide it, or ``sizes`` do not sum to a
                section.
        """
        shape = tuple(global_shape)
        dim = checked_dim(dim, shape)
        section = divide(shape[dim], stride)
        sizes = checked_sizes(sizes, section, world_size, f"dimension {dim} of shape {list(shape)}")
        per_rank = tuple(
            tuple((start + k * section, stop + k * section) for k in range(stride))
            for start, stop in intervals_of_sizes(sizes)
        )
        return cls(shape, dim, per_rank, world_size, stride)

    @classmethod
    def of_intervals(
        cls, global_shape: Sequence[int], dim: int, intervals: Sequence[Sequence[Interval]]
    ) -> ParamLayout:
        """Create a layout in which each rank holds the given intervals along ``dim``, in the given order.

        Several ranks may hold the same interval, and together they hold every index. Adjacent intervals are joined.
        """
        shape = tuple(global_shape)
        dim = checked_dim(dim, shape)
        joined = tuple(tuple(_merge_adjacent(runs)) for runs in intervals)
        covered = 0
        for start, stop in sorted(run for runs in joined for run in runs):
            if start > covered or not 0 <= start <= stop <= shape[dim]:
                raise ShardingError(
                    f"dimension {dim} of shape {list(shape)}: the interval ({start}, {stop}) does not lie in it, or no "
                    f"rank holds the indices from {covered} on"
                )
            covered = max(covered, stop)
        if covered != shape[dim]:
            raise ShardingError(f"dimension {dim} of shape {list(shape)}: no rank holds the indices from {covered} on")
        return cls(shape, dim, joined, len(joined))

    def local_size(self, rank: int) -> int:
        """Return the number of indices of the split dimension that ``rank`` holds."""
        assert self.dim is not None
        return sum(stop - start for start, stop in self.intervals[rank])

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part that ``rank`` holds."""
        if self.dim is None:
            return self.global_shape
        shape = list(self.global_shape)
        shape[self.dim] = self.local_size(rank)
        return tuple(shape)

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Return the part of ``whole`` (shape ``global_shape``) that ``rank`` holds; a view if it is one interval."""
        if tuple(whole.shape) != self.global_shape:
            raise ShardingError(f"expected a tensor of shape {list(self.global_shape)}, got {list(whole.shape)}")
        if self.dim is None:
            return whole
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.intervals[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def assemble(self, shards: Sequence[Tensor]) -> Tensor:
        """Assemble the whole parameter from every rank's part, in rank order, in a new tensor."""
        if len(shards) != self.world_size:
            raise ShardingError(f"expected {self.world_size} shards, one per rank, got {len(shards)}")
        whole = shards[0].new_empty(self.global_shape)
        # If several ranks hold the same part, the first rank's values win.
        for rank in reversed(range(self.world_size)):
            self.place_(whole, rank, shards[rank])
        return whole

    def place_(self, whole: Tensor, rank: int, shard: Tensor) -> None:
        """Copy the part that ``rank`` holds to its place in ``whole`` (shape ``global_shape``)."""
        if tuple(shard.shape) != self.local_shape(rank):
            raise ShardingError(
                f"shard of rank {rank} has shape {list(shard.shape)}, expected {list(self.local_shape(rank))}"
            )
        if self.dim is None:
            whole.copy_(shard)
            return
        offset = 0
        for start, stop in self.intervals[rank]:
            whole.narrow(self.dim, start, stop - start).copy_(shard.narrow(self.dim, offset, stop - start))
            offset += stop - start


@dataclass(frozen=True)
class Replicas:
    """The axes over which a parameter is replicated, and the axes over which its gradient is reduced.

    A module stores its replicas next to the ``ParamLayout``. Axes are named as in ``core.topology.Groups``: ``"tp"``,
    ``"dp"``, ``"embd"`` for the first and the last pipeline stage, and ``"expert_dp"`` for the copies of an expert.

    Attributes:
        same_over: axes whose ranks hold the same values. Over ``"tp"`` this concerns only the values that the
            layout assigns to several ranks.
        summed_over: axes over which each rank's gradient is a partial sum, besides the data-parallel axis: ``"dp"``, or
            ``"expert_dp"`` of an expert.
        is_copy: whether an earlier stage also holds the parameter, and counts it.
    """

    same_over: tuple[str, ...] = ("tp", "dp")
    summed_over: tuple[str, ...] = ()
    is_copy: bool = False

    @property
    def is_of_expert(self) -> bool:
        """Whether the parameter is one of experts, whose layout is over the group ``experts`` instead of ``tp``."""
        return "expert_dp" in self.same_over


class Segment(NamedTuple):
    """An interval of indices along the split dimension that no rank's boundary cuts.

    It starts at ``start`` in the whole parameter and at ``local_start`` in the rank's part.
    """

    start: int
    length: int
    local_start: int


def segments(layout: ParamLayout, rank: int) -> list[Segment]:
    """Divide the part of ``rank`` along the split dimension wherever any rank's part begins or ends.

    Any two segments, of any ranks, are therefore identical or disjoint. Comparing their first indices is enough to
    write each interval once. ShardingError if the rank holds an index twice.
    """
    assert layout.dim is not None
    if layout.global_shape[layout.dim] == 0:
        return [Segment(0, 0, 0)]
    runs_of_rank = [_merge_adjacent(runs) for runs in layout.intervals]
    cuts = sorted({edge for runs in runs_of_rank for run in runs for edge in run})
    result = []
    local_start = 0
    for start, stop in runs_of_rank[rank]:
        edges = [cut for cut in cuts if start <= cut <= stop]
        result += [Segment(a, b - a, local_start + a - start) for a, b in pairwise(edges)]
        local_start += stop - start
    if len({segment.start for segment in result}) != len(result):
        raise ShardingError(f"rank {rank} holds an index twice: its intervals are {list(layout.intervals[rank])}")
    return result


@cache
def holders(layout: ParamLayout) -> dict[Interval, tuple[int, ...]]:
    """Map each interval of all ranks' ``segments``, in ascending order, to the ranks that hold it, also ascending."""
    ranks: dict[Interval, tuple[int, ...]] = {}
    for rank in range(layout.world_size):
        for start, length, _ in segments(layout, rank):
            run = (start, start + length)
            ranks[run] = (*ranks.get(run, ()), rank)
    return dict(sorted(ranks.items()))


def has_copies(layout: ParamLayout) -> bool:
    """True if several ranks hold the same part of a parameter that is split."""
    return layout.dim is not None and any(len(ranks) > 1 for ranks in holders(layout).values())


def _merge_adjacent(runs: Sequence[Interval]) -> list[Interval]:
    """Join adjacent intervals, so that a tensor that one rank holds is one segment at any stride."""
    merged: list[Interval] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
