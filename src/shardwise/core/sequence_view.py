"""The sequence positions that this rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.layout import R, V
from shardwise.core.sharding import Interval, balanced_sizes, intervals_of_sizes, uneven_sizes
from shardwise.core.typed import check_move


class _Own(Function):
    @staticmethod
    def spmd_typecheck(outputs: Any, *, whole: Tensor, shard: ContextShard) -> None:
        check_move(outputs, shard.group, V(), (whole, R))

    @staticmethod
    def forward(ctx: Any, whole: Tensor, shard: ContextShard, dim: int) -> Tensor:
        own = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in shard.intervals], dim=dim)
        ctx.mark_non_differentiable(own)
        return own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None


def runs_of_ranks(length: int, num_ranks: int) -> tuple[tuple[Interval, ...], ...]:
    """Return the runs of positions of each context-parallel rank, ``(start, stop)``, in order; see ``ContextShard``."""
    runs = intervals_of_sizes(balanced_sizes(length, 2 * num_ranks))
    pairs = ((runs[rank], runs[2 * num_ranks - 1 - rank]) for rank in range(num_ranks))
    return tuple(tuple(run for run in pair if run[0] < run[1]) for pair in pairs)


@dataclass(frozen=True)
class ContextShard:
    """The positions of a sequence that this rank of a context-parallel group holds.

    The sequence is cut into two runs for each rank. A rank holds one run, and the run that is as far from the end as
    the first one is from the start: under causal attention, all ranks then have about the same work.

    Attributes:
        length: number of positions of the whole sequence.
        group: the ranks that share the sequence.

    Raises:
        ShardingError: there are more ranks than positions.

    Source: Brandon et al. 2023 (arXiv:2311.09431); Megatron-LM's ``get_batch_on_this_cp_rank``.
    """

    length: int
    group: ProcessGroup

    def __post_init__(self) -> None:
        if self.length < self.group.size():
            raise ShardingError(
                f"a sequence of {self.length} positions cannot be split over {self.group.size()} context-parallel "
                "ranks; use fewer ranks (cp) or longer samples"
            )

    @cached_property
    def intervals_of_ranks(self) -> tuple[tuple[Interval, ...], ...]:
        """Each rank's runs of positions as ``(start, stop)``, in order."""
        return runs_of_ranks(self.length, self.group.size())

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions that each rank holds."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.intervals_of_ranks)

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """This rank's runs of positions."""
        return self.intervals_of_ranks[self.group.rank()]

    @property
    def size(self) -> int:
        """Number of positions that this rank holds."""
        return self.sizes[self.group.rank()]

    def runs(self, start: int, stop: int) -> list[Interval]:
        """Return the runs of positions of the whole sequence that are from ``start`` to ``stop`` of this rank's."""
        found, before = [], 0
        for first, last in self.intervals:
            low, high = max(first, first + start - before), min(last, first + stop - before)
            if low < high:
                found.append((low, high))
            before += last - first
        return found

    def positions(self, device: torch.device) -> Tensor:
        """Return this rank's positions, ``[size]`` int64."""
        return self.own(torch.arange(self.length, device=device), dim=0)

    def own(self, whole: Tensor, *, dim: int) -> Tensor:
        """Return this rank's positions of a tensor that all ranks have, without gradient and communication."""
        if whole.size(dim) != self.length:
            raise ShardingError(
                f"a tensor of shape {list(whole.shape)} has {whole.size(dim)} positions along dimension {dim}, and the "
                f"sequence that context-parallel ranks share has {self.length}"
            )
        own: Tensor = _Own.apply(whole, self, dim)
        return own

    def own_samples(self, whole: Tensor) -> Tensor:
        """Return this rank's share of the samples ``[b, ...]``, by the balanced rule.

        A head that reads whole sequences works on this share, so that its gradient is a partial sum over the ranks,
        like those of the layers before it.
        """
        start, stop = intervals_of_sizes(balanced_sizes(whole.size(0), self.group.size()))[self.group.rank()]
        return whole[start:stop]

    def in_order(self, gathered: Tensor, *, dim: int) -> Tensor:
        """Put the positions of all ranks, one rank after the other, into the order of the sequence."""
        runs = [run for of_rank in self.intervals_of_ranks for run in of_rank]
        return self._reordered(gathered, runs, sorted(runs), dim)

    def by_rank(self, whole: Tensor, *, dim: int) -> Tensor:
        """Undo ``in_order``: put the positions of one rank after those of another."""
        runs = [run for of_rank in self.intervals_of_ranks for run in of_rank]
        return self._reordered(whole, sorted(runs), runs, dim)

    @staticmethod
    def _reordered(tensor: Tensor, given: list[Interval], wanted: list[Interval], dim: int) -> Tensor:
        parts = dict(zip(given, tensor.split([stop - start for start, stop in given], dim=dim), strict=True))
        return torch.cat([parts[run] for run in wanted], dim=dim)


