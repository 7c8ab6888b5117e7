"""Texts with labels: from records to what a label is, and to rows of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.data.dataset import IGNORE_INDEX
from shardwise.data.json_records import Record, check_text, kind_of, text_of
from shardwise.errors import ConfigError, DataError

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]

_MOST_LABELS = 1 << 20
_SHOWN = 5


@dataclass(frozen=True)
class LabelledText:
    """A text, or two, and what is to be said of it.

    Attributes:
        where: the file, and the place in it.
        text: the text.
        pair: the second one, or None.
        label: as the record has it: a name, a number, or a list of them; None if it has none.
    """

    where: str
    text: str
    pair: str | None
    label: Any


def labelled_text_of(record: Record, text_key: str, *, needs_label: bool = True) -> LabelledText:
    """A record with ``text_key``, ``label`` and, for pairs, ``text_pair``.

    Raises:
        DataError: one is missing, or no text. The message says where.
    """
    text = text_of(record, text_key)
    value = record.value if isinstance(record.value, dict) else {}
    pair = value.get("text_pair")
    if pair is not None and not isinstance(pair, str):
        raise DataError(f"{record.where}: 'text_pair' is not a string but {kind_of(pair)}; make it a string")
    if pair is not None:
        check_text(pair, record.where, "'text_pair'")
    label = next((value[name] for name in ("label", "labels") if value.get(name) is not None), None)
    if label is None and needs_label:
        keys = ", ".join(map(repr, list(value)[:_SHOWN])) or "none"
        what = "the 'label' is null" if "label" in value else f"no 'label' (its keys: {keys})"
        raise DataError(f"{record.where}: {what}; each record must have a text and its label")
    return LabelledText(record.where, text, pair, label)


@dataclass(frozen=True)
class Labels:
    """What labels there are.

    Attributes:
        names: of each, in order.
        problem: what they mean.
    """

    names: tuple[str, ...]
    problem: ProblemType

    def __len__(self) -> int:
        """Number of labels."""
        return len(self.names)

    def encode(self, text: LabelledText) -> NDArray[Any]:
        """``[1]`` int64, the label's number; or ``[n]`` fp32, a number for each.

        Raises:
            DataError: a label that is none of these.
        """
        label, n = text.label, len(self)
        if self.problem == "single_label_classification":
            return np.array([self._number(label, text.where)], dtype=np.int64)
        if self.problem == "regression":
            values = label if isinstance(label, list) else [label]
            if len(values) != n or not all(map(_is_finite, values)):
                raise DataError(f"{text.where}: the label is {_shown(label)}; it must be {_numbers(n)}")
            return np.array(values, dtype=np.float32)
        if not isinstance(label, list):
            raise DataError(f"{text.where}: the label is {kind_of(label)}; it must be a list, of names or of 0 and 1")
        if label and all(_is_finite(each) for each in label):
            if len(label) != n or not all(each in (0, 1) for each in label):
                raise DataError(f"{text.where}: the label is {_shown(label)}; it must be 0 or 1 for each of {n} labels")
            return np.array(label, dtype=np.float32)
        chosen = np.zeros(n, dtype=np.float32)
        chosen[[self._number(each, text.where) for each in label]] = 1.0
        return chosen

    def _number(self, label: object, where: str) -> int:
        if isinstance(label, str):
            if label in self.names:
                return self.names.index(label)
            more = f" and {len(self) - _SHOWN} more" if len(self) > _SHOWN else ""
            raise DataError(
                f"{where}: the label {label[:40]!r} is none of the model's: {', '.join(self.names[:_SHOWN])}{more}"
            )
        if type(label) is not int:
            raise DataError(
                f"{where}: the label is {kind_of(label)}, {_shown(label)}; it must be a name or an integer"
                f"{', or the problem a regression (--problem-type)' if isinstance(label, float) else ''}"
            )
        if not 0 <= label < len(self):
            raise DataError(f"{where}: the label {label} is out of range; it must be from 0 to {len(self) - 1}")
        return label


def labels_of(
    texts: Sequence[LabelledText], *, num_labels: int | None = None, problem: ProblemType | None = None
) -> Labels:
    """The labels that texts have: names in sorted order, or integers from 0, or a number of a regression.

    Args:
        texts: those to train on.
        num_labels: how many there are; as many as the texts have if None.
        problem: what they mean; if None, a fraction is a regression's, and a list holds any number of labels.

    Raises:
        DataError: labels of several kinds, or other ones than ``num_labels``.
        ConfigError: ``num_labels`` is less than the kind of problem needs.
    """
    given = [each.label for each in texts]
    if problem is None:
        if any(isinstance(label, list) for label in given):
            problem = "multi_label_classification"
        elif num_labels == 1 or any(isinstance(label, float) for label in given):
            problem = "regression"
        else:
            problem = "single_label_classification"
    if problem == "regression":
        first = given[0]
        count = num_labels or (len(first) if isinstance(first, list) else 1)
        return _usual(count, problem)
    flat = [each for label in given for each in (label if isinstance(label, list) else [label])]
    if any(isinstance(label, str) for label in flat):
        names = sorted({label for label in flat if isinstance(label, str)})
        odd = next((text for text in texts if not _is_named(text.label)), None)
        if odd is not None:
            raise DataError(
                f"{odd.where}: the label is {_shown(odd.label)}, and others are names; make all of one kind"
            )
        if num_labels not in (None, len(names)):
            raise DataError(
                f"--num-labels is {num_labels}, and the data has {len(names)} labels: {', '.join(names[:_SHOWN])}"
                f"{' ...' if len(names) > _SHOWN else ''}; leave the flag out, or repair the data"
            )
        if len(names) < 2 and problem == "single_label_classification":
            raise DataError(f"all labels in the data are {names[0]!r}; a classifier needs two")
        return Labels(tuple(names), problem)
    if problem == "multi_label_classification":
        return _usual(num_labels or max(map(len, given), default=1), problem)
    largest = max((label for label in flat if type(label) is int), default=0)
    count = largest + 1 if num_labels is None else num_labels
    if num_labels is None and count < 2:
        raise DataError("all labels in the data are 0; a classifier needs two, or --num-labels")
    return _usual(count, problem)


def _usual(count: int, problem: ProblemType) -> Labels:
    if not 1 <= count <= _MOST_LABELS:
        raise ConfigError(f"{count} labels; there can be from 1 to {_MOST_LABELS}")
    return Labels(tuple(f"LABEL_{index}" for index in range(count)), problem)


def _is_named(label: object) -> bool:
    return isinstance(label, str) or (isinstance(label, list) and all(isinstance(each, str) for each in label))


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # it is a number here


def _numbers(count: int) -> str:
    return "a finite number" if count == 1 else f"a list of {count} finite numbers"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class LabelledRows:
    """Rows of tokens, each with a label.

    Args:
        tokens: of each row, int64; at least one.
        kinds: the token types of each row; None for a model without.
        values: ``[1]`` or ``[n]`` of each row; see ``Labels.encode``.
        pad_id: what rows are filled with, on the right.

    Attributes:
        lengths: ``[rows]``: tokens.
        labels: ``[rows]``: 1 each.

    Raises:
        DataError: no rows.
    """

    def __init__(
        self,
        tokens: Sequence[NDArray[np.int64]],
        kinds: Sequence[NDArray[np.int64]] | None,
        values: Sequence[NDArray[Any]],
        pad_id: int,
    ) -> None:
        if not tokens:
            raise DataError("there is no text with a label; give at least one")
        self._tokens, self._kinds, self._values, self._pad_id = tokens, kinds, values, pad_id
        self.lengths = np.array([len(each) for each in tokens], dtype=np.int64)
        self.labels = np.ones(len(tokens), dtype=np.int64)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._tokens)

    def width(self, rows: NDArray[np.int64] | slice) -> int:
        """Places that all of ``rows`` have in a batch."""
        return int(self.lengths[rows].max())

    def row(self, index: int, length: int | None = None) -> tuple[NDArray[Any], ...]:
        """``(tokens [s], label [1 or n])``, with token types also ``kinds [s]`` and ``mask [s]``; new arrays."""
        return self._filled(
            self._tokens[index], None if self._kinds is None else self._kinds[index], self._values[index], length
        )

    def padding(self, length: int) -> tuple[NDArray[Any], ...]:
        """A row whose label counts for nothing: -100, or NaN."""
        value = self._values[0]
        nothing = np.full_like(value, IGNORE_INDEX if value.dtype == np.int64 else np.nan)
        return self._filled(self._tokens[0][:1], None if self._kinds is None else self._kinds[0][:1], nothing, length)

    def _filled(
        self, tokens: NDArray[np.int64], kinds: NDArray[np.int64] | None, value: NDArray[Any], length: int | None
    ) -> tuple[NDArray[Any], ...]:
        length = len(tokens) if length is None else length
        row = np.full(length, self._pad_id, dtype=np.int64)
        row[: len(tokens)] = tokens
        if kinds is None:
            return row, value.copy()
        types, mask = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.int64)
        types[: len(kinds)], mask[: len(tokens)] = kinds, 1
        return row, value.copy(), types, mask


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
