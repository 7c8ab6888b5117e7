"""Convert records to examples: chats, prompts with completions, plain texts, and preferences between two answers.

============================================================ =========================================================
a record with                                                is
============================================================ =========================================================
``messages`` or ``conversations``: a list of messages        a chat
``prompt`` and ``completion``: two strings                   a text whose completion is learned
``prompt`` and ``completion``: two lists of messages         a chat whose completion is learned
the key of the text                                          a text
``instruction``, ``output`` and perhaps ``input``            a chat of one turn (Alpaca's form), after the pairs of
                                                             texts of ``history``
============================================================ =========================================================

======================================================== =============================================================
a record with                                            is a preference of
======================================================== =============================================================
``prompt``, ``chosen``, ``rejected``: three strings      texts
``prompt``, ``chosen``, ``rejected``: lists of messages  chats
``chosen`` and ``rejected`` alone, of either kind        the same: the prompt is the beginning of both
``prompt``: a string, the others lists of messages       chats: the prompt is the beginning of both, and has the string
======================================================== =============================================================

A message has ``role`` and ``content`` (OpenAI's form) or ``from`` and ``value`` (ShareGPT's). The value of ShareGPT's
``function_call`` is JSON, a call or a list of calls. OpenAI's older ``function_call`` of a message and ``functions`` of
a record are read as calls and tools. A message may have flags that say whether it is learned
(``weight``, ``train`` ...), which the template does not see. A record with messages may also have ``system``, a text
before them, ``tools``, and ``chat_template_kwargs``, which are passed to the template.
Preferences have the formats of the library ``trl``, with explicit and implicit prompts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from shardwise.core.errors import DataError
from shardwise.core.json_text import shown
from shardwise.data.json_records import Record, check_text, digest_of, keys_of, kind_of, text_of

Messages = tuple[Mapping[str, Any], ...]

_CHAT_KEYS = ("messages", "conversations")
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# Keys that any chat may have besides its messages; "functions" is read if there are no "tools".
_OF_CHATS = ("tools", "functions", "system", "chat_template_kwargs", "label")
_CONTENT = (str, list, dict, bool)
_CALL_ROLE = "function_call"
_ROLES = {name: name for name in _KNOWN_ROLES} | {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", _CALL_ROLE), "assistant"),
    "observation": "tool",
}

# Flags of a message, and whether a true flag means that the message is learned.
_FLAGS = {"weight": True, "train": True, "trainable": True, "loss": True, "loss_mask": True, "masked": False}
_OF_FLAGS = {*_FLAGS, "train_detail"}


class Flag(NamedTuple):
    """A flag of a message, for example ``"weight": 0``; ``learned`` is True if it says that the message is learned."""

    name: str
    value: object
    learned: bool

    def __str__(self) -> str:
        return f"{self.name!r} is {shown(self.value)}"


@dataclass(frozen=True)
class Example:
    """A training example: an optional prompt, and a completion of the same type.

    ``tools`` and ``variables`` are passed to the template. ``flags`` has for each message the flag that says whether it
    is learned, or None; it is empty if no message has a flag. ``unread`` are keys of the record whose texts, lists or
    flags are not in the example. ``label`` is the record's, if it is a number.
    """

    where: str
    prompt: str | Messages | None
    completion: str | Messages
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[Flag | None, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)
    label: float | None = field(default=None, compare=False)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the content, independent of ``where``."""
        return digest_of(self._content)

    @property
    def _content(self) -> list[object]:
        content: list[object] = [self.prompt, self.completion, self.tools, dict(self.variables)]
        # Without flags, hashes are those of earlier versions, which choose the held-out examples.
        return [*content, [flag and flag.learned for flag in self.flags]] if self.flags else content

    @property
    def is_chat(self) -> bool:
        """True if the example consists of messages."""
        return not isinstance(self.completion, str)

    @property
    def messages(self) -> Messages:
        """All messages of a chat."""
        assert not isinstance(self.completion, str)
        assert not isinstance(self.prompt, str)
        return (*(self.prompt or ()), *self.completion)


