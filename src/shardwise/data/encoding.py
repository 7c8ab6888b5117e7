"""Encode examples as token ids with a loss mask.

A token is trained if any of its characters is. In a chat, the trained characters are those that the template marks with
``{% generation %}``, or else each turn of the assistant, from the end of its generation prompt to the end of the turn.
A turn whose flag says so, such as ``"weight": 0``, is not trained.
In a prompt with a completion, the tokens are trained from the first that differs from the tokens of the prompt alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import DataError
from shardwise.data.examples import Example, Messages, Preference, check_flags, common_length
from shardwise.data.tokenizer import ChatTemplate, Tokenizer
from shardwise.data.tokenizer.chat_template import Rendered, Span, TemplateError


class UnusableExampleError(DataError):
    """An example has no token to train on; it is skipped and counted.

    Args:
        reason: reason that all such cases have in common.
        detail: detail of this case.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True)
class Encoded:
    """Tokens of an example.

    Attributes:
        ids: ``[n]``, int64.
        learned: ``[n]``, bool: True if the token is trained on.
        num_bytes: ``[n]``, int64: bytes in UTF-8 that each token adds to the text; 0 for a special token.
    """

    ids: NDArray[np.int64]
    learned: NDArray[np.bool_]
    num_bytes: NDArray[np.int64]


class ExampleEncoder:
    """Encodes examples as tokens.

    Args:
        tokenizer: the model's tokenizer.
        template: the model's chat template; None if it has none.
        mask_prompts: train only on completions and turns of the assistant, instead of on all tokens.
        parse_special: parse the names of special tokens in texts as special tokens. If False, they are plain text, and
            a chat with such a name is unusable.

    Attributes:
        tokenizer, template, mask_prompts, parse_special: see above.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        mask_prompts: bool = True,
        parse_special: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.mask_prompts = mask_prompts
        self.parse_special = parse_special

    def encode(self, example: Example) -> Encoded:
        """Encode an example.

        Raises:
            UnusableExampleError: the template rejects it, a turn of the assistant is empty, or no token is trained on.
            DataError: the example is a chat, and the model has no template; or a flag of a message contradicts
                ``mask_prompts``.
        """
        encoded = self._chat(example) if example.is_chat else self._text(example)
        # The first token of a sequence has no prediction.
        if not encoded.learned[1:].any():
            raise UnusableExampleError("nothing in it is learned")
        return encoded

    def encode_all(self, example: Example) -> tuple[Encoded, ...]:
        """Encode an example as its one sample. Raises as ``encode``."""
        return (self.encode(example),)

    def prompt_of(self, example: Example) -> list[int]:
        """Encode an example's prompt alone, with the generation prompt; empty if the example has no prompt.

        Raises:
            UnusableExampleError: the template rejects the prompt.
            DataError: the example is a chat, and the model has no template.
        """
        if example.prompt is None:
            return []
        if isinstance(example.prompt, str):
            ids = self.tokenizer.encode(example.prompt, parse_special=self.parse_special)
            return [*self.tokenizer.beginning, *ids]
        return self.tokenizer.encode(self._render(example.prompt, example, prompt=True).text, parse_special=True)

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Encode messages, followed by the generation prompt.

        Raises:
            UnusableExampleError: the template rejects the messages.
            DataError: the model has no template.
        """
        text = self._render(messages, Example("", None, messages), prompt=True).text
        return self.tokenizer.encode(text, parse_special=True)

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
        assert not isinstance(example.completion, str)
        assert not isinstance(example.prompt, str)
        messages = (*(example.prompt or ()), *example.completion)
        self._check_flags(example)
        self._check_turns(messages)
        rendered = self._render(messages, example)
        ids, spans = self.tokenizer.encode_with_spans(rendered.text, parse_special=True)
        learned = np.ones(len(ids), dtype=np.bool_)
        if self.mask_prompts and example.prompt is not None:
            learned = np.arange(len(ids)) >= common_length(self.prompt_of(example), ids)
        elif self.mask_prompts:
            written = rendered.spans or self._turns(messages, example, rendered.text)
            learned = _touched(spans, written, len(rendered.text))
        if skipped := self._skipped(messages, example, rendered.text):
            learned &= ~_touched(spans, skipped, len(rendered.text))
        return self._encoded(ids, spans, rendered.text, learned)

    def _check_flags(self, example: Example) -> None:
        first = len(example.prompt or ())

        def is_learned(index: int, role: str) -> bool | None:
            if not self.mask_prompts:
                return True
            in_completion = example.prompt is not None and index >= first
            return None if role == "assistant" and index >= first else in_completion

        rule = (
            "--mask-prompts trains on the assistant's turns, or on the completion of a record that has one, and on "
            "nothing else; remove the flag"
            if self.mask_prompts
            else "--no-mask-prompts trains on all of the text; remove one of them"
        )
        check_flags(example, is_learned, rule)

    def _skipped(self, messages: Messages, example: Example, text: str) -> list[Span]:
        """Return the spans of the assistant's turns whose flags say that they are not trained."""
        flags = [flag for flag, message in zip(example.flags, messages, strict=False) if message["role"] == "assistant"]
        skips = [flag is not None and not flag.learned for flag in flags]
        if not any(skips):
            return []
        return [turn for turn, skip in zip(self._turns(messages, example, text), skips, strict=True) if skip]

    def _check_turns(self, messages: Messages) -> None:
        turns = [message for message in messages if message["role"] == "assistant"]
        if not turns and self.mask_prompts:
            raise UnusableExampleError("no turn of the assistant")
        for message in turns:
            if not ((message.get("content") or "").strip() or message.get("tool_calls")):
                raise UnusableExampleError("an empty turn of the assistant")
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
        try:
            return self.template.render(
                messages, tools=example.tools, add_generation_prompt=prompt, **example.variables
            )
        except TemplateError as error:
            raise UnusableExampleError(str(error)) from error

    def _turns(self, messages: Messages, example: Example, text: str) -> list[Span]:
        """Find the spans of the assistant's turns in the rendered text, by rendering the messages before each turn.

        A turn starts at the end of the rendered messages before it, with the generation prompt, and ends at the end of
        the rendered messages up to it. Some templates omit the start of a turn (its reasoning) once other turns follow.
        Therefore only the end of either text, back to the previous turn, must occur in the whole text.
        """
        spans: list[Span] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], example, prompt=True).text if number else ""
            begin = self._begin(messages[:number], example, text, before, spans[-1] if spans else (0, 0))
            until = self._render(messages[: number + 1], example).text
            if text.startswith(until):
                end = len(until)
            else:
                turn = until[len(before) :] if until.startswith(before) else until
                end = begin + len(_what_is_left(turn, text[begin:]))
            if _gist(message) not in text[begin:end]:
                raise UnusableExampleError(_UNMARKED)
            spans.append((begin, end))
        return spans

    def _begin(self, messages: Messages, example: Example, text: str, before: str, last: Span) -> int:
        """Find the start of the assistant's turn after ``messages``.

        Args:
            messages: messages before the turn.
            example: the example that has the messages.
            text: rendered text of all its messages.
            before: rendered text of ``messages`` with the generation prompt.
            last: span of the assistant's previous turn.
        """
        if not messages:
            return self._begin_of_first(example, text)
        if text.startswith(before):
            return len(before)
        plain = self._render(messages, example).text
        # The end of the generation prompt may be missing in the rendered answer.
        prompt = before[common_length(plain, before) :]
        if text.startswith(plain):
            return len(plain) + common_length(prompt, text[len(plain) :])
        turn = text[slice(*last)]
        for rendered, more in ((before, ""), (plain, prompt)):
            since = rendered[rendered.rfind(turn) + len(turn) :] if turn and turn in rendered else None
            if since is not None and text.startswith(since, last[1]):
                begin = last[1] + len(since)
                return begin + common_length(more, text[begin:])
        raise UnusableExampleError(_UNMARKED)

    def _begin_of_first(self, example: Example, text: str) -> int:
        """Find the start of an assistant's turn that is the first message: the end of its header."""
        assert not isinstance(example.completion, str)
        first = example.completion[:1]
        with_prompt = self._render(first, example, prompt=True).text
        header = with_prompt[common_length(self._render(first, example).text, with_prompt) :]
        return text.index(header) + len(header) if header in text else 0

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


