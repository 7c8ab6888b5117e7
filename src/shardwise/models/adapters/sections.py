"""Which rows of a fused weight are those of one Hugging Face linear layer: pure arithmetic.

One weight of ours may hold several of Hugging Face's (query, key and value; gate and up), or hold its rows in another
order (GPT-2's ``c_attn``). A *section* lists, for each row of Hugging Face's weight in its order, the row of ours.
"""

import torch
from torch import Tensor

from shardwise.core.errors import ShardingError
from shardwise.core.sharding import Interval, ParamLayout


def section_layout(section: Tensor, fused: ParamLayout, width: int) -> ParamLayout:
    """Where each rank's rows lie in a tensor ``[len(section), width]`` that belongs to a section of a fused weight.

    A rank holds the rows whose fused rows it holds, in ascending order.

    Args:
        section: ``[n]`` int64, for each row of the section its row in the fused weight.
        fused: layout of the fused weight, or of its bias; split along dimension 0.
        width: number of columns.

    Raises:
        ShardingError: the fused weight is not split along dimension 0, or has no such row.
    """
    if fused.dim != 0:
        raise ShardingError(f"a section is of rows; the fused weight is split along dimension {fused.dim}")
    if section.numel() and not 0 <= int(section.min()) <= int(section.max()) < fused.global_shape[0]:
        raise ShardingError(f"a section has rows outside the fused weight's {fused.global_shape[0]}")
    intervals = tuple(_intervals(_held(section, fused, rank)) for rank in range(fused.world_size))
    return ParamLayout((len(section), width), 0, intervals, fused.world_size)


def local_places(section: Tensor, fused: ParamLayout, rank: int) -> Tensor | None:
    """For each of the rank's rows of ``section_layout``, in its local order, the row of the rank's fused part.

    None if these are all, in order.
    """
    own = torch.arange(fused.local_size(rank))
    places = torch.full(fused.global_shape[:1], -1)
    places[_rows(fused, rank)] = own
    held: Tensor = places[section[_held(section, fused, rank)]]
    return None if torch.equal(held, own) else held


def _rows(fused: ParamLayout, rank: int) -> Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in fused.intervals[rank])])


def _held(section: Tensor, fused: ParamLayout, rank: int) -> Tensor:
    """The section's rows that a rank holds, ascending."""
    is_held = torch.zeros(fused.global_shape[0], dtype=torch.bool)
    is_held[_rows(fused, rank)] = True
    return is_held[section].nonzero().flatten()


def _intervals(rows: Tensor) -> tuple[Interval, ...]:
    """Ascending rows as intervals of consecutive ones.

    >>> _intervals(torch.tensor([0, 1, 4]))
    ((0, 2), (4, 5))
    """
    if not rows.numel():
        return ((0, 0),)
    ends = (rows.diff() != 1).nonzero().flatten()
    starts = [int(rows[0]), *rows[ends + 1].tolist()]
    stops = [*(rows[ends] + 1).tolist(), int(rows[-1]) + 1]
    return tuple(zip(starts, stops, strict=True))