def has_text(record: Record, text_key: str) -> bool:
    """True if the record is not empty. Raises as ``text_of`` for a plain text."""
    is_text = is_plain_text(record, text_key) and names_its_text(record, text_key)
    return not is_text or bool(text_of(record, text_key))


def names_its_text(record: Record, text_key: str) -> bool:
    """True if the record is a string, or has a text under ``text_key``."""
    return not isinstance(record.value, dict) or text_key in record.value


def is_plain_text(record: Record, text_key: str) -> bool:
    """True if the record is only a text."""
    value = record.value
    if not isinstance(value, dict):
        return True
    if any(key in value for key in _CHAT_KEYS) or {"prompt", "completion"} <= value.keys():
        return False
    return text_key in value or not {"instruction", "output"} <= value.keys()


def example_of(record: Record, text_key: str) -> Example:
    """Convert a record to an example."""
    made = _example_of(record, text_key)
    if made.prompt is None and not made.is_chat:
        return made
    # Set in place, since copies of millions of examples take long.
    object.__setattr__(made, "unread", _unread(record.value, made))
    if isinstance(label := record.value.get("label"), int | float):
        object.__setattr__(made, "label", label)
    return made


def _unread(value: Mapping[str, Any], example: Example) -> tuple[str, ...]:
    """Return the keys of a record that the example does not use, except numbers and empty values."""
    if isinstance(example, Preference) or example.prompt is not None:
        read: tuple[str, ...] = ("prompt", "completion", *_KEYS)
    else:
        read = tuple(key for key in _CHAT_KEYS if key in value)[:1] or ("instruction", "input", "output", "history")
    read += _OF_CHATS if example.is_chat else ("label",)
    return tuple(
        key
        for key, each in value.items()
        if key not in read and (each is False or (each and isinstance(each, _CONTENT)))
    )


def _example_of(record: Record, text_key: str) -> Example:
    where, value = record.where, record.value
    if is_plain_text(record, text_key):
        if not names_its_text(record, text_key):
            raise DataError(
                f"{where}: neither 'messages' nor 'prompt' and 'completion' nor 'instruction' and 'output' nor "
                f"{text_key!r} (its keys: {keys_of(value)}); give it one of them, name the key of the text "
                "(--corpus.text-key), or write a form for its keys (--prompt-template)"
            )
        return Example(where, None, text_of(record, text_key))
    if value.get("label") is False:
        raise DataError(
            f"{where}: 'label' is false, so the answer is one that people do not want, and it would be learned; remove "
            "the record, or its label"
        )
    tools, variables = tools_of(value, where), variables_of(value, where)
    for key in _CHAT_KEYS:
        if key in value:
            messages = with_system(value, messages_of(value[key], where, key), where)
            return Example(where, None, messages, tools, variables, _flags_of(messages, where, value[key]))
    if "instruction" in value and not {"prompt", "completion"} <= value.keys():
        return Example(where, None, with_system(value, _instruction_of(value, where), where), tools, variables)
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        _check_no_system(value, where, "'prompt'")
        return Example(where, check_text(prompt, where, "'prompt'"), check_text(completion, where, "'completion'"))
    before, after = messages_of(prompt, where, "prompt"), messages_of(completion, where, "completion")
    before = with_system(value, before, where)
    flags = _flags_of((*before, *after), where, prompt, completion)
    return Example(where, before, after, tools, variables, flags)


def _instruction_of(value: Mapping[str, Any], where: str) -> Messages:
    """Convert an instruction, perhaps with an input, and its output to a turn of a chat."""
    texts = [value[key] if value.get(key) is not None else "" for key in ("instruction", "input", "output")]
    for key, text in zip(("instruction", "input", "output"), texts, strict=True):
        if not isinstance(text, str):
            raise DataError(f"{where}: {key!r} is not a string but {kind_of(text)}; make it a string")
        check_text(text, where, repr(key))
    *asked, answer = texts
    pairs = [] if value.get("history") is None else value["history"]
    if not isinstance(pairs, list) or not all(isinstance(each, list) and len(each) == 2 for each in pairs):
        raise DataError(f"{where}: 'history' is no list of pairs of a question and its answer; repair the record")
    messages = []
    for question, reply in [*pairs, ("\n\n".join(text for text in asked if text), answer)]:
        for role, text in (("user", question), ("assistant", reply)):
            messages.append({"role": role, "content": _content_of(text, f"{where}, 'history'")})
    return tuple(messages)


