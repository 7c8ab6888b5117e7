"""Which slice is whose: pure arithmetic, shared by layers, gradients and checkpoints.

The **balanced rule**: of ``n`` elements on ``t`` ranks, the first ``n % t`` ranks hold ``n // t + 1`` and the others
``n // t``. Nothing is padded, and every rank knows every rank's size without asking.

A dimension may consist of several *sections*, each split by itself (``stride`` of them): the gate and the up projection
of a gated MLP are two sections of one weight, so that every rank holds matching halves of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.errors import IndivisibleError, ShardingError

Interval = tuple[int, int]
"""``(start, stop)`` of a run of indices, ``stop`` excluded."""


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise IndivisibleError unless ``denominator`` divides ``numerator``."""
    if denominator == 0 or numerator % denominator != 0:
        raise IndivisibleError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The exact quotient; IndivisibleError if there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def balanced_sizes(n: int, t: int) -> tuple[int, ...]:
    """How many of ``n`` elements each of ``t`` ranks holds: the first ``n % t`` hold one more.

    >>> balanced_sizes(13, 4)
    (4, 3, 3, 3)
    """
    if t < 1 or n < 0:
        raise ShardingError(f"cannot split {n} elements over {t} ranks; both must be counts and the ranks at least 1")
    # Not divmod, which torch.compile does not trace.
    quotient, remainder = n // t, n % t
    return tuple(quotient + (rank < remainder) for rank in range(t))


def balanced_range(n: int, t: int, rank: int) -> Interval:
    """``(start, stop)`` of what ``rank`` holds of ``n`` elements on ``t`` ranks, by the balanced rule.

    >>> balanced_range(13, 4, 1)
    (4, 7)
    """
    if not 0 <= rank < t:
        raise ShardingError(f"rank {rank} is not one of {t} ranks")
    if n < 0:
        raise ShardingError(f"cannot split {n} elements over {t} ranks; they must be a count")
    # Not divmod, which torch.compile does not trace.
    quotient, remainder = n // t, n % t
    start = rank * quotient + min(rank, remainder)
    return start, start + quotient + (rank < remainder)


def uneven_sizes(n: int, t: int) -> tuple[int, ...] | None:
    """The balanced sizes of ``n`` elements on ``t`` ranks, or None where all ranks hold the same number.

    None is what a collective takes for shards of equal size.

    >>> uneven_sizes(13, 4)
    (4, 3, 3, 3)
    >>> uneven_sizes(12, 4)
    """
    return None if n % t == 0 else balanced_sizes(n, t)


def intervals_of_sizes(sizes: Sequence[int]) -> tuple[Interval, ...]:
    """Consecutive intervals with the given sizes.

    >>> intervals_of_sizes([2, 3])
    ((0, 2), (2, 5))
    """
    stops = (0, *accumulate(sizes))
    return tuple(pairwise(stops))


def checked_sizes(sizes: Sequence[int], total: int, t: int, what: str) -> tuple[int, ...]:
    """``sizes`` as a tuple, after checking that they are ``t`` counts that sum to ``total``.

    Raises:
        ShardingError: they do not; the message names ``what``, the sizes and the total.
    """
    result = tuple(int(size) for size in sizes)
    if len(result) != t or sum(result) != total or min(result) < 0:
        raise ShardingError(f"{what}: sizes {list(result)} must be {t} counts, one per rank, that sum to {total}")
    return result


def checked_dim(dim: int, shape: Sequence[int]) -> int:
    """``dim`` counted from the first dimension of ``shape``; ShardingError if there is no such dimension.

    >>> checked_dim(-1, (4, 5))
    1
    """
    if not -len(shape) <= dim < len(shape):
        raise ShardingError(f"shape {list(shape)} has no dimension {dim}")
    return dim % len(shape)


