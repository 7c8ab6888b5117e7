"""The sequence positions that this rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ShardingError
from shardwise.core.sharding import Interval, balanced_sizes, intervals_of_sizes, uneven_sizes


@dataclass(frozen=True)
class SequenceView:
    """The sequence positions of a batch that this rank holds: all positions, or its shard by the balanced rule.

    A model creates a view in each forward, and every module that depends on the sequence's length or split reads it.
    The size of a shard does not determine the length if the number of ranks does not divide it.

    Attributes:
        length: number of positions of the whole sequence, ``s``.
        group: the ranks that split the sequence, with sequence parallelism; None if every rank holds all positions.

    Raises:
        ShardingError: a negative length.
    """

    length: int
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ShardingError(f"the length of a sequence is {self.length}; it must not be negative")

    @classmethod
    def of(cls, shard: Tensor, group: ProcessGroup | None) -> SequenceView:
        """Create the view of a tensor ``[s/t, ...]``, for ranks that all hold the same number of positions."""
        return cls(shard.size(0) * (1 if group is None else group.size()), group)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions that each rank holds."""
        return balanced_sizes(self.length, 1 if self.group is None else self.group.size())

    @property
    def interval(self) -> Interval:
        """This rank's positions as ``(start, stop)``, ``stop`` excluded."""
        return intervals_of_sizes(self.sizes)[0 if self.group is None else self.group.rank()]

    @property
    def size(self) -> int:
        """Number of positions that this rank holds."""
        start, stop = self.interval
        return stop - start

    def sizes_to_gather(self, shard: Tensor) -> tuple[int, ...] | None:
        """Return the sizes for a gather of ``shard``, ``[s/t, ...]``; None if all ranks have the same size.

        Raises:
            ShardingError: no group splits the sequence, or the shard does not have its rank's size.
        """
        if self.group is None:
            raise ShardingError(
                f"shards of a sequence are gathered, and SequenceView({self.length}) has no group; give it the group "
                "that splits the sequence"
            )
        t, rank = self.group.size(), self.group.rank()
        sizes = uneven_sizes(self.length, t)
        if sizes is None and shard.size(0) * t != self.length:
            raise ShardingError(
                f"rank {rank} of {t} has {shard.size(0)} positions of a sequence of {self.length}; it should have "
                f"{self.length // t}"
            )
        return sizes
