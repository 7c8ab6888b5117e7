"""Encode examples as token ids with a loss mask.

A token is trained if any of its characters is. In a chat, the trained characters are those that the template marks with
``{% generation %}``, or else each turn of the assistant, from the end of its generation prompt to the end of the turn.
A turn whose flag says so, such as ``"weight": 0``, is not trained, nor is any turn before the last if only that is.
In a prompt with a completion, the tokens are trained from the first that differs from the tokens of the prompt alone.
"""

import math
import re
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import DataError
from shardwise.data.examples import Example, Messages, Preference, check_flags, common_length
from shardwise.data.tokenizer import ChatTemplate, Tokenizer
from shardwise.data.tokenizer.chat_template import Rendered, Span, TemplateError
from shardwise.data.turns import Turn, UnusableExampleError, run_of, shows, turns_of


@dataclass(frozen=True)
class Encoded:
    """Tokens of an example, ``[n]`` each: ids, whether a token is trained on, and the bytes in UTF-8 that it adds."""

    ids: NDArray[np.int64]
    learned: NDArray[np.bool_]
    num_bytes: NDArray[np.int64]


class ExampleEncoder:
    """Encodes examples as tokens.

    Args:
        template: the model's chat template; None if it has none.
        mask_prompts: train only on completions and turns of the assistant, instead of on all tokens.
        parse_special: parse the names of special tokens in texts. If False, a chat with such a name is unusable.
        ends_turns: learn also the token that ends a turn where the template writes none in it.
        learn: with ``mask_prompts``, the answers that are trained, if their flags do not say otherwise.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        mask_prompts: bool = True,
        parse_special: bool = True,
        ends_turns: bool = True,
        learn: Literal["all", "last"] = "all",
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.mask_prompts = mask_prompts
        self.parse_special = parse_special
        self.ends_turns = ends_turns
        self.learn = learn
        self._until = math.inf

    def encode(self, example: Example) -> Encoded:
        """Encode an example; UnusableExampleError if nothing in it can be trained on, DataError after a minute."""
        self._until = time.monotonic() + _MOST_SECONDS
        encoded = self._chat(example) if example.is_chat else self._text(example)
        # The first token of a sequence has no prediction.
        if not encoded.learned[1:].any():
            raise UnusableExampleError("nothing in it is learned")
        return encoded

    def encode_all(self, example: Example) -> tuple[Encoded, ...]:
        """Encode an example as its one sample. Raises as ``encode``."""
        return (self.encode(example),)

    def prompt_of(self, example: Example) -> list[int]:
        """Encode an example's prompt alone, with the generation prompt; empty if the example has no prompt."""
        if example.prompt is None:
            return []
        if isinstance(example.prompt, str):
            ids = self.tokenizer.encode(example.prompt, parse_special=self.parse_special)
            return [*self.tokenizer.beginning, *ids]
        self._check_special(example.prompt)
        return self.tokenizer.encode(self._render(example.prompt, example, prompt=True).text, parse_special=True)

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Encode messages, followed by the generation prompt."""
        text = self._render(messages, Example("", None, messages), prompt=True).text
        return self.tokenizer.encode(text, parse_special=True)

    def shows(self, example: Example) -> bool:
        """Return whether the chat template shows the content of any message of a chat.

        Raises:
            UnusableExampleError: the template rejects it.
        """
        messages = example.messages
        return shows(messages, self._render(messages, example).text, partial(self._render, example=example))

    def turn_end_ids(self) -> tuple[int, ...]:
        """Return the token that ends a turn of the assistant, at which a model trained on such chats stops.

        Empty if the template ends a turn with plain text, or rejects a question with its answer.
        """
        probe = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        try:
            encoded = ExampleEncoder(self.tokenizer, self.template).encode(Example("", None, probe))
        except UnusableExampleError:
            return ()
        end: tuple[int, ...] = ()
        for token in encoded.ids[encoded.learned].tolist():
            if token in self.tokenizer.added_names:
                end = end or (token,)
            elif self.tokenizer.decode([token]).strip():
                end = ()
        return end

    def _text(self, example: Example) -> Encoded:
        tokenizer, beginning = self.tokenizer, len(self.tokenizer.beginning)
        assert isinstance(example.completion, str)
        prompt = example.prompt or ""
        assert isinstance(prompt, str)
        if not example.completion.strip():
            raise UnusableExampleError("an empty completion" if prompt else "an empty text")
        text = prompt + example.completion
        ids, spans = tokenizer.encode_with_spans(text, parse_special=self.parse_special)
        first = 0
        if example.prompt is not None and self.mask_prompts:
            first = common_length(self.prompt_of(example), [*tokenizer.beginning, *ids])
        ids = [*tokenizer.beginning, *ids]
        spans = [(0, 0)] * beginning + spans
        if not (self.parse_special and example.completion.endswith(tokenizer.eos_token)):
            ids.append(tokenizer.eos_id)
            spans.append((len(text), len(text)))
        return self._encoded(ids, spans, text, np.arange(len(ids)) >= first)

    def _chat(self, example: Example) -> Encoded:
        messages = example.messages
        self._check_flags(example)
        self._check_turns(messages)
        rendered = self._render(messages, example)
        ids, spans = self.tokenizer.encode_with_spans(rendered.text, parse_special=True)
        learned = np.ones(len(ids), dtype=np.bool_)
        if self.mask_prompts and example.prompt is not None:
            learned = self._completion(messages, example, rendered, ids, spans)
        elif self.mask_prompts:
            written = rendered.spans or self._spans(messages, example, rendered)
            learned = _touched(spans, written, len(rendered.text))
        if (last := self._only_answer(messages, example)) is not None:
            learned &= _touched(spans, self._spans(messages, example, rendered, {last}), len(rendered.text))
        if skipped := self._skipped(messages, example):
            # A template's marks may cover a header too, which is in the text of its message.
            whole = [(begin, end) for number, begin, end in rendered.runs if number in skipped]
            unlearned = [*whole, *self._spans(messages, example, rendered, skipped)]
            learned &= ~_touched(spans, unlearned, len(rendered.text))
        if end := self._end_of_last(messages, example, rendered):
            ids, spans = [*ids, *end], [*spans, (len(rendered.text), len(rendered.text))]
            learned = np.append(learned, len(messages) - 1 not in skipped)
        return self._encoded(ids, spans, rendered.text, learned)

    def _only_answer(self, messages: Messages, example: Example) -> int | None:
        """Return the index of the message that alone is trained; None if there is no other that could be."""
        if self.learn == "all" or not self.mask_prompts:
            return None
        first = len(example.prompt or ())
        answers = [number for number in range(first, len(messages)) if messages[number]["role"] == "assistant"]
        could_be = answers if example.prompt is None else range(first, len(messages))
        if not answers:
            raise UnusableExampleError("no turn of the assistant in the completion")
        return answers[-1] if len(could_be) > 1 else None

    def _check_flags(self, example: Example) -> None:
        first = len(example.prompt or ())

        def is_learned(index: int, role: str) -> bool | None:
            if not self.mask_prompts:
                return True
            in_completion = example.prompt is not None and index >= first and self.learn == "all"
            return None if role == "assistant" and index >= first else in_completion

        rule = (
            "--mask-prompts trains on the assistant's turns, or on the completion of a record that has one, and on "
            "nothing else (with --learn last on the last answer); remove the flag"
            if self.mask_prompts
            else "--no-mask-prompts trains on all of the text; remove one of them"
        )
        check_flags(example, is_learned, rule)

    def _skipped(self, messages: Messages, example: Example) -> set[int]:
        """Return the indices of the assistant's turns whose flags say that they are not trained."""
        flags = enumerate(zip(messages, example.flags, strict=False))
        return {
            number
            for number, (message, flag) in flags
            if message["role"] == "assistant" and flag is not None and not flag.learned
        }

    def _completion(
        self, messages: Messages, example: Example, rendered: Rendered, ids: Sequence[int], spans: Sequence[Span]
    ) -> NDArray[np.bool_]:
        """Return True for each token from the first that differs from the prompt's tokens, with generation prompt."""
        assert not isinstance(example.prompt, str)
        number = len(example.prompt or ())
        prompt = self._render(example.prompt or (), example, prompt=True).text
        if rendered.text.startswith(prompt) or messages[number]["role"] != "assistant":
            return np.arange(len(ids)) >= common_length(self.prompt_of(example), ids)
        # Once an answer follows, the template renders the prompt otherwise.
        turn = next(turn for turn in self._turns(messages, example, rendered) if turn.number == number)
        return _touched(spans, [(turn.spans[0][0], len(rendered.text))], len(rendered.text))

    def _check_turns(self, messages: Messages) -> None:
        turns = [message for message in messages if message["role"] == "assistant"]
        if not turns and self.mask_prompts:
            raise UnusableExampleError("no turn of the assistant")
        for message in turns:
            if not ((message.get("content") or "").strip() or message.get("tool_calls")):
                raise UnusableExampleError("an empty turn of the assistant")
        self._check_special(messages)

    def _check_special(self, messages: Messages) -> None:
        if not self.parse_special:
            texts = [message.get("content") or "" for message in messages]
            for name in self.tokenizer.special_names:
                if any(name in text for text in texts):
                    raise UnusableExampleError("it spells a special token (--no-special-tokens)", name)

    def _render(self, messages: Messages, example: Example, *, prompt: bool = False) -> Rendered:
        if self.template is None:
            raise DataError(
                "the model's folder has no chat template, which chats need; put its chat_template.jinja there, or a "
                "chat_template into tokenizer_config.json"
            )
        if time.monotonic() > self._until:
            raise DataError(
                f"{example.where}: rendering this chat takes more than a minute; leave it out, or use the chat "
                "template that the model was published with"
            )
        try:
            return self.template.render(
                messages, tools=example.tools, add_generation_prompt=prompt, **example.variables
            )
        except TemplateError as error:
            raise UnusableExampleError(str(error)) from error

    def _spans(
        self, messages: Messages, example: Example, rendered: Rendered, numbers: Container[int] | None = None
    ) -> list[Span]:
        """Find the spans of the assistant's turns with these numbers, or of all, each with the token that ends it."""
        spans: list[Span] = []
        for turn in self._turns(messages, example, rendered):
            if numbers is not None and turn.number not in numbers:
                continue
            *others, (begin, end) = turn.spans
            # In GLM's template, the first token of the next turn ends a turn.
            after = None if not self.ends_turns or self._own_ends[0] else self._added_after(rendered.text, end)
            spans += [*others, (begin, after.end() if after else end)]
        return spans

    def _turns(self, messages: Messages, example: Example, rendered: Rendered) -> list[Turn]:
        return turns_of(messages, rendered, partial(self._render, example=example), self._token_spans)

    def _token_spans(self, text: str) -> list[Span]:
        return self.tokenizer.encode_with_spans(text, parse_special=True)[1]

    @cached_property
    def _added(self) -> re.Pattern[str]:
        names = sorted(self.tokenizer.added_names.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def _added_after(self, text: str, position: int) -> re.Match[str] | None:
        """Find the added token that follows a position, with blanks between."""
        return self._added.match(text, len(text) - len(text[position:].lstrip()))

    @cached_property
    def _own_ends(self) -> tuple[bool, bool]:
        """Whether the template ends an answer with an added token: one that a turn follows, and the last one."""
        asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}
        own = []
        for messages in ((asked, answer, asked), (asked, answer)):
            example = Example("", None, messages)
            try:
                rendered = self._render(messages, example)
                begin, end = self._turns(messages, example, rendered)[0].spans[-1]
                own.append(bool(self._added.search(rendered.text[begin:end].rpartition(_PROBE)[2])))
            except UnusableExampleError:
                own.append(True)
        return own[0], own[1]

    def _end_of_last(self, messages: Messages, example: Example, rendered: Rendered) -> list[int]:
        """Return the token that ends the last turn if the template writes none: as before a next turn, or end of text.

        Empty if the template ends it, or marks what is learned, or if the last turn is not the assistant's.
        """
        if not self.ends_turns or rendered.spans or messages[-1]["role"] != "assistant" or self._own_ends[1]:
            return []
        following: dict[str, Any] = {"role": "user", "content": "a"}
        if calls := messages[-1].get("tool_calls"):
            identity = calls[0].get("id") if isinstance(calls, list) and isinstance(calls[0], dict) else None
            following = {"role": "tool", "content": "a", "tool_call_id": identity}
        try:
            longer = self._render((*messages, following), example)
        except UnusableExampleError:
            return [self.tokenizer.eos_id]
        run = run_of(longer, len(messages))
        found = None if run is None else self._added_after(longer.text, run[0])
        number = self.tokenizer.id_of(found.group()) if found else None
        return [self.tokenizer.eos_id if number is None else number]

    def _encoded(self, ids: Sequence[int], spans: Sequence[Span], text: str, learned: NDArray[np.bool_]) -> Encoded:
        special = self.tokenizer.special_ids
        num_bytes = np.zeros(len(ids), dtype=np.int64)
        done = 0
        for number, (token, (begin, end)) in enumerate(zip(ids, spans, strict=True)):
            # All tokens of one character have the character's span.
            if end > done and token not in special:
                num_bytes[number] = len(text[max(begin, done) : end].encode())
            done = max(done, end)
        return Encoded(np.asarray(ids, dtype=np.int64), learned, num_bytes)


