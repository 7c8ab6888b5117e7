"""The parts of the vocabulary: one for each rank, or several in a group that sums over parts."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.trees import exact_parts
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import Interval, balanced_sizes, intervals_of_sizes


def column_parts(ranges: Sequence[Interval], group: ProcessGroup) -> tuple[list[Interval], list[Interval]]:
    """The parts of this rank's columns, and the ids of every part of all ranks.

    Args:
        ranges: every rank's ids.
        group: the ranks that split the vocabulary.

    Raises:
        ConfigError: the bounds of the ranks' ids are not among the cuts into parts.
    """
    (first, last), number = ranges[group.rank()], exact_parts(group)
    if number is None:
        return [(0, last - first)], list(ranges)
    vocab_size, per_rank = ranges[-1][1], number // group.size()
    parts = intervals_of_sizes(balanced_sizes(vocab_size, number))
    if any(run != (parts[i * per_rank][0], parts[(i + 1) * per_rank - 1][1]) for i, run in enumerate(ranges)):
        raise ConfigError(
            f"exact: the loss over {vocab_size} ids is cut into {number} parts, and the bounds of the ranks' ids "
            f"({list(ranges)}) are not among the cuts; use a vocabulary that {number} divides, without padding"
        )
    own = parts[group.rank() * per_rank : (group.rank() + 1) * per_rank]
    return [(start - first, stop - first) for start, stop in own], list(parts)


def columns_between(target_local: Tensor, start: int, stop: int) -> Tensor:
    """Targets as columns of those from ``start`` to ``stop``, -1 where they are not among them."""
    return (target_local - start).masked_fill((target_local < start) | (target_local >= stop), -1)
