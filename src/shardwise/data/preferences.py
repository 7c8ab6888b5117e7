"""Preferences: which of two answers to one prompt is the better one.

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

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardwise.core.errors import DataError
from shardwise.data.encoding import Encoded, ExampleEncoder, UnusableExampleError, common_length
from shardwise.data.examples import Example, Messages, messages_of, tools_of, variables_of, with_system
from shardwise.data.json_records import Record, check_text

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
