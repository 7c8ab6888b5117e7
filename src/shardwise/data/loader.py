"""Data loading: the samples of a batch are a pure function of seed and step, the same at every layout.

The loader has no state. A run therefore resumes at any step, on any number of ranks, with the same samples as an
uninterrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError
from shardwise.data.batch import Batch, Row, stack


class Rows(Protocol):
    """Samples for batches; a sample is one row, or several rows that stay together.

    Attributes:
        lengths: ``[rows]``: number of tokens of each sample, without padding.
        labels: ``[rows]``: number of labels of each sample, over which a loss is averaged.
        num_bytes: size in UTF-8 of the text of all labels; 0 if the labels are not text.
    """

    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    num_bytes: int = 0

    def __len__(self) -> int:
        """Number of rows."""

    def width(self, indices: NDArray[np.int64]) -> int:
        """The padded length of a batch of these rows."""

    def row(self, index: int, length: int | None = None) -> Row:
        """One row in new arrays, filled up to ``length`` places; if None to the usual number of its kind.

        It has ``lengths`` if nothing else in it says where its text ends. Raises IndexError: there is no such row.
        """

    def padding(self, length: int) -> Row:
        """A row whose labels are all ignored."""

    def in_epoch(self, seed: int, epoch: int) -> Rows:
        """The rows of an epoch: the same in all, unless a text is cut anew in each."""
        return self


# An epoch's numbers are drawn for a purpose each, so that its order and its offset are independent.
_FOR_ORDER, FOR_OFFSET = 0, 1


def random_uint64(seed: int, epoch: int, purpose: int, count: int) -> NDArray[np.uint64]:
    """Raw numbers of an epoch, for one purpose."""
    # NumPy guarantees a bit generator's raw numbers across versions, but not what Generator derives from them.
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch, purpose)))
    return np.asarray(bits.random_raw(count), dtype=np.uint64)


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    order = np.argsort(random_uint64(seed, epoch, _FOR_ORDER, num_samples), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def _check_rank(dp_rank: int, dp_size: int, micro_batch_size: int) -> None:
    if dp_size < 1 or micro_batch_size < 1:
        raise ConfigError(f"data-parallel size {dp_size} and micro_batch_size {micro_batch_size} must be at least 1")
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"data-parallel rank {dp_rank} is not one of {dp_size}")


@dataclass(frozen=True)
class BatchSchedule:
    """The order of samples: each epoch is a new permutation of all of them, and batches follow one another through it.

    Attributes:
        num_samples: samples in an epoch.
        global_batch_size: samples in a step, over all data-parallel ranks. May exceed an epoch.
        seed: not negative.

    Raises:
        ConfigError: a size below 1 or a negative seed.
    """

    num_samples: int
    global_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.global_batch_size < 1 or self.seed < 0:
            raise ConfigError(
                f"num_samples {self.num_samples} and global_batch_size {self.global_batch_size} must be at least 1, "
                f"and seed {self.seed} at least 0"
            )

    def _places(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Epoch, and place in it, of each sample of a step."""
        if step < 0:
            raise ConfigError(f"step {step} must be at least 0")
        first = step * self.global_batch_size
        epochs, places = np.divmod(np.arange(first, first + self.global_batch_size, dtype=np.int64), self.num_samples)
        return epochs, places

    def epochs(self, step: int) -> NDArray[np.int64]:
        """``[global_batch_size]``: the epoch, from 0, of each sample of a step."""
        return self._places(step)[0]

    def global_batch(self, step: int) -> NDArray[np.int64]:
        """``[global_batch_size]``: the samples of a step, in order.

        Args:
            step: the step, from 0.

        Raises:
            ConfigError: ``step`` is negative.
        """
        epochs, places = self._places(step)
        samples = np.empty_like(places)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            samples[of_epoch] = _epoch_order(self.seed, int(epoch), self.num_samples)[places[of_epoch]]
        return samples

    def micro_batches(self, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[slice]:
        """Which parts of a global batch one rank computes on, one after the other.

        A rank has a contiguous part of the global batch: all ranks' parts in order are the whole, at every layout.

        Args:
            dp_rank: data-parallel rank.
            dp_size: number of data-parallel ranks.
            micro_batch_size: samples in one forward pass.

        Raises:
            ConfigError: the global batch does not divide into micro-batches of all ranks.
        """
        _check_rank(dp_rank, dp_size, micro_batch_size)
        together = dp_size * micro_batch_size
        if self.global_batch_size % together:
            near = max(together, self.global_batch_size - self.global_batch_size % together)
            raise ConfigError(
                f"global_batch_size {self.global_batch_size} is not divisible by data-parallel size {dp_size} x "
                f"micro_batch_size {micro_batch_size} = {together}; use a multiple such as {near}"
            )
        of_rank = self.global_batch_size // dp_size
        first = dp_rank * of_rank
        return [slice(start, start + micro_batch_size) for start in range(first, first + of_rank, micro_batch_size)]


class DataLoader:
    """The batches of rows.

    Args:
        rows: gives the samples.
        global_batch_size: samples in a step, over all data-parallel ranks.
        seed: seed of the order, and of what rows change in each epoch.

    Raises:
        ConfigError: ``global_batch_size`` is less than 1, or the seed negative.
    """

    def __init__(self, rows: Rows, global_batch_size: int, seed: int) -> None:
        self.rows = rows
        self.schedule = BatchSchedule(len(rows), global_batch_size, seed)

    def num_labels(self, step: int) -> int:
        """Number of labels in a step that are not ignored, over all data-parallel ranks."""
        return int(self.rows.labels[self.schedule.global_batch(step)].sum())

    def num_tokens(self, step: int) -> int:
        """Number of tokens in a step, over all data-parallel ranks, without padding."""
        return int(self.rows.lengths[self.schedule.global_batch(step)].sum())

    def batch(
        self,
        step: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_batch_size: int | None = None,
        *,
        with_lengths: bool = False,
    ) -> Iterator[Batch]:
        """The micro-batches of one rank in one step, all with the places that the step's longest sample takes.

        Args:
            step: the step, from 0; steps may be asked for in any order.
            dp_rank: data-parallel rank.
            dp_size: number of data-parallel ranks.
            micro_batch_size: ``b``, samples in one forward pass; all that the rank has if None.
            with_lengths: give batches their ``lengths``, where rows have any.

        Returns:
            ``global_batch_size / (dp_size * b)`` batches, made as they are asked for.

        Raises:
            ConfigError: the global batch does not divide into micro-batches of all ranks, no such rank, or a negative
                step. At the call, before anything is asked for.
        """
        if micro_batch_size is None:
            micro_batch_size = max(1, self.schedule.global_batch_size // max(1, dp_size))
        slices = self.schedule.micro_batches(dp_rank, dp_size, micro_batch_size)
        indices, epochs = self.schedule.global_batch(step), self.schedule.epochs(step)
        rows = {epoch: self.rows.in_epoch(self.schedule.seed, epoch) for epoch in set(epochs.tolist())}
        length = self.rows.width(indices)
        return (
            stack(
                (
                    rows[epoch].row(index, length)
                    for index, epoch in zip(indices[part].tolist(), epochs[part].tolist(), strict=True)
                ),
                with_lengths=with_lengths,
            )
            for part in slices
        )


class HeldOut:
    """Held-out rows of one length; every label counts once.

    Args:
        rows: gives the rows.
        indices: ``[n]``, which of them; all if None.

    Attributes:
        rows: see above.
    """

    def __init__(self, rows: Rows, indices: NDArray[np.int64] | None = None) -> None:
        self.rows = rows
        self._indices = np.arange(len(rows)) if indices is None else indices
        self._length = rows.width(self._indices)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._indices)

    @property
    def num_labels(self) -> int:
        """Labels that count."""
        return int(self.rows.labels[self._indices].sum())

    def bits_per_byte(self, total_nll: float) -> float:
        """Bits that a model spends on a byte of the text behind all rows, the ends of documents and turns included.

        Args:
            total_nll: sum over all labels that count of ``-ln p(label)``.
        """
        return total_nll / math.log(2) / max(1, self.rows.num_bytes)

    def batches(
        self, micro_batch_size: int, dp_rank: int = 0, dp_size: int = 1, *, with_lengths: bool = False
    ) -> Iterator[Batch]:
        """The rows of one rank, in batches of one size.

        Every rank gets the same number of batches, filled up with rows in which no label counts.

        Args:
            micro_batch_size: ``b``, rows in one forward pass.
            dp_rank: data-parallel rank.
            dp_size: number of data-parallel ranks.
            with_lengths: give batches their ``lengths``, where rows have any. A row that only fills up has the last
                one's.

        Returns:
            The batches, made as they are asked for.

        Raises:
            ConfigError: ``micro_batch_size`` is less than 1, or no such rank.
        """
        _check_rank(dp_rank, dp_size, micro_batch_size)
        together = dp_size * micro_batch_size
        firsts = range(dp_rank * micro_batch_size, -(-len(self) // together) * together, together)
        return (
            stack(map(self._row, range(first, first + micro_batch_size)), with_lengths=with_lengths) for first in firsts
        )

    def _row(self, number: int) -> Row:
        row = self.rows.row(int(self._indices[min(number, len(self) - 1)]), self._length)
        return row if number < len(self) else row | self.rows.padding(self._length)