@dataclass(frozen=True)
class DataShare:
    """The samples of this rank, and its positions of each.

    Attributes:
        samples: place of this rank's samples among those of all ranks, and the number of such places.
        group: the ranks that have other positions of the same samples; None if this rank has whole samples.
    """

    samples: tuple[int, int] = (0, 1)
    group: ProcessGroup | None = None

    @property
    def ranks_of_sample(self) -> int:
        """Number of ranks that share the positions of a sample."""
        return 1 if self.group is None else self.group.size()

    def view(self, length: int, group: ProcessGroup | None) -> SequenceView:
        """Return the view of samples of ``length`` positions; ``group`` splits the sequence, or None."""
        if self.group is None:
            return SequenceView(length, group)
        context = ContextShard(length, self.group)
        return SequenceView(context.size, group, context)

    def check_loss(self, name: str, *, shares_samples: bool) -> None:
        """Raise ConfigError if ranks share samples, and the loss ``name`` needs all positions of one."""
        if self.group is not None and not shares_samples:
            raise ConfigError(
                f"ranks share samples (cp), and {name} has no sums for that (shares_samples); leave cp at 1"
            )


@dataclass(frozen=True)
class SequenceView:
    """The sequence positions of a batch that this rank holds: all positions, or its shard by the balanced rule.

    A model creates a view in each forward, and every module that depends on the sequence's length or split reads it.
    The size of a shard does not determine the length if the number of ranks does not divide it.

    Attributes:
        length: number of positions of the whole sequence, ``s``; with ``context``, of this rank's shard of it.
        group: the ranks that split the sequence, with sequence parallelism; None if every rank holds all positions.
        context: this rank's shard of a longer sequence, with context parallelism; its tensor-parallel ranks have the
            same.

    Raises:
        ShardingError: a negative length.
    """

    length: int
    group: ProcessGroup | None = None
    context: ContextShard | None = None

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ShardingError(f"the length of a sequence is {self.length}; it must not be negative")

    @classmethod
    def of(cls, shard: Tensor, group: ProcessGroup | None) -> SequenceView:
        """Create the view of a tensor ``[s/t, ...]``, for ranks that all hold the same number of positions."""
        return cls(shard.size(0) * (1 if group is None else group.size()), group)

    @property
    def whole_length(self) -> int:
        """Number of positions of the sequence that context-parallel ranks share; ``length`` without ``context``."""
        return self.length if self.context is None else self.context.length

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

    def positions(self, device: torch.device) -> Tensor:
        """Return this rank's positions in the whole sequence, ``[size]`` int64."""
        start, stop = self.interval
        if self.context is None:
            return torch.arange(start, stop, device=device)
        return self.context.positions(device)[start:stop]

    def sizes_to_gather(self, shard: Tensor) -> tuple[int, ...] | None:
        """Return the sizes for a gather of ``shard``, ``[s/t, ...]``; None if all ranks have the same size."""
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
