"""Samples of indexed documents as Megatron's GPT dataset draws them: the same samples in the same order from a seed.

The documents are concatenated in a shuffled order, for as many epochs as are needed, and cut into samples, which are
shuffled again. If only a small part of the last epoch is needed, its documents and samples come last.

The three indices are those of Megatron, also in a cache: ``document_index`` has the documents in order, ``sample_index
[n + 1, 2]`` the place in it and the offset at which each sample begins, ``shuffle_index`` the samples in order.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError, DataError
from shardwise.data.batch import IGNORE_INDEX, Row
from shardwise.data.indexed import IndexedTokens, cached_arrays
from shardwise.data.loader import BatchSchedule, Rows, SequentialSchedule

# The last epoch is shuffled separately if less than this share of its samples is needed.
_SHARE_OF_AN_EPOCH = 0.8
_PADDING = -1
_CACHE_FORMAT = 1


class Sequences(Protocol):
    """Sequences of tokens, such as ``IndexedTokens``."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return a part of a sequence."""


@dataclass(frozen=True)
class SampleCounts:
    """Numbers of a dataset, which follow from its number of tokens.

    Attributes:
        num_epochs: number of passes over the documents.
        num_samples: number of samples of all passes.
        num_first: number of samples that are shuffled apart from those of the last pass; all if there is no such part.
    """

    num_epochs: int
    num_samples: int
    num_first: int

    @classmethod
    def of(
        cls, num_tokens: int, sequence_length: int, wanted: int | None, *, extra: int = 1, keeps_partial: bool = False
    ) -> SampleCounts:
        """Count the samples of documents of ``num_tokens`` tokens.

        Args:
            num_tokens: number of tokens of a pass.
            sequence_length: number of tokens of a sample.
            wanted: least number of samples; None for those of one pass.
            extra: 1 if a sample has one more token, the last label.
            keeps_partial: whether the last tokens, which do not fill a sample, are one.
        """
        s = sequence_length
        if num_tokens <= extra:
            if wanted:
                raise ConfigError(f"documents of {num_tokens} tokens hold no sample of {s} tokens; use more documents")
            return cls(1, 0, 0)
        epochs = 1 if wanted is None else max(1, -(-(wanted * s + extra) // num_tokens))
        total = (epochs * num_tokens - extra + (s - 1) * keeps_partial) // s
        before, of_one = ((epochs - 1) * num_tokens - extra) // s, (num_tokens - extra) // s
        is_apart = epochs > 1 and (wanted or 0) - before < int(_SHARE_OF_AN_EPOCH * of_one)
        return cls(epochs, total, before if is_apart else total)


@dataclass(frozen=True)
class GPTSamples:
    """The samples of some documents; ``tokens`` reads one.

    Attributes:
        source: the documents.
        sequence_length: number of tokens of a sample, without the extra one.
        extra: 1 if a sample has one more token, the last label.
        document_index, sample_index, shuffle_index: see the module.
    """

    source: Sequences
    sequence_length: int
    extra: int
    document_index: NDArray[np.int32]
    sample_index: NDArray[Any]
    shuffle_index: NDArray[Any]

    @classmethod
    def build(
        cls,
        source: Sequences,
        documents: NDArray[np.int32],
        sequence_length: int,
        wanted: int | None,
        seed: int,
        *,
        extra: int = 1,
        keeps_partial: bool = False,
        cache: str | os.PathLike[str] | None = None,
    ) -> GPTSamples:
        """Build the indices, or map those that an earlier call left.

        Args:
            source: all documents.
            documents: numbers of those to use, one after the other.
            sequence_length: number of tokens of a sample.
            wanted: least number of samples; None for those of one pass.
            seed: seed of ``numpy.random.RandomState``.
            extra: 1 if a sample has one more token, the last label.
            keeps_partial: whether the last tokens, which do not fill a sample, are one.
            cache: folder of the indices; several processes may use it at once, but each that finds nothing does the
                work.

        Raises:
            ConfigError: the documents are too short for a wanted sample, or ``sequence_length`` is less than 1.
        """
        if sequence_length < 1:
            raise ConfigError(f"sequence_length is {sequence_length}; it must be at least 1")
        num_tokens = int(source.sequence_lengths[documents].sum(dtype=np.int64))
        counts = SampleCounts.of(num_tokens, sequence_length, wanted, extra=extra, keeps_partial=keeps_partial)
        facts = json.dumps([_CACHE_FORMAT, *vars(counts).values(), sequence_length, seed, extra])
        lengths = hashlib.sha256(source.sequence_lengths[documents].tobytes()).hexdigest()
        indices = cached_arrays(
            cache,
            ("document_index", "sample_index", "shuffle_index"),
            f"{facts} {documents[:1]} {lengths}".encode(),
            ((counts.num_epochs * len(documents),), (counts.num_samples + 1, 2), (counts.num_samples,)),
            lambda: _indices(source.sequence_lengths, documents, sequence_length, seed, extra, counts),
        )
        return cls(source, sequence_length, extra, *indices)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.shuffle_index)

    def tokens(self, number: int, padding: int = _PADDING) -> NDArray[np.int64]:
        """Return the tokens of a sample, ``[s + extra]``; ``padding`` fills a partial one."""
        sample = int(self.shuffle_index[number])
        (first, begin), (last, end) = self.sample_index[sample].tolist(), self.sample_index[sample + 1].tolist()
        text = np.full(self.sequence_length + self.extra, padding, dtype=np.int64)
        done = 0
        for place in range(first, last + 1):
            stop = None if place < last else end + self.extra - begin
            part = self.source.get(int(self.document_index[place]), begin, stop)
            text[done : done + len(part)] = part
            done, begin = done + len(part), 0
        return text


def _indices(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], s: int, seed: int, extra: int, counts: SampleCounts
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    random = np.random.RandomState(seed)
    is_apart = counts.num_first < counts.num_samples
    epochs = [counts.num_epochs - 1, 1] if is_apart else [counts.num_epochs]
    document_index = np.concatenate([random.permutation(np.tile(documents, count)) for count in epochs])
    if not (total := counts.num_samples):
        return document_index, np.zeros((1, 2), np.int32), np.empty(0, np.uint32)
    sizes = lengths[document_index]
    ends = np.cumsum(sizes, dtype=np.int64)
    # A sample begins in the document that has the last token of the one before.
    starts = np.minimum(np.arange(total + 1, dtype=np.int64) * s, ends[-1] - extra)
    places = np.searchsorted(ends, starts - 1 + extra, side="right")
    places[0] = 0
    offsets = starts - ends[places] + sizes[places]
    wide = np.int32 if len(document_index) <= np.iinfo(np.int32).max else np.int64
    sample_index = np.stack([places, offsets], axis=1).astype(wide)
    number = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    runs = [(0, counts.num_first), (counts.num_first, total)] if is_apart else [(0, total)]
    shuffle_index = np.concatenate([random.permutation(np.arange(*run, dtype=number)) for run in runs])
    return document_index, sample_index, shuffle_index


def split_bounds(split: str) -> list[tuple[float, float] | None]:
    """Return the range of the documents in the training, validation and test part, as fractions; None if it is empty.

    Args:
        split: weights of the parts, such as ``"969,30,1"``; missing ones are 0.

    Raises:
        ConfigError: a weight is no number or negative, there are more than three, or all are 0.
    """
    try:
        weights = [float(weight) for weight in split.split(",")]
    except ValueError:
        weights = [-1.0]
    if not all(0 <= weight < math.inf for weight in weights) or len(weights) > 3 or not sum(weights):
        raise ConfigError(f"split is {split!r}; give up to three weights of at least 0, not all 0, such as 969,30,1")
    shares = np.array([*weights, *[0.0] * (3 - len(weights))])
    ends: list[float] = []
    for share in (shares / shares.sum()).tolist():
        ends.append((ends[-1] if ends else 0.0) + share)
    begins = [0.0, *ends[:-1]]
    return [(begin, end) if end > begin else None for begin, end in zip(begins, ends, strict=True)]


def documents_of(bounds: tuple[float, float] | None, count: int) -> NDArray[np.int32]:
    """Return the numbers of the documents in a part of ``count`` documents."""
    begin, end = bounds or (0.0, 0.0)
    return np.arange(round(begin * count), round(end * count), dtype=np.int32)


class GPTRows(Rows):
    """Samples of indexed documents as rows, in their own order.

    Args:
        samples: the samples, with their extra token.
        vocab_size: number of ids; a larger id in the data is an error.
        eos_id: id that pads rows.
        count: number of samples to use; None for all.
    """

    def __init__(self, samples: GPTSamples, vocab_size: int, eos_id: int, count: int | None = None) -> None:
        self.samples, self.sequence_length = samples, samples.sequence_length
        self._vocab_size, self._eos_id = vocab_size, eos_id
        self.lengths = np.full(len(samples) if count is None else min(count, len(samples)), self.sequence_length)
        tokens = samples.source.sequence_lengths[samples.document_index].sum(dtype=np.int64)
        partial = int(tokens) - 1 - (len(samples) - 1) * self.sequence_length
        self.lengths[samples.shuffle_index[: len(self.lengths)] == len(samples) - 1] = min(
            partial, self.sequence_length
        )
        self.labels = self.lengths

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def schedule(self, global_batch_size: int, seed: int) -> BatchSchedule:
        """Return the schedule of the order of the samples themselves."""
        return SequentialSchedule(len(self), global_batch_size, seed)

    def width(self, indices: NDArray[np.int64]) -> int:
        """Return the sequence length."""
        return self.sequence_length

    def row(self, index: int, length: int | None = None) -> Row:
        """Return ``tokens [s]``, and the token after each as ``labels [s]``. DataError if one is no id."""
        text = self.samples.tokens(index)
        count = int(self.lengths[index]) + 1
        ids = text[:count]
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            wrong = ids.max() if ids.min() >= 0 else ids.min()
            source = self.samples.source
            name = source.bin_path if isinstance(source, IndexedTokens) else "the data"
            raise DataError(
                f"{name} has the token {wrong}, and the vocabulary has ids from 0 to {self._vocab_size - 1}; use the "
                "tokenizer that made the file"
            )
        row = self.padding(self.sequence_length)
        row["tokens"][: count - 1], row["labels"][: count - 1] = ids[:-1], ids[1:]
        return row

    def padding(self, length: int) -> Row:
        """Return a row whose labels are all ignored."""
        tokens = np.full(length, self._eos_id, np.int64)
        return {"tokens": tokens, "labels": np.full_like(tokens, IGNORE_INDEX)}
