"""Pairs of answers to a prompt, fitted to the sequence length, as rows: the chosen answer, then the rejected one."""

import hashlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError, DataError
from shardwise.data.batch import IGNORE_INDEX, Row
from shardwise.data.json_records import counted
from shardwise.data.loader import Rows
from shardwise.data.sample_rows import TokenSamples, note_on_length

_Ids = NDArray[np.int64]


class PairRows(Rows):
    """Pairs of samples that begin with the same prompt.

    A pair with a sample of more than ``sequence_length`` positions is cut or dropped. A cut first removes the start of
    the prompt, except ``beginning`` (the ids that the tokenizer adds before every text), until the prompt takes half of
    the row; then it removes the ends of both answers.

    Args:
        samples: for pair ``i``, the chosen sample is ``2i`` and the rejected sample ``2i + 1``. The tokens to train on
            begin at the same position in both; all tokens before them are the prompt.
        shortest: least length of the rows of a batch.

    Attributes:
        num_equal: number of pairs that were left out because both samples are equal after the cut.
        lengths: ``[pairs]``: number of positions that both samples take.
        labels: ``[pairs]``: 1 for each pair, because a step's loss is the mean over pairs.
        reference: ``[pairs, 2]``, fp64: log-probability of each answer under the initial model; NaN until it is set.
    """

    def __init__(
        self,
        samples: TokenSamples,
        sequence_length: int,
        *,
        too_long: Literal["cut", "drop"] = "cut",
        beginning: tuple[int, ...] = (),
        shortest: int = 1,
    ) -> None:
        if sequence_length < 2:
            raise ConfigError(f"sequence_length {sequence_length} must be at least 2 for pairs")
        self.samples, self.sequence_length, self.too_long = samples, sequence_length, too_long
        self.num_too_long = self.num_equal = 0
        self._shortest = shortest
        self._beginning = np.asarray(beginning, dtype=np.int64)
        # For each pair: its index, and the number of tokens kept of the prompt and of each answer.
        self._kept: list[tuple[int, int, tuple[int, int]]] = []
        self._firsts = [self._first(2 * pair) for pair in range(len(samples) // 2)]
        for pair, first in enumerate(self._firsts):
            whole = first, (self._length(2 * pair) - first, self._length(2 * pair + 1) - first)
            fitted = self._fitted(*whole)
            self.num_too_long += fitted != whole
            if fitted != whole and too_long == "drop":
                continue
            self._kept.append((pair, *fitted))
            if fitted != whole and np.array_equal(*self._ids(-1)):
                self.num_equal += 1
                self._kept.pop()
        if not self._kept:
            raise DataError(
                f"nothing of {samples.name!r} is left to learn from: {self.num_too_long} of {len(self._firsts)} pairs "
                f"are longer than sequence_length {sequence_length} + 1 tokens, and are dropped or equal after the "
                "cut; use a larger sequence length"
            )
        self._sizes = np.array([[prompt + each - 1 for each in answers] for _, prompt, answers in self._kept])
        self.lengths: NDArray[np.int64] = self._sizes.sum(axis=1)
        self.labels = np.ones(len(self._kept), dtype=np.int64)
        self.reference = np.full((len(self._kept), 2), np.nan)

    def _length(self, sample: int) -> int:
        return int(self.samples.starts[sample + 1] - self.samples.starts[sample])

    def _first(self, sample: int) -> int:
        """Return the number of tokens of the prompt."""
        return int(np.argmax(self.samples.learned[self.samples.starts[sample] : self.samples.starts[sample + 1]]))

    def _fitted(self, prompt: int, answers: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        """Return the numbers of tokens to keep of a prompt and its two answers."""
        limit, longest = self.sequence_length + 1, max(answers)
        if prompt + longest > limit:
            prompt = min(prompt, max(limit - longest, limit // 2))
        chosen, rejected = (min(answer, limit - prompt) for answer in answers)
        return prompt, (chosen, rejected)

    def _ids(self, index: int) -> tuple[_Ids, _Ids]:
        """Return the tokens of both samples of a pair, after the cut."""
        pair, prompt, answers = self._kept[index]
        chosen, rejected = (self._sample(2 * pair + side, self._firsts[pair], prompt, answers[side]) for side in (0, 1))
        return chosen, rejected

    def _sample(self, sample: int, first: int, prompt: int, answer: int) -> _Ids:
        start, kept = int(self.samples.starts[sample]), len(self._beginning)
        ids: _Ids = self.samples.tokens[start : start + first + answer].astype(np.int64)
        if prompt == first:
            return ids
        if kept < prompt and np.array_equal(ids[:kept], self._beginning):
            return np.concatenate([self._beginning, ids[first - prompt + kept :]])
        return ids[first - prompt :]

    def __len__(self) -> int:
        return len(self._kept)

    def notes(self, what: str) -> list[str]:
        """Return notes on pairs that were cut or left out, one line each; ``what`` is their purpose."""
        notes = []
        if self.num_too_long:
            of = f"{counted(len(self._firsts), 'pair')} {what}"
            notes.append(note_on_length(self.num_too_long, of, self.too_long, self.sequence_length))
        if self.num_equal:
            notes.append(f"{counted(self.num_equal, 'pair')} {what} left out since the cut leaves no difference")
        return notes

    @property
    def sha256(self) -> str:
        """Hex digest of the tokens of all pairs, after the cut, and of the starts of the answers."""
        digest = hashlib.sha256()
        for index, (_, prompt, _) in enumerate(self._kept):
            for ids in self._ids(index):
                digest.update(f"{prompt} {len(ids)} ".encode() + ids.astype("<i8").tobytes())
        return digest.hexdigest()

    def row(self, index: int, length: int | None = None) -> Row:
        """Return ``tokens [2, s]``, ``labels [2, s]``, ``lengths [2]`` and ``reference [2]`` of one pair.

        Rows are padded to ``length`` positions, or to ``sequence_length``. Labels are the tokens of the answers.
        """
        row = self.padding(self.sequence_length if length is None else length)
        row |= {"lengths": self._sizes[index], "reference": self.reference[index]}
        prompt = self._kept[index][1]
        for side, ids in enumerate(self._ids(index)):
            row["tokens"][side, : len(ids) - 1] = ids[:-1]
            begin = max(prompt, 1)
            row["labels"][side, begin - 1 : len(ids) - 1] = ids[begin:]
        return row

    def width(self, indices: NDArray[np.int64]) -> int:
        """Return the length of the longest sample of these pairs, at least ``shortest``."""
        return max(self._shortest, int(self._sizes[indices].max()))

    def computed(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the padded length of both samples of each pair."""
        return np.repeat(super().computed(indices), 2)

    def num_learned(self, indices: NDArray[np.int64]) -> int:
        return sum(int((self.row(index)["labels"] != IGNORE_INDEX).sum()) for index in indices.tolist())

    def by_width(self, count: int) -> list[NDArray[np.int64]]:
        """Return the indices of all pairs in ``count`` parts of similar size, the shortest pairs first."""
        order = np.argsort(self._sizes.max(axis=1), kind="stable")
        return [np.sort(part) for part in np.array_split(order, count)]

    def padding(self, length: int) -> Row:
        tokens = np.full((2, length), self.samples.eos_id, dtype=np.int64)
        return {"tokens": tokens, "labels": np.full_like(tokens, IGNORE_INDEX), "reference": np.zeros(2)}
