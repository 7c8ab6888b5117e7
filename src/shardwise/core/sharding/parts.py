"""The parts into which a split dimension is cut so that what is summed along it has the same bits at every layout.

A dimension (each section of it, by itself) is cut into ``exact_parts`` parts by the balanced rule, whatever the number
of ranks. Rank ``r`` of ``t`` must hold parts ``r * exact_parts / t`` up to the next rank's, and nothing else: the
bounds of the shards must be among the cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from shardwise.core.errors import ConfigError
from shardwise.core.sharding.balanced import Interval, balanced_sizes, intervals_of_sizes
from shardwise.core.sharding.param_layout import ParamLayout

LocalParts = tuple[tuple[Interval, ...], ...]
"""For each part that a rank holds its intervals of local indices, one for each section."""


def local_parts(layout: ParamLayout, rank: int, exact_parts: int, *, what: str) -> LocalParts:
    """The parts of a split dimension that ``rank`` holds, in its local indices.

    >>> local_parts(ParamLayout.split((16,), 0, 2, stride=2), 1, 4, what="the width")
    (((0, 2), (4, 6)), ((2, 4), (6, 8)))

    Args:
        layout: of the parameter; split along one dimension.
        rank: of this shard.
        exact_parts: number of parts, a multiple of the ranks.
        what: what the dimension is, for errors.

    Raises:
        ConfigError: the bounds of the shards are not among the cuts, or there are fewer indices than parts; the message
            names the largest number of parts that works.
    """
    if _fits(layout, exact_parts):
        parts = _parts(layout, rank, exact_parts)
        assert parts is not None
        return parts
    assert layout.dim is not None
    fitting = exact_parts // 2
    while fitting >= layout.world_size and not _fits(layout, fitting):
        fitting //= 2
    shards = [list(runs) for runs in layout.intervals]
    raise ConfigError(
        f"exact: {what}, of {layout.global_shape[layout.dim]} indices, is cut into {exact_parts} parts, and the bounds "
        f"of the shards on {layout.world_size} ranks ({shards}) are not among the cuts; "
        + (
            f"the largest exact_parts that works is {fitting}"
            if fitting >= layout.world_size
            else "no number works: use fewer ranks"
        )
    )


def fitting_ranks(layouts: Iterable[ParamLayout], exact_parts: int) -> list[int]:
    """The numbers of ranks over 1, powers of two up to ``exact_parts``, at which all shards are whole parts.

    >>> fitting_ranks([ParamLayout.split((509, 4), 0, 1)], 2), fitting_ranks([ParamLayout.split((509, 4), 0, 1)], 8)
    ([2], [])

    Args:
        layouts: of parameters at any number of ranks. Those that are not split by the balanced rule are passed over.
        exact_parts: number of parts, a power of two.
    """
    balanced = {
        (layout.global_shape, layout.dim, layout.stride)
        for layout in layouts
        if layout.dim is not None
        and layout == ParamLayout.split(layout.global_shape, layout.dim, layout.world_size, stride=layout.stride)
    }
    numbers = [1 << power for power in range(1, exact_parts.bit_length())]
    return [
        ranks
        for ranks in numbers
        if all(
            _fits(ParamLayout.split(shape, dim, ranks, stride=stride), exact_parts) for shape, dim, stride in balanced
        )
    ]


@lru_cache(maxsize=4096)
def _fits(layout: ParamLayout, exact_parts: int) -> bool:
    """Whether every rank has whole parts: all of them are to refuse what one cannot have."""
    return all(_parts(layout, rank, exact_parts) is not None for rank in range(layout.world_size))


def _parts(layout: ParamLayout, rank: int, exact_parts: int) -> LocalParts | None:
    assert layout.dim is not None
    section = layout.global_shape[layout.dim] // layout.stride
    if section < exact_parts or len(layout.intervals[rank]) != layout.stride:
        return None
    per_rank = exact_parts // layout.world_size
    cuts = intervals_of_sizes(balanced_sizes(section, exact_parts))[rank * per_rank : (rank + 1) * per_rank]
    start, stop = cuts[0][0], cuts[-1][1]
    if layout.intervals[rank] != tuple((start + k * section, stop + k * section) for k in range(layout.stride)):
        return None
    width = stop - start
    return tuple(
        tuple((low - start + k * width, high - start + k * width) for k in range(layout.stride)) for low, high in cuts
    )


def parts_of_rank(total: int, exact_parts: int, world_size: int, rank: int) -> Sequence[int]:
    """The sizes of the parts of ``total`` indices, by the balanced rule, that ``rank`` holds.

    >>> parts_of_rank(12, 4, 2, 1)
    (3, 3)
    """
    per_rank = exact_parts // world_size
    return balanced_sizes(total, exact_parts)[rank * per_rank : (rank + 1) * per_rank]
