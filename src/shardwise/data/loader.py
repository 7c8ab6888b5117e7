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
        """Return the padded length of a batch of these rows."""

    def row(self, index: int, length: int | None = None) -> Row:
        """Return one row in new arrays, padded to ``length`` positions, or to the default length.

        It includes ``lengths`` if no other array gives the end of its text. Raises IndexError if there is no such row.
        """

    def padding(self, length: int) -> Row:
        """Return a row whose labels are all ignored."""

    def computed(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of the texts that a batch of these rows computes, ``[n]``, padding included.

        Positions attend within their text: a padded row, or a document of a packed row, or the padding after it.
        """
        return np.full(len(indices), self.width(indices))

    def num_learned(self, indices: NDArray[np.int64]) -> int:
        """Return the number of tokens of these rows that have a label."""
        return int(self.labels[indices].sum())

    def in_epoch(self, seed: int, epoch: int) -> Rows:
        """Return the rows of an epoch; they differ between epochs only if each cuts texts differently."""
        return self

    def schedule(self, global_batch_size: int, seed: int) -> BatchSchedule:
        """Return the order in which batches go through the rows."""
        return BatchSchedule(len(self), global_batch_size, seed)


# Separate random numbers for each purpose make an epoch's order and offset independent.
_FOR_ORDER, FOR_OFFSET = 0, 1


def random_uint64(seed: int, epoch: int, purpose: int, count: int) -> NDArray[np.uint64]:
    """Return random numbers of an epoch for one purpose."""
    # NumPy guarantees the raw numbers of a bit generator across versions, but not the results of Generator.
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch, purpose)))
    return np.asarray(bits.random_raw(count), dtype=np.uint64)


# A batch of a blend needs the orders of all sources.
@lru_cache(maxsize=32)
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
    """Order of samples: each epoch is a new permutation of all samples, which consecutive batches go through.

    ``global_batch_size`` is the number of samples in a step, over all data-parallel ranks. It may exceed an epoch.
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

    def _numbers(self, step: int) -> NDArray[np.int64]:
        """Return the numbers of a step's samples, counted from the first step."""
        if step < 0:
            raise ConfigError(f"step {step} must be at least 0")
        first = step * self.global_batch_size
        return np.arange(first, first + self.global_batch_size, dtype=np.int64)

    def samples(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the epoch, from 0, and the sample of each of ``numbers``, which are counted from the first step."""
        epochs, places = np.divmod(numbers, self.num_samples)
        samples = np.empty_like(places)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            samples[of_epoch] = _epoch_order(self.seed, int(epoch), self.num_samples)[places[of_epoch]]
        return epochs, samples

    def epochs(self, step: int) -> NDArray[np.int64]:
        """Return the epoch, from 0, of each sample of a step, ``[global_batch_size]``."""
        return self.samples(self._numbers(step))[0]

    def global_batch(self, step: int) -> NDArray[np.int64]:
        """Return the samples of a step (from 0) in order, ``[global_batch_size]``."""
        return self.samples(self._numbers(step))[1]

    def micro_batches(self, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[slice]:
        """Return the slices of the global batch that are one rank's micro-batches, in order.

        A rank has a contiguous part of the global batch; the parts of all ranks in order are the whole, at every
        layout. ConfigError if the batch does not divide into micro-batches of all ranks.
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


class SequentialSchedule(BatchSchedule):
    """Order of samples that are shuffled already: as they come."""

    def samples(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return epochs and samples; see ``BatchSchedule``."""
        return np.divmod(numbers, self.num_samples)


class DataLoader:
    """Makes batches of rows.

    Args:
        rows: rows of the samples.
        global_batch_size: number of samples in a step, over all data-parallel ranks.
        seed: seed of the order of samples, and of the changes of rows between epochs.
        end: number of samples to learn in all steps; None for no end. A batch keeps its shape, and its places after
            the last sample are padding, which no loss counts.

    Raises:
        ConfigError: ``global_batch_size`` is less than 1, or the seed is negative.
    """

    def __init__(self, rows: Rows, global_batch_size: int, seed: int, *, end: int | None = None) -> None:
        self.rows = rows
        self.schedule = rows.schedule(global_batch_size, seed)
        self.end = end

    def num_samples(self, step: int) -> int:
        """Number of samples in a step, over all data-parallel ranks, without padding."""
        size = self.schedule.global_batch_size
        return size if self.end is None else min(size, max(0, self.end - step * size))

    def _samples(self, step: int) -> NDArray[np.int64]:
        return self.schedule.global_batch(step)[: self.num_samples(step)]

    def num_labels(self, step: int) -> int:
        """Number of labels in a step that are not ignored, over all data-parallel ranks."""
        return int(self.rows.labels[self._samples(step)].sum())

    def num_tokens(self, step: int) -> int:
        """Number of tokens in a step, over all data-parallel ranks, without padding."""
        return int(self.rows.lengths[self._samples(step)].sum())

    def computed(self, step: int) -> NDArray[np.int64]:
        """Lengths of the texts that a step computes, over all data-parallel ranks; see ``Rows.computed``."""
        return self.rows.computed(self.schedule.global_batch(step))

    def num_learned(self, step: int) -> int:
        """Number of tokens in a step that have a label, over all data-parallel ranks."""
        return self.rows.num_learned(self._samples(step))

    def batch(
        self,
        step: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_batch_size: int | None = None,
        *,
        with_lengths: bool = False,
    ) -> Iterator[Batch]:
        """Return the micro-batches of one rank in one step, all padded to the step's longest sample.

        Args:
            step: the step, from 0; steps may be requested in any order.
            dp_rank: data-parallel rank.
            dp_size: number of data-parallel ranks.
            micro_batch_size: ``b``, number of samples in one forward pass; None for all samples of the rank.
            with_lengths: whether batches include ``lengths``, if rows have them.

        Returns:
            An iterator of ``global_batch_size / (dp_size * b)`` batches, which are made on demand.

        Raises:
            ConfigError: the global batch does not divide into micro-batches of all ranks, the rank does not exist, or
                the step is negative. Raised by the call, not by the iterator.
        """
        if micro_batch_size is None:
            micro_batch_size = max(1, self.schedule.global_batch_size // max(1, dp_size))
        slices = self.schedule.micro_batches(dp_rank, dp_size, micro_batch_size)
        indices, epochs = self.schedule.global_batch(step), self.schedule.epochs(step)
        rows = {epoch: self.rows.in_epoch(self.schedule.seed, epoch) for epoch in set(epochs.tolist())}
        length, num_samples = self.rows.width(indices), self.num_samples(step)

        def row(place: int) -> Row:
            of_epoch = rows[int(epochs[place])]
            made = of_epoch.row(int(indices[place]), length)
            if place >= num_samples:
                made |= of_epoch.padding(length)
                if "lengths" in made:
                    made["lengths"] = np.zeros_like(made["lengths"])
            return made

        return (stack(map(row, range(part.start, part.stop)), with_lengths=with_lengths) for part in slices)


class HeldOut:
    """Held-out rows of one length, in which every label counts once.

    Args:
        rows: the rows.
        indices: ``[n]``, indices of the held-out rows; None for all rows.

    Attributes:
        rows: as given.
    """

    def __init__(self, rows: Rows, indices: NDArray[np.int64] | None = None) -> None:
        self.rows = rows
        self._indices = np.arange(len(rows)) if indices is None else indices
        self._length = rows.width(self._indices)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._indices)

    def part(self, num_rows: int) -> HeldOut:
        """Return ``num_rows`` of the rows, evenly spread; all of them if they are not more."""
        if len(self) <= num_rows:
            return self
        return HeldOut(self.rows, self._indices[np.arange(num_rows) * len(self) // num_rows])

    @property
    def num_labels(self) -> int:
        """Number of labels that are not ignored."""
        return int(self.rows.labels[self._indices].sum())

    def bits_per_byte(self, total_nll: float) -> float:
        """Return the bits per byte of the text of these rows, including the ends of documents and turns.

        The bytes of a part of ``rows`` are estimated by its labels.

        Args:
            total_nll: sum of ``-ln p(label)`` over all labels that are not ignored.
        """
        share = self.num_labels / max(1, int(self.rows.labels.sum()))
        return total_nll / math.log(2) / max(1, self.rows.num_bytes * share)

    def batches(
        self, micro_batch_size: int, dp_rank: int = 0, dp_size: int = 1, *, with_lengths: bool = False
    ) -> Iterator[Batch]:
        """Return the rows of one rank, in batches of one size.

        Every rank gets the same number of batches, which are padded with rows whose labels are ignored.

        Args:
            micro_batch_size: ``b``, number of rows in one forward pass.
            dp_rank: data-parallel rank.
            dp_size: number of data-parallel ranks.
            with_lengths: whether batches include ``lengths``, if rows have them; in padding rows, the last row's.

        Returns:
            An iterator of batches, which are made on demand.

        Raises:
            ConfigError: ``micro_batch_size`` is less than 1, or the rank does not exist.
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