def messages_of(value: object, where: str, key: str) -> Messages:
    """Convert the messages under ``key`` to OpenAI's format, without flags. Raises DataError if they are invalid."""
    if not isinstance(value, list):
        beside = " where the other one is messages" if key in ("prompt", "completion") else ""
        raise DataError(f"{where}: {key!r} is not a list of messages but {kind_of(value)}{beside}; repair the record")
    if not value:
        raise DataError(f"{where}: {key!r} has no message; remove the record")
    return tuple(_message_of(each, f"{where}, message {number}") for number, each in enumerate(value, 1))


def _message_of(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{where}: not an object but {kind_of(value)}; a message is {{"role": ..., "content": ...}}')
    message = {name: each for name, each in value.items() if each is not None and name not in _FLAGS}
    if "content" not in message and "value" not in message and ("content" in value or "value" in value):
        # Templates tell None from a missing key.
        message["content"] = None
    for theirs, ours in (("from", "role"), ("value", "content")):
        if theirs in message and ours not in message:
            message[ours] = message.pop(theirs)
    if "tool_calls" not in message and isinstance(call := message.get(_CALL_ROLE), dict) and call.get("name"):
        message = {name: each for name, each in message.items() if name != _CALL_ROLE}
        message["tool_calls"] = _calls_of(call, where)
    if "tool_calls" in message:
        message["tool_calls"] = _objects_of(message["tool_calls"], where, "tool_calls", "a call")
    role = message.get("role")
    if not isinstance(role, str):
        raise DataError(
            f"{where}: no role (its keys: {keys_of(value)}); a message has 'role' and 'content', or 'from' and 'value'"
        )
    if role.lower() not in _ROLES:
        raise DataError(f"{where}: the role {role[:40]!r} is unknown; use one of {', '.join(_ROLES)}")
    message["role"] = _ROLES[role.lower()]
    if role.lower() == _CALL_ROLE:
        message |= {"content": None, "tool_calls": _calls_of(message.get("content"), where)}
    if message.get("content") is not None:
        message["content"] = _content_of(message["content"], where)
    elif "tool_calls" not in message:
        raise DataError(f"{where}: no content; give it 'content' (or 'value'), or remove the message")
    return message


def _calls_of(text: object, where: str) -> list[dict[str, Any]]:
    """Return the calls of a ShareGPT message ``function_call``, in OpenAI's form."""
    value: Any = None
    with suppress(ValueError, RecursionError):
        value = json.loads(text) if isinstance(text, str) else text
    calls: list[Any] = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in calls):
        raise DataError(
            f"{where}: {_CALL_ROLE} holds {shown(text)}, which is not JSON like "
            '{"name": "get_weather", "arguments": {"city": "Ulm"}} or a list of such calls; repair the record'
        )
    names = ("name", "arguments")
    return [{"type": "function", "function": {name: each.get(name, {}) for name in names}} for each in calls]


def _flags_of(messages: Messages, where: str, *given: Any) -> tuple[Flag | None, ...]:
    """Return the flag of each message; empty if there is none.

    Messages that the record lacks, such as its ``system``, come first; ``given`` are lists of messages of the record.
    """
    flags = [_flag_of(each, f"{where}, message {number}") for of in given for number, each in enumerate(of, 1)]
    return (None,) * (len(messages) - len(flags)) + tuple(flags) if any(flags) else ()


