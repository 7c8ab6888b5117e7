"""Samples of different lengths, fitted to the sequence length and packed into rows."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError, DataError
from shardwise.data.batch import IGNORE_INDEX, Row
from shardwise.data.encoding import Encoded
from shardwise.data.json_records import counted
from shardwise.data.loader import Rows

TooLong = Literal["cut", "split", "drop"]
"""The part of a sample longer than a sequence that is kept: its beginning, all in pieces, or nothing."""


@dataclass(frozen=True)
class TokenSamples:
    """Samples in one flat array of tokens.

    ``tokens``, ``learned`` and ``num_bytes`` (bytes in UTF-8 that a token adds to the text; 0 for a special token) are
    ``[n]``. ``starts``, ``[samples + 1]``, has the start of each sample and the end of the last one. ``eos_id`` pads.
    """

    name: str
    tokens: NDArray[Any] = field(repr=False)
    learned: NDArray[Any] = field(repr=False)
    starts: NDArray[Any] = field(repr=False)
    num_bytes: NDArray[Any] = field(repr=False)
    eos_id: int

    @classmethod
    def of(cls, name: str, encoded: Sequence[Encoded], eos_id: int) -> TokenSamples:
        """Join encoded samples, at least one, in order."""
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


class SampleRows(Rows):
    """Rows of one or several samples.

    A sample of ``n`` tokens takes ``n - 1`` positions, each with the next token as its label. A sample that takes more
    than ``sequence_length`` positions is cut, split or dropped. Packed rows are filled by best fit, longest first.

    Args:
        packing: whether to put several samples into a row, with position ids from 0 in each, and different document
            ids.
        multiple_of: divisor of the length of unpacked rows, and of ``sequence_length``.
        shortest: least length of unpacked rows.

    Attributes:
        num_masked: number of samples or pieces that were left out because no token in them is trained on.
        lengths: ``[rows]``: number of positions that samples take.
        labels: ``[rows]``: number of labels that are not ignored.
        num_bytes: size of the text of these labels in UTF-8, without special tokens.
    """

    def __init__(
        self,
        samples: TokenSamples,
        sequence_length: int,
        *,
        packing: bool = True,
        too_long: TooLong = "cut",
        multiple_of: int = 1,
        shortest: int = 1,
    ) -> None:
        if sequence_length < 1 or sequence_length % multiple_of:
            raise ConfigError(f"sequence_length {sequence_length} must be a multiple of {multiple_of}, at least 1")
        self.samples, self.sequence_length, self.packing, self.too_long = samples, sequence_length, packing, too_long
        self._multiple_of, self._shortest = multiple_of, shortest
        self.num_too_long = self.num_masked = 0
        pieces = list(self._pieces())
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

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of each piece of a sample."""
        s, learned = self.sequence_length, self.samples.learned
        for start, stop in zip(self.samples.starts[:-1].tolist(), self.samples.starts[1:].tolist(), strict=True):
            parts = [(start, stop)]
            if stop - start > s + 1:
                self.num_too_long += 1
                if self.too_long == "drop":
                    continue
                # The last token of a piece is its last label, and the first input of the next piece.
                parts = [(begin, min(begin + s + 1, stop)) for begin in range(start, stop - 1, s)]
                parts = parts[:1] if self.too_long == "cut" else parts
            for begin, end in parts:
                if learned[begin + 1 : end].any():
                    yield begin, end
                else:
                    self.num_masked += 1

    def notes(self, what: str) -> list[str]:
        """Return notes on samples that were cut or left out, one line each; ``what`` is their purpose."""
        notes = []
        if self.num_too_long:
            of = f"{counted(len(self.samples), 'sample')} {what}"
            notes.append(note_on_length(self.num_too_long, of, self.too_long, self.sequence_length))
        if self.num_masked:
            notes.append(
                f"{counted(self.num_masked, 'sample')} {what}, or parts of them, left out since the cut leaves nothing "
                "to learn"
            )
        return notes

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int, length: int | None = None) -> Row:
        """Return ``tokens`` and ``labels``; if packed, ``position_ids`` and ``document_ids``, else ``lengths []``.

        All but ``lengths`` are ``[s]``, padded to ``length`` or ``sequence_length`` with ignored labels and document id
        -1.
        """
        row = self.padding(self.sequence_length if length is None else length)
        if not self.packing:
            row["lengths"] = self.lengths[index]
        place = 0
        for number, (start, stop) in enumerate(self._rows[index]):
            here = slice(place, place + stop - start - 1)
            ids = self.samples.tokens[start:stop].astype(np.int64)
            row["tokens"][here] = ids[:-1]
            row["labels"][here] = np.where(self.samples.learned[start + 1 : stop], ids[1:], IGNORE_INDEX)
            if self.packing:
                row["position_ids"][here] = np.arange(stop - start - 1)
                row["document_ids"][here] = number
            place = here.stop
        return row

    def width(self, indices: NDArray[np.int64]) -> int:
        """Return ``sequence_length`` if packed, else the longest length rounded up to a multiple of ``multiple_of``."""
        if self.packing:
            return self.sequence_length
        longest = max(self._shortest, int(self.lengths[indices].max()))
        return -(-longest // self._multiple_of) * self._multiple_of

    def computed(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of the rows, or of packed rows those of the samples and of the padding."""
        if not self.packing:
            return super().computed(indices)
        samples = [stop - start - 1 for index in indices.tolist() for start, stop in self._rows[index]]
        return np.concatenate([samples, self.sequence_length - self.lengths[indices]])

    def padding(self, length: int) -> Row:
        row = {"tokens": np.full(length, self.samples.eos_id, np.int64), "labels": np.full(length, IGNORE_INDEX)}
        if self.packing:
            row |= {"position_ids": np.arange(length, dtype=np.int64), "document_ids": np.full(length, -1)}
        return row


_PAST = {"cut": "cut", "split": "split", "drop": "dropped"}


def note_on_length(count: int, of: str, too_long: TooLong, sequence_length: int) -> str:
    """Return the note that ``count`` of several samples, described by ``of``, were too long."""
    return (
        f"{count} of {of} {_PAST[too_long]}, as they are longer than {sequence_length + 1} tokens (--too-long, "
        "--model.sequence-length)"
    )


def _packed(pieces: Sequence[tuple[int, int]], length: int) -> list[list[tuple[int, int]]]:
    """Pack pieces into rows by best fit: each, the longest first, goes where it leaves the least room."""
    rows: list[list[tuple[int, int]]] = []
    # Sorted pairs of the room left in a row, and the row.
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
