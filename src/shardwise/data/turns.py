"""Find the assistant's turns in a rendered chat whose template does not mark them.

The loops of a template say which text they wrote for which message (``template_authors``). From the text of a message
of the assistant, its header is taken away: what the template writes for ``add_generation_prompt``. If a template has no
such loop, the text of a turn is what a rendering of the messages up to it has more than one of the messages before it.

Either result is checked by another rendering, with unused characters as marks at both ends of each content: the marks
of an answer must be in its turn, and those of other messages in no turn. If that fails, the chat is unusable.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardwise.core.errors import DataError
from shardwise.data.examples import Messages, common_length
from shardwise.data.tokenizer.chat_template import Rendered, Span


class UnusableExampleError(DataError):
    """An example has no token to train on; it is skipped and counted by its ``reason``."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


UNSHOWN = "the chat template does not show the messages"
UNSHOWN_ANSWER = "the chat template does not show what the assistant says"
UNSHOWN_CALL = "the chat template does not show the assistant's call"
UNFOUND = (
    "the chat template mixes what the assistant says with other text, so that it cannot be found (it can in a template "
    "that marks it with {% generation %})"
)


class Render(Protocol):
    """Renders messages with the tools and variables of one example; raises UnusableExampleError if refused."""

    def __call__(self, messages: Messages, *, prompt: bool = False) -> Rendered: ...


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant: the index of its message, and its parts in the text, without the header.

    It has several parts if others' text is between them.
    """

    number: int
    spans: tuple[Span, ...]


def turns_of(
    messages: Messages, rendered: Rendered, render: Render, encode: Callable[[str], Sequence[Span]]
) -> list[Turn]:
    """Find the assistant's turns in a rendered chat; UnusableExampleError if the template does not show one.

    ``render`` renders other messages of the same chat, and ``encode`` returns the spans of a text's tokens.
    """
    marks = _marks_of(messages, rendered.text, render)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for number in answers:
        _check_shown(messages[number], number, marks, rendered.text)
    headers = _Headers(messages, render, encode)
    runs = _runs_of(rendered, answers) or _runs_by_prefixes(messages, rendered.text, render, answers)
    if (last := len(messages) - 1) in runs:
        begin, end = runs[last][-1]
        tail = rendered.text[end:] if rendered.runs[-2:-1] == ((last, begin, end),) else ""
        # Text after the loop ends the last turn, unless it is a header that the template always writes.
        if tail and not (rendered.text.startswith(tail, begin) and headers.prompt_before(last + 1) == tail):
            runs[last][-1] = begin, len(rendered.text)
    turns = []
    for number in answers:
        (begin, end), *others = runs[number]
        inside = [place - begin for place in marks.get(number) or () if begin <= place < end]
        begin += headers.length(number, rendered.text[begin:end], min(inside, default=None))
        turns.append(Turn(number, ((begin, end), *others)))
    _check_found(turns, messages, marks, rendered.text)
    return turns


def shows(messages: Messages, text: str, render: Render) -> bool:
    """Return whether ``text``, the rendered messages, has the content of any; True if that cannot be known."""
    marks = _marks_of(messages, text, render)
    return not marks or any(places != () for places in marks.values())


def run_of(rendered: Rendered, number: int) -> Span | None:
    """Return the first part of the text that the template wrote for a message; None if there is none."""
    return next(((begin, end) for author, begin, end in rendered.runs if author == number), None)


_Marks = Mapping[int, Sequence[int] | None]
"""For each message with content, the places of its characters next to a mark; None if marks change the text."""


def _marks_of(messages: Messages, text: str, render: Render) -> _Marks:
    base = next((plane for plane in (0xF0000, 0x100000) if not re.search(_plane(plane), text)), None)
    if base is None or 2 * len(messages) > _PLANE_SIZE:
        raise UnusableExampleError(UNFOUND)
    written = [number for number, message in enumerate(messages) if (message.get("content") or "").strip()]
    found = _places(messages, dict.fromkeys(written, "both"), base, text, render)
    if found is not None:
        return {number: found.get(number, ()) for number in written}
    marks: dict[int, Sequence[int] | None] = {}
    for number in written:
        tries = (_places(messages, {number: where}, base, text, render) for where in ("both", "end", "start"))
        found = next((places for places in tries if places is not None), None)
        marks[number] = None if found is None else found.get(number, ())
    return marks


_PLANE_SIZE = 0xFFFE


def _plane(base: int) -> str:
    return f"([{chr(base)}-{chr(base + _PLANE_SIZE - 1)}])"


def _places(
    messages: Messages, where: Mapping[int, str], base: int, text: str, render: Render
) -> dict[int, list[int]] | None:
    """Render with marks in the given messages; return the places next to marks, or None if the text is another."""
    marked = []
    for number, message in enumerate(messages):
        if number in where:
            content = message["content"]
            first, last = len(content) - len(content.lstrip()), len(content.rstrip())
            opening = chr(base + 2 * number) if where[number] != "end" else ""
            closing = chr(base + 2 * number + 1) if where[number] != "start" else ""
            content = content[:first] + opening + content[first:last] + closing + content[last:]
            message = {**message, "content": content}
        marked.append(message)
    try:
        pieces = re.split(_plane(base), render(tuple(marked)).text)
    except UnusableExampleError:
        return None
    if "".join(pieces[::2]) != text:
        return None
    places: dict[int, list[int]] = {}
    position = 0
    for number, piece in enumerate(pieces):
        if number % 2:
            marked_one, is_end = divmod(ord(piece) - base, 2)
            places.setdefault(marked_one, []).append(position - is_end)
        else:
            position += len(piece)
    return places


def _check_shown(message: Mapping[str, Any], number: int, marks: _Marks, text: str) -> None:
    if number not in marks:
        if _called(message) not in text:
            raise UnusableExampleError(UNSHOWN_CALL)
    elif marks[number] == () and not (message.get("tool_calls") and _called(message) in text):
        raise UnusableExampleError(UNSHOWN_ANSWER if any(places != () for places in marks.values()) else UNSHOWN)


def _called(message: Mapping[str, Any]) -> str:
    """Return the name of the function that a message calls first; empty if it has no such name."""
    return next(iter(_names_called(message)), "")


def _names_called(message: Mapping[str, Any]) -> list[str]:
    calls = message.get("tool_calls")
    functions = [
        call.get("function", call) if isinstance(call, dict) else None
        for call in (calls if isinstance(calls, list) else ())
    ]
    return [str(each.get("name", "")) if isinstance(each, dict) else "" for each in functions]


def _check_found(turns: Sequence[Turn], messages: Messages, marks: _Marks, text: str) -> None:
    everywhere = [span for turn in turns for span in turn.spans]
    for turn in turns:
        message, places = messages[turn.number], marks.get(turn.number)
        said = "".join(text[begin:end] for begin, end in turn.spans)
        is_in = places and _any_within(places, turn.spans)
        if turn.number in marks and places is None:
            is_in = message["content"].strip() in said
        if not is_in and not (message.get("tool_calls") and _called(message) in said):
            raise UnusableExampleError(UNFOUND if turn.number in marks else UNSHOWN_CALL)
        # A name may also stand in a list of tools, so each call counts in the answer.
        names = Counter(filter(None, _names_called(message)))
        if any(said.count(name) < number for name, number in names.items()):
            raise UnusableExampleError(UNSHOWN_CALL)
    for number, places in marks.items():
        if messages[number]["role"] != "assistant" and places and _any_within(places, everywhere):
            raise UnusableExampleError(UNFOUND)


def _any_within(places: Sequence[int], spans: Sequence[Span]) -> bool:
    return any(begin <= place < end for place in places for begin, end in spans)


_Runs = dict[int, list[Span]]
"""For each answer the parts of the text that were written for it."""


def _runs_of(rendered: Rendered, answers: Sequence[int]) -> _Runs | None:
    """Return the parts that the template's loops wrote for each answer; None if they are not in order."""
    runs: _Runs = {}
    for number in answers:
        places = [place for place, (author, _, _) in enumerate(rendered.runs) if author == number]
        between = rendered.runs[places[0] : places[-1]] if places else ()
        # A turn may contain the results of its calls, but no earlier message.
        if not places or any(author is None or author < number for author, _, _ in between):
            return None
        runs[number] = [rendered.runs[place][1:] for place in places]
    return runs


