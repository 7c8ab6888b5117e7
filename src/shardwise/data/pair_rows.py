"""Pairs of answers to a prompt: fitted to the sequence length, and as rows, the chosen answer's before the other's.

Preferences: which of two answers to one prompt is the better one.

======================================================== =============================================================
a record with                                            is
======================================================== =============================================================
``prompt``, ``chosen``, ``rejected``: three strings      a text
``prompt``, ``chosen``, ``rejected``: lists of messages  a chat
``chosen`` and ``rejected`` alone, of either kind        the same: the prompt is what both begin with
``prompt``: a string beside lists of messages            likewise; it is what one of the messages says
======================================================== =============================================================

These are the preference formats of the library ``trl``, explicit and implicit prompts. Messages, ``system``, ``tools``
and ``chat_template_kwargs`` are those of ``examples``.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError, DataError
from shardwise.data.batch import IGNORE_INDEX, Row
from shardwise.data.encoding import Encoded, ExampleEncoder, UnusableExampleError, common_length
from shardwise.data.examples import Example, Messages, messages_of, tools_of, variables_of, with_system
from shardwise.data.json_records import Record, check_text
from shardwise.data.loader import Rows
from shardwise.data.sample_rows import TokenSamples

_Ids = NDArray[np.int64]


class PairRows(Rows):
    """Pairs of samples that begin with the same prompt.

    A pair of which a sample takes more than ``sequence_length`` places is cut or dropped. If it is cut, the prompt
    loses its left end first, until half of the row is left to it (what the tokenizer puts in front of every text
    stays), and then both answers their right ends.

    Args:
        samples: of pair ``i`` the chosen one is sample ``2i`` and the rejected one sample ``2i + 1``. What is learned
            of both begins at the same place, and all before it is the prompt.
        sequence_length: ``s``, most places in a row.
        too_long: what becomes of longer pairs.
        beginning: ids that a prompt keeps if it begins with them.

    Attributes:
        samples, sequence_length: likewise.
        num_too_long: pairs of which a sample was longer.
        num_equal: pairs that were left out since both samples are the same after the cut.
        lengths: ``[pairs]``: places that both samples take.
        labels: ``[pairs]``: 1 for each, as a step's loss is the mean over pairs.
        reference: ``[pairs, 2]``, fp64: log-probability of either answer by the model that training begins with; NaN
            until somebody sets it.

    Raises:
        ConfigError: ``sequence_length`` is less than 2.
        DataError: nothing is left.
    """

    def __init__(
        self,
        samples: TokenSamples,
        sequence_length: int,
        *,
        too_long: Literal["cut", "drop"] = "cut",
        beginning: tuple[int, ...] = (),
    ) -> None:
        if sequence_length < 2:
            raise ConfigError(f"sequence_length {sequence_length} must be at least 2 for pairs")
        self.samples, self.sequence_length = samples, sequence_length
        self.num_too_long = self.num_equal = 0
        self._beginning = np.asarray(beginning, dtype=np.int64)
        # Of each pair: which it is, the prompt's tokens that are kept, and of each answer.
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
        """Tokens of the prompt."""
        return int(np.argmax(self.samples.learned[self.samples.starts[sample] : self.samples.starts[sample + 1]]))

    def _fitted(self, prompt: int, answers: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        """Tokens that are kept of a prompt and its two answers."""
        limit, longest = self.sequence_length + 1, max(answers)
        if prompt + longest > limit:
            prompt = min(prompt, max(limit - longest, limit // 2))
        chosen, rejected = (min(answer, limit - prompt) for answer in answers)
        return prompt, (chosen, rejected)

    def _ids(self, index: int) -> tuple[_Ids, _Ids]:
        """The tokens of both samples of a pair, as they were fitted."""
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
        """Number of pairs."""
        return len(self._kept)

    @property
    def sha256(self) -> str:
        """Hex digest of the tokens of all pairs, as they were fitted, and of where the answers begin."""
        digest = hashlib.sha256()
        for index, (_, prompt, _) in enumerate(self._kept):
            for ids in self._ids(index):
                digest.update(f"{prompt} {len(ids)} ".encode() + ids.astype("<i8").tobytes())
        return digest.hexdigest()

    def row(self, index: int, length: int | None = None) -> Row:
        """``tokens [2, s]``, ``labels [2, s]``, ``lengths [2]`` and ``reference [2]`` of one pair.

        It is filled up to ``length`` places, or to ``sequence_length``. Labels are the tokens of the answers.
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
        """The longest sample of these pairs."""
        return int(self._sizes[indices].max())

    def by_width(self, count: int) -> list[NDArray[np.int64]]:
        """The indices of all pairs in ``count`` parts of about one size, those that need the fewest places first."""
        order = np.argsort(self._sizes.max(axis=1), kind="stable")
        return [np.sort(part) for part in np.array_split(order, count)]

    def padding(self, length: int) -> Row:
        """A pair in which no label counts."""
        tokens = np.full((2, length), self.samples.eos_id, dtype=np.int64)
        return {"tokens": tokens, "labels": np.full_like(tokens, IGNORE_INDEX), "reference": np.zeros(2)}


