"""Rows of tokens with labels, of whole texts or of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.dataset import IGNORE_INDEX
from shardwise.errors import DataError


class LabelledRows:
    """Rows of tokens, each with a label, or with one for each of its tokens.

    Args:
        tokens: of each row, int64; at least one.
        kinds: the token types of each row; None for a model without.
        values: ``[1]`` or ``[n]`` of each row, see ``Labels.encode``; of tokens int64 as many as the row has.
        pad_id: what rows are filled with, on the right.
        of_tokens: whether each token has a label, or -100.

    Attributes:
        lengths: ``[rows]``: tokens.
        labels: ``[rows]``: labels that count, 1 of each text.

    Raises:
        DataError: no rows.
    """

    def __init__(
        self,
        tokens: Sequence[NDArray[np.int64]],
        kinds: Sequence[NDArray[np.int64]] | None,
        values: Sequence[NDArray[Any]],
        pad_id: int,
        *,
        of_tokens: bool = False,
    ) -> None:
        if not tokens:
            raise DataError("there is no text with a label; give at least one")
        self._tokens, self._kinds, self._values, self._pad_id = tokens, kinds, values, pad_id
        self._of_tokens = of_tokens
        self.lengths = np.array([len(each) for each in tokens], dtype=np.int64)
        counts = [int((each != IGNORE_INDEX).sum()) if of_tokens else 1 for each in values]
        self.labels = np.array(counts, dtype=np.int64)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._tokens)

    def width(self, rows: NDArray[np.int64] | slice) -> int:
        """Places that all of ``rows`` have in a batch."""
        return int(self.lengths[rows].max())

    def row(self, index: int, length: int | None = None) -> tuple[NDArray[Any], ...]:
        """``(tokens [s], label [1, n or s])``, with token types also ``kinds [s]`` and ``mask [s]``; new arrays."""
        return self._filled(
            self._tokens[index], None if self._kinds is None else self._kinds[index], self._values[index], length
        )

    def padding(self, length: int) -> tuple[NDArray[Any], ...]:
        """A row whose label counts for nothing: -100, or NaN."""
        value = self._values[0][:1] if self._of_tokens else self._values[0]
        nothing = np.full_like(value, IGNORE_INDEX if value.dtype == np.int64 else np.nan)
        return self._filled(self._tokens[0][:1], None if self._kinds is None else self._kinds[0][:1], nothing, length)

    def _filled(
        self, tokens: NDArray[np.int64], kinds: NDArray[np.int64] | None, value: NDArray[Any], length: int | None
    ) -> tuple[NDArray[Any], ...]:
        length = len(tokens) if length is None else length
        row = np.full(length, self._pad_id, dtype=np.int64)
        row[: len(tokens)] = tokens
        value = (
            np.pad(value, (0, length - len(value)), constant_values=IGNORE_INDEX) if self._of_tokens else value.copy()
        )
        if kinds is None:
            return row, value
        types, mask = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.int64)
        types[: len(kinds)], mask[: len(tokens)] = kinds, 1
        return row, value, types, mask


class EvaluationRows:
    """Labelled rows of one length, to measure on.

    Args:
        rows: all of them.
    """

    def __init__(self, rows: LabelledRows) -> None:
        self.rows = rows
        self._length = rows.width(slice(None))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[NDArray[Any], ...]:
        """One row."""
        return self.rows.row(index, self._length)

    def padding(self) -> tuple[NDArray[Any], ...]:
        """A row whose label counts for nothing."""
        return self.rows.padding(self._length)
