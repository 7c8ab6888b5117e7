"""Samples of different lengths: fitted to the sequence length, packed into rows, batched, measured."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError, DataError
from shardwise.data.encoding import Encoded
from shardwise.data.loader import Batch, BatchSchedule, stack
from shardwise.data.tokens import IGNORE_INDEX

TooLong = Literal["cut", "split", "drop"]
"""What becomes of a sample that is longer than a sequence: its beginning, parts of it, or nothing."""

Row = tuple[NDArray[np.int64], ...]
"""``(tokens [s], labels [s])``, of several samples also ``position_ids [s]`` and ``document_ids [s]``; int64."""


@dataclass(frozen=True)
class TokenSamples:
    """Samples as one flat array of tokens.

    Attributes:
        name: what people call them.
        tokens: ``[n]`` ids of all samples, one after the other.
        learned: ``[n]`` bools: whether the token is learned.
        starts: ``[samples + 1]``: where each begins, and where the last one ends.
        num_bytes: ``[n]``: bytes in UTF-8 that each token adds to the text; none for a special token.
        eos_id: what fills rows.
    """

    name: str
    tokens: NDArray[Any] = field(repr=False)
    learned: NDArray[Any] = field(repr=False)
    starts: NDArray[Any] = field(repr=False)
    num_bytes: NDArray[Any] = field(repr=False)
    eos_id: int

    @classmethod
    def of(cls, name: str, encoded: Sequence[Encoded], eos_id: int) -> TokenSamples:
        """The samples in order; at least one."""
        return cls(
            name,
            np.concatenate([each.ids for each in encoded]).astype(np.uint32),
            np.concatenate([each.learned for each in encoded]),
            np.concatenate([[0], np.cumsum([len(each.ids) for each in encoded])]).astype(np.int64),
            np.concatenate([each.num_bytes for each in encoded]).astype(np.uint32),
            eos_id,
        )

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.starts) - 1


class SampleDataset:
    """Rows of samples, each row one sample or several.

    A sample of ``n`` tokens takes ``n - 1`` places of a row, each with the next token as its label. One that takes more
    than ``sequence_length`` is cut, split or dropped. Packed rows are filled by best fit, the longest samples first.

    Args:
        samples: the samples.
        sequence_length: ``s``, most places in a row.
        packing: put several samples into a row, each with positions of its own from 0 and a number of its own, by which
            a model keeps them apart.
        too_long: what becomes of longer samples.
        multiple_of: rows of a batch have a multiple of so many places, which divides ``sequence_length``.

    Attributes:
        samples, sequence_length, packing: likewise.
        num_too_long: samples that were longer.
        num_masked: samples or parts of them that were left out since nothing in them is learned after the cut.
        lengths: ``[rows]``: places that samples take.
        labels: ``[rows]``: labels that count.
        num_bytes: of the text of these labels in UTF-8; special tokens have none.

    Raises:
        ConfigError: ``sequence_length`` is less than 1.
        DataError: nothing is left.
    """

    def __init__(
        self,
        samples: TokenSamples,
        sequence_length: int,
        *,
        packing: bool = True,
        too_long: TooLong = "cut",
        multiple_of: int = 1,
    ) -> None:
        if sequence_length < 1 or sequence_length % multiple_of:
            raise ConfigError(f"sequence_length {sequence_length} must be a multiple of {multiple_of}, at least 1")
        self.samples, self.sequence_length, self.packing = samples, sequence_length, packing
        self._multiple_of = multiple_of
        self.num_too_long = self.num_masked = 0
        pieces = list(self._pieces(too_long))
        if not pieces:
            raise DataError(
                f"nothing of {samples.name!r} is left to learn from: {self.num_too_long} of {len(samples)} samples are "
                f"longer than sequence_length {sequence_length} + 1 tokens, and were {_PAST[too_long]}; use a larger "
                "sequence length"
            )
        self._rows = _packed(pieces, sequence_length) if packing else [[piece] for piece in pieces]
        learned_before, bytes_before = (
            np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
            for values in (samples.learned, samples.num_bytes * samples.learned)
        )

        def over_rows(count: Callable[[int, int], int]) -> NDArray[np.int64]:
            return np.array([sum(count(start, stop) for start, stop in row) for row in self._rows], dtype=np.int64)

        self.lengths = over_rows(lambda start, stop: stop - start - 1)
        self.labels = over_rows(lambda start, stop: learned_before[stop] - learned_before[start + 1])
        self.num_bytes = int(over_rows(lambda start, stop: bytes_before[stop] - bytes_before[start + 1]).sum())

    def _pieces(self, too_long: TooLong) -> Iterator[tuple[int, int]]:
        """Begin and end of what becomes of each sample."""
        s, learned = self.sequence_length, self.samples.learned
        for start, stop in zip(self.samples.starts[:-1].tolist(), self.samples.starts[1:].tolist(), strict=True):
            parts = [(start, stop)]
            if stop - start > s + 1:
                self.num_too_long += 1
                if too_long == "drop":
                    continue
                # The last token of a part is its last label, and the first token of the next one.
                parts = [(begin, min(begin + s + 1, stop)) for begin in range(start, stop - 1, s)]
                parts = parts[:1] if too_long == "cut" else parts
            for begin, end in parts:
                if learned[begin + 1 : end].any():
                    yield begin, end
                else:
                    self.num_masked += 1

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def row(self, index: int, length: int | None = None) -> Row:
        """One row, filled up to ``length`` places, or to ``sequence_length``; new arrays.

        What it is filled with has labels that count for nothing, and in a packed row a number of its own.
        """
        length = self.sequence_length if length is None else length
        row = self.padding(length)
        place = 0
        for number, (start, stop) in enumerate(self._rows[index]):
            here = slice(place, place + stop - start - 1)
            ids = self.samples.tokens[start:stop].astype(np.int64)
            row[0][here] = ids[:-1]
            row[1][here] = np.where(self.samples.learned[start + 1 : stop], ids[1:], IGNORE_INDEX)
            if self.packing:
                row[2][here] = np.arange(stop - start - 1)
                row[3][here] = number
            place = here.stop
        return row

    def text_lengths(self, index: int) -> tuple[NDArray[np.int64], ...]:
        """``(lengths [1],)``: places that a row's sample takes; nothing of a packed row, whose numbers say it."""
        return () if self.packing else (self.lengths[index : index + 1],)

    def width(self, rows: NDArray[np.int64] | slice) -> int:
        """Places that all of ``rows`` have in a batch."""
        if self.packing:
            return self.sequence_length
        return -(-int(self.lengths[rows].max()) // self._multiple_of) * self._multiple_of

    def padding(self, length: int) -> Row:
        """A row in which no label counts."""
        row = [np.full(length, self.samples.eos_id, np.int64), np.full(length, IGNORE_INDEX, np.int64)]
        if self.packing:
            row += [np.arange(length, dtype=np.int64), np.full(length, -1, np.int64)]
        return tuple(row)


_PAST = {"cut": "cut", "split": "split", "drop": "dropped"}


def _packed(pieces: Sequence[tuple[int, int]], length: int) -> list[list[tuple[int, int]]]:
    """Pieces in rows by best fit: each, the longest first, goes where it leaves the least room."""
    rows: list[list[tuple[int, int]]] = []
    # Pairs of the room that is left in a row and the row, in order.
    room: list[tuple[int, int]] = []
    for start, stop in sorted(pieces, key=lambda piece: piece[0] - piece[1]):
        size = stop - start - 1
        at = bisect.bisect_left(room, (size, -1))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append((start, stop))
        if left > size:
            bisect.insort(room, (left - size, row))
    return rows


class Rows(Protocol):
    """Rows of different lengths, one sample or several in each.

    Attributes:
        lengths: ``[rows]``: places that samples take.
        labels: ``[rows]``: of what a step's loss is the mean over, how many there are.
    """

    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of rows."""

    def row(self, index: int, length: int | None = None) -> Sequence[NDArray[Any]]:
        """One row, filled up to ``length`` places."""

    def text_lengths(self, index: int) -> tuple[NDArray[Any], ...]:
        """``(lengths [1],)`` of the text in a row, or ``[k, 1]`` of ``k`` rows; nothing if a row says it otherwise."""

    def width(self, rows: NDArray[np.int64] | slice) -> int:
        """Places that all of ``rows`` have in a batch."""


class SampleLoader:
    """The batches of samples; which rows make up which batch is a pure function of the seed and the step.

    Args:
        dataset: gives the rows.
        global_batch_size: rows in a step, over all data-parallel ranks.
        seed: seed of the order.

    Raises:
        ConfigError: ``global_batch_size`` is less than 1, or the seed negative.
    """

    def __init__(self, dataset: Rows, global_batch_size: int, seed: int) -> None:
        self.dataset = dataset
        self.schedule = BatchSchedule(len(dataset), global_batch_size, seed)

    def num_labels(self, step: int) -> int:
        """Labels that count in a step, over all data-parallel ranks."""
        return int(self.dataset.labels[self.schedule.global_batch(step)].sum())

    def num_tokens(self, step: int) -> int:
        """Tokens in a step, over all data-parallel ranks; what rows are filled with left out."""
        return int(self.dataset.lengths[self.schedule.global_batch(step)].sum())

    def batch(
        self,
        step: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_batch_size: int | None = None,
        *,
        with_lengths: bool = False,
    ) -> Iterator[Batch]:
        """The micro-batches of one rank in one step; see ``DataLoader.batch``.

        Packed rows have ``sequence_length`` places. Others have as many as the step's longest sample takes, or so many
        more as the dataset adds; ``with_lengths`` a batch of them ends with ``[b, 1]``, how many each sample takes.
        """
        if micro_batch_size is None:
            micro_batch_size = max(1, self.schedule.global_batch_size // max(1, dp_size))
        slices = self.schedule.micro_batches(dp_rank, dp_size, micro_batch_size)
        rows = self.schedule.global_batch(step)
        length = self.dataset.width(rows)

        def row(index: int) -> Sequence[NDArray[Any]]:
            return (*self.dataset.row(index, length), *(self.dataset.text_lengths(index) if with_lengths else ()))

        return (stack(map(row, rows[part].tolist())) for part in slices)


class EvaluationSamples:
    """The rows of a dataset, for measuring: every label counts once.

    Args:
        dataset: gives the rows.
    """

    def __init__(self, dataset: SampleDataset) -> None:
        self.dataset = dataset
        self._length = dataset.width(slice(None))

    @property
    def num_labels(self) -> int:
        """Labels that count."""
        return int(self.dataset.labels.sum())

    def bits_per_byte(self, total_nll: float) -> float:
        """Bits that the model spends on a byte of the text that is learned, the ends of turns included.

        Args:
            total_nll: sum over all labels that count of ``-ln p(label)``.
        """
        return total_nll / math.log(2) / max(1, self.dataset.num_bytes)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        """One row, all of them of one length."""
        return self.dataset.row(index, self._length)

    def text_lengths(self, index: int) -> tuple[NDArray[np.int64], ...]:
        """See ``SampleDataset.text_lengths``."""
        return self.dataset.text_lengths(index)

    def padding(self) -> Row:
        """A row in which no label counts."""
        return self.dataset.padding(self._length)