def _runs_by_prefixes(messages: Messages, text: str, render: Render, answers: Sequence[int]) -> _Runs:
    runs: _Runs = {}
    for number in answers:
        before = render(messages[:number]).text if number else ""
        until = render(messages[: number + 1]).text if number + 1 < len(messages) else text
        if not (text.startswith(until) and until.startswith(before)):
            raise UnusableExampleError(UNFOUND)
        runs[number] = [(len(before), len(until))]
    return runs


class _Headers:
    """Finds the length of a turn's header, which is the generation prompt of the messages before it, or its beginning.

    A generation prompt may begin reasoning that the turn does not have.
    """

    def __init__(self, messages: Messages, render: Render, encode: Callable[[str], Sequence[Span]]) -> None:
        self._messages, self._render, self._encode = messages, render, encode

    def length(self, number: int, turn: str, content: int | None) -> int:
        """Return the length of the header.

        Args:
            number: index of the turn's message.
            turn: the text that was written for it.
            content: position of its content in the turn, if known.
        """
        prompt = self.prompt_before(number)
        if turn.startswith(prompt):
            return len(prompt)
        # The text for the first message may begin with that of a system message.
        if content is not None and (place := turn.find(prompt, 0, content)) >= 0:
            return place + len(prompt)
        blank = len(turn) - len(turn.lstrip())
        begun = prompt.lstrip()
        common = common_length(begun, turn[blank:content])
        # Part of a token is the beginning of other text.
        common = max((end for _, end in self._encode(begun) if end <= common), default=0)
        if common == 0 and self._has_prompt(number):
            raise UnusableExampleError(UNFOUND)
        return blank + common if common else 0

    def _has_prompt(self, number: int) -> bool:
        """Return whether the template writes a generation prompt before a turn, instead of the same text always."""
        messages = self._messages[:number]
        return self._render(messages).text != self._render(messages, prompt=True).text

    def prompt_before(self, number: int) -> str:
        """Return the generation prompt before a turn."""
        asked: Messages = ({"role": "user", "content": "a"},)
        found = None
        for messages in (self._messages[:number], asked) if number else (asked,):
            try:
                with_prompt = self._render(messages, prompt=True)
                if ends := [end for author, _, end in with_prompt.runs if author is not None]:
                    return with_prompt.text[ends[-1] :]
                # The loop has no message yet, or the template has no such loop.
                plain = self._render(messages).text
            except UnusableExampleError:
                # Many templates refuse a chat that does not begin with the user.
                continue
            if with_prompt.text.startswith(plain):
                found = found or with_prompt.text[len(plain) :]
        if found is None:
            raise UnusableExampleError(UNFOUND)
        return found