@dataclass(frozen=True)
class ParamLayout:
    """Where each rank's part of one parameter lies in the whole one.

    The one description that layers (initialisation), the optimizer (which gradients are whose) and checkpoints (which
    bytes go where) all read.

    Attributes:
        global_shape: shape of the whole parameter.
        dim: the dimension that is split; None if every rank holds the whole parameter.
        intervals: for each rank the runs of indices along ``dim`` that it holds, in its local order. Runs of different
            ranks may coincide (replicated key-value heads), and together they cover the dimension. Empty if ``dim`` is
            None.
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
        """Every rank holds the whole parameter."""
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
        """Split ``dim`` over the ranks by the balanced rule, or into the given ``sizes``.

        Args:
            global_shape: shape of the whole parameter.
            dim: dimension to split; a negative one counts from the last.
            world_size: number of ranks.
            stride: number of equal sections of the dimension, each split by itself.
            sizes: one size per rank, of one section; balanced if None.

        Raises:
            ShardingError: there is no such dimension, ``stride`` does not divide it, or ``sizes`` do not sum to a
                section.
        """
        shape = tuple(global_shape)
        dim = checked_dim(dim, shape)
        section = divide(shape[dim], stride)
        if sizes is None:
            sizes = balanced_sizes(section, world_size)
        else:
            sizes = checked_sizes(sizes, section, world_size, f"dimension {dim} of shape {list(shape)}")
        per_rank = tuple(
            tuple((start + k * section, stop + k * section) for k in range(stride))
            for start, stop in intervals_of_sizes(sizes)
        )
        return cls(shape, dim, per_rank, world_size, stride)

    def local_size(self, rank: int) -> int:
        """Number of indices of the split dimension that ``rank`` holds."""
        assert self.dim is not None
        return sum(stop - start for start, stop in self.intervals[rank])

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what ``rank`` holds."""
        if self.dim is None:
            return self.global_shape
        shape = list(self.global_shape)
        shape[self.dim] = self.local_size(rank)
        return tuple(shape)

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """The part of ``whole`` (shape ``global_shape``) that ``rank`` holds; a view when it is one run."""
        if tuple(whole.shape) != self.global_shape:
            raise ShardingError(f"expected a tensor of shape {list(self.global_shape)}, got {list(whole.shape)}")
        if self.dim is None:
            return whole
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.intervals[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def assemble(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole parameter from every rank's part, in rank order; a new tensor.

        Raises:
            ShardingError: a part is not of the shape that this layout gives its rank.
        """
        if len(shards) != self.world_size:
            raise ShardingError(f"expected {self.world_size} shards, one per rank, got {len(shards)}")
        for rank, shard in enumerate(shards):
            if tuple(shard.shape) != self.local_shape(rank):
                raise ShardingError(
                    f"shard of rank {rank} has shape {list(shard.shape)}, expected {list(self.local_shape(rank))}"
                )
        if self.dim is None:
            return shards[0].clone()
        whole = shards[0].new_empty(self.global_shape)
        for rank, shard in enumerate(shards):
            offset = 0
            for start, stop in self.intervals[rank]:
                whole.narrow(self.dim, start, stop - start).copy_(shard.narrow(self.dim, offset, stop - start))
                offset += stop - start
        return whole

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; the inverse of ``from_json``."""
        return {
            "global_shape": list(self.global_shape),
            "dim": self.dim,
            "intervals": [[list(run) for run in runs] for runs in self.intervals],
            "world_size": self.world_size,
            "stride": self.stride,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ParamLayout:
        """From ``to_json``'s values."""
        return cls(
            tuple(value["global_shape"]),
            value["dim"],
            tuple(tuple((run[0], run[1]) for run in runs) for runs in value["intervals"]),
            value["world_size"],
            value["stride"],
        )


class Segment(NamedTuple):
    """A run of indices along the split dimension that no rank's boundary cuts.

    Attributes:
        start: first index in the whole parameter.
        length: number of indices.
        local_start: where the run begins in the rank's part.
    """

    start: int
    length: int
    local_start: int


def segments(layout: ParamLayout, rank: int) -> list[Segment]:
    """What ``rank`` holds along the split dimension, cut wherever any rank's part begins or ends.

    Two segments, of whichever ranks, are therefore the same run or disjoint, so that "write each run once" needs no
    more than comparing their first indices.

    Args:
        layout: layout with a split dimension.
        rank: one of its ranks.

    Raises:
        ShardingError: the rank holds an index twice.
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
        raise ShardingError(f"rank {rank} holds an index twice: its runs are {list(layout.intervals[rank])}")
    return result


def _merge_adjacent(runs: tuple[Interval, ...]) -> list[Interval]:
    """Runs that continue each other, joined: a tensor that one rank holds is then one segment, whatever its stride."""
    merged: list[Interval] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


ShardedOffset = tuple[int, int, int]
"""``(axis, index, count)``: a tensor is number ``index`` of ``count`` along a new leading ``axis``."""


@dataclass(frozen=True, eq=False)
class ParamShard:
    """One rank's part of a named parameter: what a layer's ``sharded_state_dict`` returns and a checkpoint stores.

    Attributes:
        key: name of the parameter in the checkpoint; parameters that ``sharded_offsets`` stack share it.
        data: this rank's part, shape ``layout.local_shape(rank)``; the parameter itself, not a copy.
        layout: where each rank's part lies in the whole.
        rank: this rank among those that ``layout`` is about.
        sharded_offsets: leading axes that stack parameters of one name, such as the layers of a model; axis numbers
            count from 0.
        allow_shape_mismatch: on load the stored parameter may have another size along the split dimension, as a
            vocabulary does that is padded otherwise; what it lacks stays as it is, what it has too much is left out.

    Raises:
        ShardingError: the rank is not one of the layout's, ``data`` is not of the shape that the layout gives it, or
            the offsets' axes are not 0, 1...
    """

    key: str
    data: Tensor = field(repr=False)
    layout: ParamLayout
    rank: int
    sharded_offsets: tuple[ShardedOffset, ...] = ()
    allow_shape_mismatch: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.layout.world_size:
            raise ShardingError(f"{self.key}: rank {self.rank} is not one of the layout's {self.layout.world_size}")
        expected = self.layout.local_shape(self.rank)
        if tuple(self.data.shape) != expected:
            raise ShardingError(
                f"{self.key}: rank {self.rank} should hold shape {list(expected)} of {list(self.layout.global_shape)}, "
                f"got {list(self.data.shape)}"
            )
        for axis, (stated, index, count) in enumerate(self.sharded_offsets):
            if stated != axis or not 0 <= index < count:
                raise ShardingError(
                    f"{self.key}: sharded_offsets {list(self.sharded_offsets)} must be (axis, index, count) with axes "
                    "0, 1, ... and each index under its count"
                )

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, leading axes included."""
        return (*(count for _, _, count in self.sharded_offsets), *self.layout.global_shape)

    @property
    def is_replica(self) -> bool:
        """Whether a rank before this one holds the same values: every rank but the first, of what is not split."""
        return self.layout.dim is None and self.rank > 0

    def accepts(self, stored_shape: Sequence[int]) -> bool:
        """Whether a whole parameter of ``stored_shape`` can be loaded: one of the same shape, or of another size along
        the split dimension with ``allow_shape_mismatch``.
        """
        stored, here = list(stored_shape), list(self.global_shape)
        # The sections of a strided dimension would not lie where they lay.
        if self.allow_shape_mismatch and self.layout.dim is not None and self.layout.stride == 1:
            resized = len(self.sharded_offsets) + self.layout.dim
            del stored[resized : resized + 1], here[resized]
        return stored == here

    def pieces(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Each run of indices that this rank holds: its offset in the whole, and the view of ``data`` that holds it.

        Pieces of any two ranks are the same part of the whole or have nothing in common. Views have the leading axes
        too, of size 1.

        Raises:
            ShardingError: the rank holds an index twice.
        """
        lead = tuple(index for _, index, _ in self.sharded_offsets)
        data = self.data.detach()[(None,) * len(lead)] if lead else self.data.detach()
        dim = self.layout.dim
        if dim is None:
            return [(lead + (0,) * len(self.layout.global_shape), data)]
        return [
            (
                lead + tuple(start if d == dim else 0 for d in range(len(self.layout.global_shape))),
                data.narrow(len(lead) + dim, local_start, length),
            )
            for start, length, local_start in segments(self.layout, self.rank)
        ]