_KEYS = ("chosen", "rejected")


@dataclass(frozen=True, kw_only=True)
class Preference(Example):
    """A prompt with two answers; ``completion`` is the better one.

    Attributes:
        rejected: the other one: a text or messages, as the completion is.
    """

    rejected: str | Messages


def is_preference(record: Record) -> bool:
    """Whether a record has two answers."""
    return isinstance(record.value, dict) and all(key in record.value for key in _KEYS)


def preference_of(record: Record) -> Preference:
    """What a record prefers.

    Raises:
        DataError: it has none of the forms above, or messages that are none. The message says where.
    """
    where, value = record.where, record.value
    if not is_preference(record):
        keys = ", ".join(map(repr, list(value)[:5])) or "none" if isinstance(value, dict) else "it is no object"
        raise DataError(
            f"{where}: no preference: it needs 'chosen' and 'rejected', and 'prompt' unless both begin with it (its "
            f"keys: {keys})"
        )
    prompt, chosen, rejected = value.get("prompt"), value["chosen"], value["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        for key in _KEYS:
            check_text(value[key], where, repr(key))
        if prompt is None:
            common = _common_text(chosen, rejected)
            return Preference(where, chosen[:common] or None, chosen[common:], rejected=rejected[common:])
        if not isinstance(prompt, str):
            raise DataError(f"{where}: 'chosen' and 'rejected' are strings, and 'prompt' is not; repair the record")
        return Preference(where, check_text(prompt, where, "'prompt'"), chosen, rejected=rejected)
    answers = [messages_of(value[key], where, key) for key in _KEYS]
    if isinstance(prompt, list):
        before = messages_of(prompt, where, "prompt")
    elif prompt is None or isinstance(prompt, str):
        # Each answer has a message of its own, even where one of them goes on after all of the other.
        common = min(common_length(*answers), min(map(len, answers)) - 1)
        before, *answers = answers[0][:common], *(answer[common:] for answer in answers)
        if isinstance(prompt, str) and all(prompt.strip() != each.get("content", "").strip() for each in before):
            raise DataError(
                f"{where}: 'prompt' is a text that none of the messages says which 'chosen' and 'rejected' both begin "
                "with; repair the record, or leave 'prompt' out"
            )
    else:
        raise DataError(f"{where}: 'prompt' is neither a string nor a list of messages; repair the record")
    if before:
        before = with_system(value, before, where)
    return Preference(
        where, before, answers[0], tools_of(value, where), variables_of(value, where), rejected=answers[1]
    )


def _common_text(chosen: str, rejected: str) -> int:
    """Characters that two texts begin with; a blank at their end belongs to the answers."""
    common = common_length(chosen, rejected)
    if common == min(len(chosen), len(rejected)):
        return max(0, common - 1)
    return common - 1 if chosen[:common].endswith(" ") else common


class PreferenceEncoder(ExampleEncoder):
    """Turns preferences into tokens, two samples for each: the prompt with the chosen answer, and with the other.

    The answers begin where the tokens of either differ from those of the prompt alone, in both at the same place.
    """

    def encode_all(self, example: Example) -> tuple[Encoded, ...]:
        """The prompt with the chosen answer, and with the rejected one.

        Raises:
            UnusableExampleError: an empty answer, or one that does not begin with the assistant; two that are equal; no
                prompt, or one that is not what prompt and answer begin with.
            DataError: a chat, and there is no template.
        """
        assert isinstance(example, Preference)
        if example.prompt is None or (example.is_chat and not example.prompt):
            raise UnusableExampleError("no prompt that both answers begin with")
        if example.completion == example.rejected:
            raise UnusableExampleError("chosen and rejected are equal")
        both = [
            Example(example.where, example.prompt, answer, example.tools, example.variables)
            for answer in (example.completion, example.rejected)
        ]
        for each in both:
            self._check_answer(each)
        encoded = [self.encode(each) for each in both]
        alone = self.prompt_of(example)
        first = min(common_length(alone, each.ids.tolist()) for each in encoded)
        if not example.is_chat and example.prompt and first <= len(self.tokenizer.beginning):
            raise UnusableExampleError("no token of the prompt stays one with an answer behind it")
        if np.array_equal(encoded[0].ids, encoded[1].ids):
            raise UnusableExampleError("chosen and rejected are equal")
        return tuple(replace(each, learned=np.arange(len(each.ids)) >= first) for each in encoded)

    def _check_answer(self, example: Example) -> None:
        if not example.is_chat:
            if not str(example.completion).strip():
                raise UnusableExampleError("an empty answer")
            return
        assert not isinstance(example.prompt, str)
        assert not isinstance(example.completion, str)
        prompt, answer = example.prompt or (), example.completion
        if answer[0]["role"] != "assistant":
            raise UnusableExampleError("an answer that does not begin with the assistant")
        if not self._render((*prompt, *answer), example).text.startswith(self._render(prompt, example).text):
            raise UnusableExampleError("the chat template renders the prompt otherwise once an answer follows")
