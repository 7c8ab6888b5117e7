"""Blends: several sources of samples, each with a weight. A blend of n samples takes weight x n of each, at any n.

The order is that of Megatron's blended dataset: each sample comes from the source that lags most behind its weight.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError
from shardwise.data.batch import Row
from shardwise.data.loader import BatchSchedule, Rows


def parse_blend(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return sources and weights of ``0.7 web 0.3 code``, weights that sum to 1; None for sources without weights.

    Raises:
        ConfigError: some sources have a weight and others have none, or a weight is not finite, negative or 0.
    """
    given = [_number(word) for word in words[::2]]
    if not given or given[0] is None:
        return list(words), None
    if len(words) % 2 or None in given:
        raise ConfigError(
            f"the blend {' '.join(words)!r} begins with a weight; give one before each source, such as 0.7 web 0.3 "
            "code (a file that is named as a number: ./0.7)"
        )
    return list(words[1::2]), normalized([weight for weight in given if weight is not None])


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def normalized(weights: Sequence[float]) -> list[float]:
    """Return weights that sum to 1. Raises ConfigError unless each is finite and more than 0."""
    if not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(
            f"the weights of a blend are {', '.join(f'{weight:g}' for weight in weights)}; each must be more than 0: "
            "leave out sources that are not wanted"
        )
    array = np.array(weights, dtype=np.float64)
    shares: list[float] = (array / array.sum()).tolist()
    return shares


def blend_order(
    weights: Sequence[float], size: int, limits: Sequence[int] | None = None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return the source of each sample, and its number in that source, ``[size]`` each.

    Args:
        weights: shares of the sources, which sum to 1.
        size: number of samples.
        limits: number of samples that each source has; None for as many as are wanted.
    """
    sources = np.empty(size, np.int16)
    numbers = np.empty(size, np.int64)
    counts, left = [0] * len(weights), list(range(len(weights)))
    for index in range(size):
        scale = float(max(index, 1))
        lags = [weights[source] * scale - counts[source] for source in left]
        source = left[lags.index(max(lags))]
        sources[index], numbers[index] = source, counts[source]
        counts[source] += 1
        if limits is not None and counts[source] == limits[source]:
            left.remove(source)
    return sources, numbers


@dataclass(frozen=True)
class BlendSchedule(BatchSchedule):
    """Order of a blend; a source has its own order, and its own epochs.

    Attributes:
        sources, numbers: source of each sample, and its number in that source.
        parts: order of each source.
        firsts: index of the first row of each source.
    """

    sources: NDArray[Any]
    numbers: NDArray[Any]
    parts: tuple[BatchSchedule, ...]
    firsts: NDArray[np.int64]

    def samples(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the epoch of its source, and the row, of each of ``numbers``. ConfigError after the last sample."""
        if numbers.max() >= len(self.sources):
            raise ConfigError(f"the blend has {len(self.sources)} samples, and sample {numbers.max()} is wanted")
        epochs, rows = np.empty_like(numbers), np.empty_like(numbers)
        for source, part in enumerate(self.parts):
            own = self.sources[numbers] == source
            if own.any():
                epochs[own], found = part.samples(self.numbers[numbers[own]].astype(np.int64))
                rows[own] = found + self.firsts[source]
        return epochs, rows


class BlendedRows(Rows):
    """Rows of several sources, which follow one another.

    Args:
        parts: rows of each source.
        order: source of each sample, and its number in that source, as of ``blend_order``; None for rows that are only
            measured.
    """

    def __init__(self, parts: Sequence[Rows], order: tuple[NDArray[np.int16], NDArray[np.int64]] | None = None) -> None:
        self.parts: tuple[Rows, ...] = tuple(parts)
        self.order = order
        self.firsts = np.cumsum([0, *map(len, parts)])
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.labels = np.concatenate([part.labels for part in parts])
        self.num_bytes = sum(part.num_bytes for part in parts)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def _split(self, indices: NDArray[np.int64]) -> list[tuple[Rows, NDArray[np.int64]]]:
        """Return each source that has some of these rows, with its own indices."""
        sources = np.searchsorted(self.firsts, indices, side="right") - 1
        return [(self.parts[each], indices[sources == each] - self.firsts[each]) for each in np.unique(sources)]

    def width(self, indices: NDArray[np.int64]) -> int:
        """Return the padded length of a batch."""
        return max(part.width(own) for part, own in self._split(indices))

    def row(self, index: int, length: int | None = None) -> Row:
        """Return a row; see ``Rows``."""
        ((part, (own,)),) = self._split(np.array([index]))
        return part.row(int(own), length)

    def padding(self, length: int) -> Row:
        """Return a row whose labels are all ignored."""
        return self.parts[0].padding(length)

    def computed(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of the texts that a batch computes; see ``Rows``."""
        width, found = self.width(indices), []
        for part, own in self._split(indices):
            lengths = part.computed(own)
            # Rows of other sources may be longer.
            found.append(np.where(lengths == part.width(own), width, lengths))
        return np.concatenate(found)

    def num_learned(self, indices: NDArray[np.int64]) -> int:
        """Return the number of tokens that have a label."""
        return sum(part.num_learned(own) for part, own in self._split(indices))

    def in_epoch(self, seed: int, epoch: int) -> Rows:
        """Return the rows with each source as in its epoch."""
        rows = copy.copy(self)
        rows.parts = tuple(part.in_epoch(seed, epoch) for part in self.parts)
        return rows

    def schedule(self, global_batch_size: int, seed: int) -> BatchSchedule:
        """Return the order of the blend."""
        assert self.order is not None
        parts = tuple(part.schedule(1, seed) for part in self.parts)
        return BlendSchedule(len(self), global_batch_size, seed, *self.order, parts, self.firsts[:-1])