def _flag_of(message: Mapping[str, Any], where: str) -> Flag | None:
    found: Flag | None = None
    if _OF_FLAGS.isdisjoint(message):
        return None
    if message.get("train_detail"):
        raise DataError(f"{where}: 'train_detail' says which parts are learned, which is not read; remove it")
    for name, learns in _FLAGS.items():
        if (value := message.get(name)) is None:
            continue
        # Tables may hold flags as floats.
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(
                f"{where}: {name!r} is {shown(value)}; a flag that says whether a message is learned must be 0, 1, "
                "false or true; repair or remove it"
            )
        flag = Flag(name, value, bool(value) is learns)
        if found is not None and found.learned is not flag.learned:
            raise DataError(
                f"{where}: {found} and {flag}: one says that the message is learned, the other that it is not; remove "
                "one of them"
            )
        found = flag
    return found


def check_flags(example: Example, is_learned: Callable[[int, str], bool | None], rule: str) -> None:
    """Raise DataError for a flag that contradicts ``is_learned``, a function of a message's index and role.

    It returns None where the flag decides. ``rule`` is what decides instead, for the error.
    """
    if not example.flags:
        return
    assert not isinstance(example.prompt, str)
    assert not isinstance(example.completion, str)
    messages = (*(example.prompt or ()), *example.completion)
    for index, (message, flag) in enumerate(zip(messages, example.flags, strict=True)):
        if flag is not None and is_learned(index, message["role"]) is (not flag.learned):
            raise DataError(
                f"{example.where}, {message['role']} message {message.get('content')!r:.40}: {flag}, so it is "
                f"{'' if flag.learned else 'not '}to be learned, but {rule}"
            )


def _content_of(value: object, where: str) -> str:
    """Return the text of a message; the parts of an OpenAI list are joined."""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        for part in value:
            if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
                raise DataError(f"{where}: a part of type {part.get('type')!r}; only text is learned from")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise DataError(f"{where}: its content is not a string but {kind_of(value)}; make it a string")
    return check_text(value, where, "the content")


def with_system(value: Mapping[str, Any], messages: Messages, where: str) -> Messages:
    """Prepend the record's ``system`` to messages."""
    system = value.get("system")
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise DataError(f"{where}: 'system' is not a string but {kind_of(system)}; make it a string")
    if messages[0]["role"] == "system":
        if (messages[0].get("content") or "").strip() != system.strip():
            raise DataError(f"{where}: 'system' is another text than that of the first message; leave one of them out")
        return messages
    return ({"role": "system", "content": check_text(system, where, "'system'")}, *messages)


def _check_no_system(value: Mapping[str, Any], where: str, texts: str) -> None:
    """Refuse a system text of a record of plain texts, which has no place for it."""
    if isinstance(system := value.get("system"), str) and system:
        raise DataError(
            f"{where}: 'system' is a text of chats, and {texts} is plain text; put it into the prompt, or write a form "
            "for the record's keys (--prompt-template)"
        )


def tools_of(value: Mapping[str, Any], where: str) -> list[Any] | None:
    """Return the record's ``tools``, or its ``functions`` as tools. Raises DataError if they are invalid."""
    key = "tools" if value.get("tools") is not None else "functions"
    if value.get(key) is None:
        return None
    tools = _objects_of(value.get(key), where, key, "a tool")
    return (tools if key == "tools" else [{"type": "function", "function": each} for each in tools]) or None


def _objects_of(value: object, where: str, key: str, noun: str) -> list[Any]:
    """Return a list of objects; in some tables, it or each object is a text of JSON."""
    values = _parsed(value, where, key)
    if not isinstance(values, list | None):
        raise DataError(f"{where}: {key!r} is not a list but {kind_of(values)}; repair the record")
    objects = [_parsed(each, where, key) for each in values or ()]
    for each in objects:
        if not isinstance(each, dict):
            raise DataError(f"{where}: {key!r} has {kind_of(each)}, where {noun} is an object; repair the record")
    return objects


def _parsed(value: object, where: str, key: str) -> object:
    """Return a value, parsed if it is a text of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {key!r} is a string that is no JSON: {error}; repair the record") from error


def variables_of(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the record's ``chat_template_kwargs``. Raises DataError if they are invalid."""
    variables = value.get("chat_template_kwargs")
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise DataError(f"{where}: 'chat_template_kwargs' is not an object but {kind_of(variables)}; repair the record")
    # In tables, every row has the keys of all rows, with None for missing values.
    given = {name: each for name, each in variables.items() if each is not None}
    if reserved := {"messages", "tools", "documents", "add_generation_prompt"} & given.keys():
        raise DataError(f"{where}: 'chat_template_kwargs' has {min(reserved)!r}, which is not for it; remove it")
    return given