_UNMARKED = (
    "the chat template renders earlier turns otherwise once others follow, so that those of the assistant cannot be "
    "found (mark them with {% generation %} in the template)"
)


def _what_is_left(before: str, text: str) -> str:
    """Return the longest suffix of ``before`` that is a prefix of ``text``."""
    start = before.find(text[:_PROBE]) if len(text) >= _PROBE else -1
    while start >= 0:
        if text.startswith(before[start:]):
            return before[start:]
        start = before.find(text[:_PROBE], start + 1)
    ends = (before[start:] for start in range(max(0, len(before) - _PROBE), len(before) + 1))
    return next(end for end in ends if text.startswith(end))


# Characters to search for before a longer comparison.
_PROBE = 16


def _gist(message: Mapping[str, Any]) -> str:
    """Return the text that every rendering of a message contains: its content, or the function that it calls."""
    content: str = (message.get("content") or "").strip()
    calls = message.get("tool_calls")
    if content or not isinstance(calls, list) or not calls or not isinstance(calls[0], dict):
        return content
    return str(calls[0].get("function", {}).get("name", ""))


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
        """Encode the prompt with the chosen answer, and with the rejected one.

        Raises:
            UnusableExampleError: an answer is empty or does not start with the assistant; the answers are equal; the
                prompt is empty, or prompt and answer do not start with it.
            DataError: the example is a chat, and the model has no template.
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