# An answer that no template contains.
_PROBE = "q7q"
# Longest time for all renderings of one chat.
_MOST_SECONDS = 60.0


def _touched(spans: Sequence[Span], written: Sequence[Span], length: int) -> NDArray[np.bool_]:
    """Return True for each token with a character in one of the ``written`` spans."""
    changes = np.zeros(length + 1, dtype=np.int64)
    for begin, end in written:
        changes[begin] += 1
        changes[end] -= 1
    # Number of written characters before each position.
    count = np.concatenate([[0], np.cumsum(changes[:-1].cumsum() > 0)])
    places = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    return np.asarray(count[places[:, 1]] > count[places[:, 0]])


class PreferenceEncoder(ExampleEncoder):
    """Encodes a preference as two samples: the prompt with the chosen answer, and the prompt with the rejected one.

    Both answers start at the same position: the first at which the tokens of either sample differ from the prompt's.
    """

    def encode_all(self, example: Example) -> tuple[Encoded, ...]:
        """Encode the prompt with the chosen answer, and with the rejected one."""
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
        encoded = [self._masking.encode(each) for each in both]
        first = min(int(each.learned.argmax()) for each in encoded)
        if not np.array_equal(encoded[0].ids[:first], encoded[1].ids[:first]):
            raise UnusableExampleError("the chat template renders the prompt of each answer otherwise")
        if not example.is_chat and example.prompt and first <= len(self.tokenizer.beginning):
            raise UnusableExampleError("no token of the prompt stays one with an answer behind it")
        if np.array_equal(encoded[0].ids, encoded[1].ids):
            raise UnusableExampleError("chosen and rejected are equal")
        return tuple(replace(each, learned=np.arange(len(each.ids)) >= first) for each in encoded)

    @cached_property
    def _masking(self) -> ExampleEncoder:
        return ExampleEncoder(
            self.tokenizer, self.template, parse_special=self.parse_special, ends_turns=self.ends_turns
        )

    def _check_answer(self, example: Example) -> None:
        if not example.is_chat:
            if not str(example.completion).strip():
                raise UnusableExampleError("an empty answer")
            return
        assert not isinstance(example.prompt, str)
        assert not isinstance(example.completion, str)
        if example.completion[0]["role"] != "assistant":
            raise UnusableExampleError("an answer that does not begin with the assistant")