_KEYS = ("chosen", "rejected")
# Keys that published preferences have instead of a prompt.
_QUESTIONS = ("question", "instruction", "input", "query", "history", "context", "conversation", *_CHAT_KEYS)


@dataclass(frozen=True, kw_only=True)
class Preference(Example):
    """A prompt with two answers; ``completion`` is the chosen one."""

    rejected: str | Messages

    @property
    def _content(self) -> list[object]:
        return [*super()._content, self.rejected]


def is_preference(record: Record) -> bool:
    """True if the record has two answers."""
    return isinstance(record.value, dict) and all(key in record.value for key in _KEYS)


def preference_of(record: Record) -> Preference:
    """Convert a record to a preference."""
    made = _preference_of(record)
    object.__setattr__(made, "unread", _unread(record.value, made))
    return made


def _preference_of(record: Record) -> Preference:
    where, value = record.where, record.value
    if not is_preference(record):
        keys = keys_of(value) if isinstance(value, dict) else "it is no object"
        raise DataError(
            f"{where}: no preference: it needs 'chosen' and 'rejected', and 'prompt' unless both begin with it (its "
            f"keys: {keys})"
        )
    prompt, chosen, rejected = value.get("prompt"), value["chosen"], value["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        for key in _KEYS:
            check_text(value[key], where, repr(key))
        _check_no_system(value, where, "'chosen'")
        if prompt is None:
            if asked := [key for key in _QUESTIONS if isinstance(value.get(key), str | list) and value[key]]:
                raise DataError(
                    f"{where}: no 'prompt' but {asked[0]!r}, which the model would not see; name it 'prompt', or write "
                    "a form for the record's keys (--prompt-template)"
                )
            common = _common_text(chosen, rejected)
            return Preference(where, chosen[:common] or None, chosen[common:], rejected=rejected[common:])
        if not isinstance(prompt, str):
            raise DataError(f"{where}: 'chosen' and 'rejected' are strings, and 'prompt' is not; repair the record")
        return Preference(where, check_text(prompt, where, "'prompt'"), chosen, rejected=rejected)
    answers = [messages_of(value[key], where, key) for key in _KEYS]
    given: list[list[Any]] = [[value[key]] for key in _KEYS]
    if isinstance(prompt, list):
        before = messages_of(prompt, where, "prompt")
        given = [[prompt, *each] for each in given]
    elif prompt is None or isinstance(prompt, str):
        # Each answer keeps at least one message, even if one answer is a prefix of the other.
        common = min(common_length(*answers), min(map(len, answers)) - 1)
        before, *answers = answers[0][:common], *(answer[common:] for answer in answers)
        if isinstance(prompt, str) and all(prompt.strip() != (each.get("content") or "").strip() for each in before):
            raise DataError(
                f"{where}: 'prompt' is a text that none of the messages says which 'chosen' and 'rejected' both begin "
                "with; repair the record, or leave 'prompt' out"
            )
    else:
        raise DataError(f"{where}: 'prompt' is neither a string nor a list of messages; repair the record")
    if before:
        before = with_system(value, before, where)
    for answer, lists in zip(answers, given, strict=True):
        check_flags(
            Example(where, before, answer, flags=_flags_of((*before, *answer), where, *lists)),
            lambda index, _: index >= len(before),
            "of a preference, the answers are learned and the prompt is not; remove the flag",
        )
    return Preference(
        where, before, answers[0], tools_of(value, where), variables_of(value, where), rejected=answers[1]
    )


def _common_text(chosen: str, rejected: str) -> int:
    """Return the length of the common prefix of two texts, without a final space, which belongs to the answers."""
    common = common_length(chosen, rejected)
    if common == min(len(chosen), len(rejected)):
        return max(0, common - 1)
    return common - 1 if chosen[:common].endswith(" ") else common


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
