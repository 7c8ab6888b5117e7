"""Texts with a label, or with a label for each word: read from records, and encoded as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError, DataError
from shardwise.data.batch import IGNORE_INDEX
from shardwise.data.json_records import Record, check_text, counted, digest_of, keys_of, kind_of, text_of
from shardwise.data.reading import AnyPath, read_records

if TYPE_CHECKING:
    # Reading data does not import models.
    from shardwise.models.classification import ProblemType

_MOST_LABELS = 1 << 20
_SHOWN = 5


@dataclass(frozen=True)
class LabelledText:
    """A text, or a pair of texts, with its label.

    Attributes:
        where: file and position in it, for messages.
        text: the text.
        pair: the second text, or None.
        label: label in the record: a name, a number, or a list of them; None if it has none.
        words: the words, if ``label`` has a name or number for each word; None if the label is the text's.
    """

    where: str
    text: str
    pair: str | None
    label: Any
    words: tuple[str, ...] | None = None

    @property
    def content(self) -> str | tuple[str, ...]:
        """The words, or else the text."""
        return self.text if self.words is None else self.words

    @cached_property
    def sha256(self) -> str:
        """Hex digest of texts and label, independent of ``where``."""
        return digest_of([self.words or self.text, self.pair, self.label])


def read_labelled(
    paths: AnyPath | Iterable[AnyPath], text_key: str, *, of_words: bool, needs_labels: bool = True
) -> tuple[str, list[LabelledText]]:
    """Read texts of files and folders; return a display name and the texts. Raises as ``read_records``."""
    name, records = read_records(paths)
    read = labelled_words_of if of_words else labelled_text_of
    return name, [read(record, text_key, needs_labels=needs_labels) for record in records]


def labelled_text_of(record: Record, text_key: str, *, needs_labels: bool = True) -> LabelledText:
    """Read a record with ``text_key``, ``label`` and, for pairs, ``text_pair``.

    Raises:
        DataError: the text or the label is missing or invalid. The message names the position.
    """
    text = text_of(record, text_key)
    value = record.value if isinstance(record.value, dict) else {}
    pair = value.get("text_pair")
    if pair is not None and not isinstance(pair, str):
        raise DataError(f"{record.where}: 'text_pair' is not a string but {kind_of(pair)}; make it a string")
    if pair is not None:
        check_text(pair, record.where, "'text_pair'")
    label = next((value[name] for name in ("label", "labels") if value.get(name) is not None), None)
    if label is None and needs_labels:
        what = "the 'label' is null" if "label" in value else f"no 'label' (its keys: {keys_of(value)})"
        raise DataError(f"{record.where}: {what}; each record must have a text and its label")
    return LabelledText(record.where, text, pair, label)


def labelled_words_of(record: Record, words_key: str, *, needs_labels: bool = True) -> LabelledText:
    """Read a record of words, under ``tokens`` or ``words``, with their ``labels``, ``tags`` or ``ner_tags``.

    Args:
        record: the record.
        words_key: key of the words; ``text``, the default for texts, means ``tokens`` or ``words``.
        needs_labels: whether a record without labels is an error.

    Raises:
        DataError: words or labels are missing, or their numbers differ. The message names the position.
    """
    value = record.value if isinstance(record.value, dict) else {}
    named = ("tokens", "words") if words_key == "text" else (words_key,)
    key = next((name for name in named if isinstance(value.get(name), list)), None)
    if key is None:
        wanted = " or ".join(map(repr, named))
        raise DataError(f"{record.where}: no list of words under {wanted} (its keys: {keys_of(value)})")
    words = value[key]
    if not words:
        raise DataError(f"{record.where}: {key!r} is an empty list; remove the record")
    for word in words:
        if not isinstance(word, str):
            raise DataError(
                f"{record.where}: a word is no string but {kind_of(word)}, {_shown(word)}; make each word a string"
            )
        check_text(word, record.where, "a word")
    tags = next((value[name] for name in ("labels", "tags", "ner_tags") if isinstance(value.get(name), list)), None)
    if needs_labels and (tags is None or len(tags) != len(words)):
        given = "no list of labels" if tags is None else counted(len(tags), "label")
        raise DataError(
            f"{record.where}: {counted(len(words), 'word')} and {given} ('labels', 'tags' or 'ner_tags'); each word "
            "must have one"
        )
    return LabelledText(record.where, " ".join(words), None, tags, tuple(words))


@dataclass(frozen=True)
class Labels:
    """Labels that texts may have.

    Attributes:
        names: name of each label, in order.
        problem: kind of problem.
    """

    names: tuple[str, ...]
    problem: ProblemType

    def __len__(self) -> int:
        """Number of labels."""
        return len(self.names)

    def encode(self, text: LabelledText) -> NDArray[Any]:
        """Return the label's number, ``[1]`` int64; or a number for each label, ``[n]`` fp32.

        Raises:
            DataError: the label is not valid.
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

    def encode_words(self, text: LabelledText) -> NDArray[np.int64]:
        """Return the number of each word's label; -100 stays -100, which the loss ignores.

        Raises:
            DataError: a label is not valid.
        """
        numbers = [IGNORE_INDEX if _is_ignored(tag) else self._number(tag, text.where) for tag in text.label]
        return np.array(numbers, dtype=np.int64)

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
    """Find the labels of texts: names in sorted order, integers from 0, or the numbers of a regression.

    Args:
        texts: texts to train on.
        num_labels: number of labels; None for as many as the texts have.
        problem: kind of problem; if None, fractions mean a regression, and lists mean several labels per text.

    Raises:
        DataError: labels are of several kinds, or contradict ``num_labels``.
        ConfigError: the number of labels is out of range.
    """
    given = [each.label for each in texts]
    problem = problem or usual_problem(texts, num_labels)
    if problem == "regression":
        first = given[0]
        count = num_labels or (len(first) if isinstance(first, list) else 1)
        return _usual(count, problem)
    flat = [each for label in given for each in (label if isinstance(label, list) else [label])]
    if any(isinstance(label, str) for label in flat):
        names = sorted({label for label in flat if isinstance(label, str)})
        for text in texts:
            for label in text.label if isinstance(text.label, list) else [text.label]:
                if not isinstance(label, str) and not (text.words is not None and _is_ignored(label)):
                    raise DataError(
                        f"{text.where}: the label is {_shown(label)}, and others are names; make all of one kind"
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
    for text in texts:
        for label in text.label if text.words is not None else [text.label]:
            if text.words is None or not _is_ignored(label):
                _check_integer(label, text.where)
    largest = max(flat, default=0)
    if largest < 0:
        raise DataError(f"no label in the data counts: all are {largest}; give names, or integers from 0")
    count = largest + 1 if num_labels is None else num_labels
    if num_labels is None and count < 2:
        raise DataError("all labels in the data are 0; a classifier needs two, or --num-labels")
    return _usual(count, problem)


def _check_integer(label: object, where: str) -> None:
    if type(label) is not int:
        hint = "write 0 and 1, or names" if isinstance(label, bool) else "give names, or integers from 0"
        raise DataError(f"{where}: the label is {kind_of(label)}, {_shown(label)}; {hint}")
    if label < 0:
        raise DataError(f"{where}: the label is {label}, and labels are names, or integers from 0; number them anew")


def usual_problem(texts: Sequence[LabelledText], num_labels: int | None = None) -> ProblemType:
    """Guess the kind of problem: fractions mean a regression, and lists mean several labels per text."""
    if any(isinstance(text.label, list) for text in texts):
        return "multi_label_classification"
    is_regression = num_labels == 1 or any(isinstance(text.label, float) for text in texts)
    return "regression" if is_regression else "single_label_classification"


def _usual(count: int, problem: ProblemType) -> Labels:
    if not 1 <= count <= _MOST_LABELS:
        raise ConfigError(f"{count} labels; there can be from 1 to {_MOST_LABELS}")
    return Labels(tuple(f"LABEL_{index}" for index in range(count)), problem)


def _is_ignored(label: object) -> bool:
    return type(label) is int and label == IGNORE_INDEX


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # it is a number here


def _numbers(count: int) -> str:
    return "a finite number" if count == 1 else f"a list of {count} finite numbers"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
