"""Rows of tokens with a label for the text, or for each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import DataError
from shardwise.data.batch import IGNORE_INDEX, Row
from shardwise.data.json_records import counted
from shardwise.data.labelled import LabelledText, Labels
from shardwise.data.loader import Rows
from shardwise.data.tokenizer import Tokenizer


class LabelledRows(Rows):
    """Rows of tokens, with a label for each row or for each token.

    Args:
        tokens: token ids of each row, int64; at least one row.
        kinds: token types of each row; None for a model without token types.
        values: labels of each row: ``[1]`` or ``[n]`` from ``Labels.encode``, or int64 with one for each token.
        pad_id: id of the padding, on the right.
        of_tokens: whether each token has a label or -100.
        shortest: least length of the rows of a batch.

    Attributes:
        lengths: ``[rows]``: number of tokens.
        labels: ``[rows]``: number of labels that are not ignored; 1 if the label is the text's.

    Raises:
        DataError: there are no rows.
    """

    def __init__(
        self,
        tokens: Sequence[NDArray[np.int64]],
        kinds: Sequence[NDArray[np.int64]] | None,
        values: Sequence[NDArray[Any]],
        pad_id: int,
        *,
        of_tokens: bool = False,
        shortest: int = 1,
    ) -> None:
        if not tokens:
            raise DataError("there is no text with a label; give at least one")
        self._tokens, self._kinds, self._values, self._pad_id = tokens, kinds, values, pad_id
        self._of_tokens, self._shortest = of_tokens, shortest
        self.lengths = np.array([len(each) for each in tokens], dtype=np.int64)
        counts = [int((each != IGNORE_INDEX).sum()) if of_tokens else 1 for each in values]
        self.labels = np.array(counts, dtype=np.int64)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._tokens)

    def width(self, indices: NDArray[np.int64]) -> int:
        """Return the length of the longest of these rows, at least ``shortest``."""
        return max(self._shortest, int(self.lengths[indices].max()))

    def row(self, index: int, length: int | None = None) -> Row:
        """``tokens [s]`` and ``labels [1, n or s]``; with token types ``tokentype_ids [s]`` and ``attention_mask [s]``,
        else ``lengths []``.
        """
        kinds = None if self._kinds is None else self._kinds[index]
        row = self._filled(self._tokens[index], kinds, self._values[index], length)
        return row if kinds is not None else row | {"lengths": self.lengths[index]}

    def padding(self, length: int) -> Row:
        """Return a row whose label is ignored: -100 or NaN."""
        value = self._values[0][:1] if self._of_tokens else self._values[0]
        nothing = np.full_like(value, IGNORE_INDEX if value.dtype == np.int64 else np.nan)
        return self._filled(self._tokens[0][:1], None if self._kinds is None else self._kinds[0][:1], nothing, length)

    def _filled(
        self, tokens: NDArray[np.int64], kinds: NDArray[np.int64] | None, value: NDArray[Any], length: int | None
    ) -> Row:
        length = len(tokens) if length is None else length

        def filled(array: NDArray[Any], filling: int) -> NDArray[Any]:
            return np.pad(array, (0, length - len(array)), constant_values=filling)

        row = {
            "tokens": filled(tokens, self._pad_id),
            "labels": filled(value, IGNORE_INDEX) if self._of_tokens else value.copy(),
        }
        if kinds is not None:
            row |= {"tokentype_ids": filled(kinds, 0), "attention_mask": filled(np.ones_like(tokens), 0)}
        return row


@dataclass(frozen=True)
class EncodedTexts:
    """Labelled texts as rows of tokens.

    Attributes:
        rows: rows of tokens.
        texts: text of each row.
        max_length: maximum number of tokens of a row.
        num_cut: number of texts that were cut.
        num_words: number of words with a label but without a token, because they were cut or the tokenizer drops them.
        num_left_out: number of texts in which all labels are ignored.
    """

    rows: LabelledRows
    texts: tuple[LabelledText, ...]
    max_length: int
    num_cut: int
    num_words: int
    num_left_out: int

    def notes(self, flag: str, what: str = "") -> tuple[str, ...]:
        """Return notes on texts that were cut or left out, one line each.

        Args:
            flag: name of the flag that sets the length of a row.
            what: purpose of the texts, such as ``" to train on"``.
        """
        lines = (
            (self.num_cut, "text", f"{what} cut to {counted(self.max_length, 'token')} ({flag})"),
            (self.num_words, "word", f"{what} without a token there, whose labels count for nothing"),
            (self.num_left_out, "text", f"{what} left out: none of the words has a label that counts"),
        )
        return tuple(f"{counted(count, noun)}{rest}" for count, noun, rest in lines if count)


def encode_labelled(
    texts: Sequence[LabelledText],
    *,
    tokenizer: Tokenizer,
    labels: Labels | None,
    max_length: int,
    pad_id: int,
    kinds: int,
    parse_special: bool,
    shortest: int = 1,
) -> EncodedTexts:
    """Encode labelled texts as rows.

    A word's first token gets the word's label, as usual in ``transformers``. Texts with only ignored labels are left
    out.

    Args:
        texts: texts to encode; labels of words are in all of them or in none.
        tokenizer: tokenizer of the model.
        labels: labels of the model. If None, words have their index as label, and no text is left out.
        max_length: maximum number of tokens of a row.
        pad_id: id of the padding.
        kinds: number of the model's token types; 0 if it has none, and needs no mask for padding.
        parse_special: whether to parse the names of special tokens in texts as special tokens.
        shortest: least length of the rows of a batch.

    Raises:
        DataError: a label is not in ``labels``, a text has no tokens, the model has too few token types for a pair, or
            no text is left.
    """
    of_tokens = any(text.words is not None for text in texts)
    ids, types, values, kept, num_cut, num_words = [], [], [], [], 0, 0
    for text in texts:
        own = tokenizer.encode_framed(text.content, text.pair, max_length=max_length, parse_special=parse_special)
        if not own.ids and (text.words is None or labels is None):
            raise DataError(f"{text.where}: the text has no tokens; remove the record")
        if kinds and max(own.type_ids, default=0) >= kinds:
            raise DataError(
                f"{text.where}: a second text has token type {max(own.type_ids)}, and the model has {kinds}"
            )
        num_cut += own.is_cut
        if text.words is None:
            value = np.full(1, IGNORE_INDEX) if labels is None else labels.encode(text)
        else:
            of_words = np.arange(len(text.words)) if labels is None else labels.encode_words(text)
            value = _of_first_tokens(of_words, own.words)
            num_labels = int((value != IGNORE_INDEX).sum())
            if labels is not None:
                num_words += int((of_words != IGNORE_INDEX).sum()) - num_labels
                if not num_labels:
                    continue
        kept.append(text)
        ids.append(np.array(own.ids, dtype=np.int64))
        types.append(np.array(own.type_ids, dtype=np.int64))
        values.append(value)
    if texts and not kept:
        raise DataError(
            f"none of {counted(len(texts), 'text')} has a word whose label counts: all labels are {IGNORE_INDEX}, or "
            "of words without a token; label at least one"
        )
    rows = LabelledRows(ids, types if kinds else None, values, pad_id, of_tokens=of_tokens, shortest=shortest)
    return EncodedTexts(rows, tuple(kept), max_length, num_cut, num_words, len(texts) - len(kept))


def _of_first_tokens(values: NDArray[np.int64], words: Sequence[int | None]) -> NDArray[np.int64]:
    """Return for each token the value of its word if it is the word's first token, otherwise -100."""
    return np.array(
        [
            IGNORE_INDEX if word is None or word == before else values[word]
            for before, word in zip((None, *words), words, strict=False)
        ],
        dtype=np.int64,
    )
