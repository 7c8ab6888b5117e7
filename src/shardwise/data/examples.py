"""What a record is for fine-tuning: a chat, a prompt with its completion, or a plain text.

============================================================ =========================================================
a record with                                                is
============================================================ =========================================================
``messages`` or ``conversations``: a list of messages        a chat
``prompt`` and ``completion``: two strings                   a text of which the completion is learned
``prompt`` and ``completion``: two lists of messages         a chat of which the completion is learned
the key of the text                                          a text
============================================================ =========================================================

A message has ``role`` and ``content`` (OpenAI's form) or ``from`` and ``value`` (ShareGPT's). Beside messages a record
may have ``system``, a text that goes before them, ``tools``, and ``chat_template_kwargs``, which the template is given.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.core.errors import DataError
from shardwise.data.json_records import Record, check_text, kind_of, text_of

Messages = tuple[Mapping[str, Any], ...]

_CHAT_KEYS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")


@dataclass(frozen=True)
class Example:
    """One thing to learn from.

    Attributes:
        where: the file, and the place in it.
        prompt: what the completion answers; None if there is no such division.
        completion: the rest, or all: a text or messages, as the prompt is.
        tools: descriptions of functions for the template.
        variables: more for the template.
    """

    where: str
    prompt: str | Messages | None
    completion: str | Messages
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether it is of messages."""
        return not isinstance(self.completion, str)


def has_text(record: Record, text_key: str) -> bool:
    """Whether there is anything in a record; see ``text_of`` for what is raised of a plain text."""
    return not is_plain_text(record) or not _names_its_text(record, text_key) or bool(text_of(record, text_key))


def _names_its_text(record: Record, text_key: str) -> bool:
    return not isinstance(record.value, dict) or text_key in record.value


def is_plain_text(record: Record) -> bool:
    """Whether a record is a text and nothing else."""
    value = record.value
    if not isinstance(value, dict):
        return True
    return not (any(key in value for key in _CHAT_KEYS) or {"prompt", "completion"} <= value.keys())


def example_of(record: Record, text_key: str) -> Example:
    """What a record is for fine-tuning.

    Raises:
        DataError: it has none of the forms above, or messages that are none. The message says where.
    """
    where, value = record.where, record.value
    if is_plain_text(record):
        if not _names_its_text(record, text_key):
            keys = ", ".join(map(repr, list(value)[:5])) or "none"
            raise DataError(
                f"{where}: neither 'messages' nor 'prompt' and 'completion' nor {text_key!r} (its keys: {keys}); "
                "give it one of them, or name the key of the text (--corpus.text-key)"
            )
        return Example(where, None, text_of(record, text_key))
    tools, variables = tools_of(value, where), variables_of(value, where)
    for key in _CHAT_KEYS:
        if key in value:
            return Example(
                where, None, with_system(value, messages_of(value[key], where, key), where), tools, variables
            )
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Example(where, check_text(prompt, where, "'prompt'"), check_text(completion, where, "'completion'"))
    before = with_system(value, messages_of(prompt, where, "prompt"), where)
    return Example(where, before, messages_of(completion, where, "completion"), tools, variables)


def messages_of(value: object, where: str, key: str) -> Messages:
    """The messages under ``key``, in OpenAI's form. Raises DataError if they are none."""
    if not isinstance(value, list):
        beside = " where the other one is messages" if key in ("prompt", "completion") else ""
        raise DataError(f"{where}: {key!r} is not a list of messages but {kind_of(value)}{beside}; repair the record")
    if not value:
        raise DataError(f"{where}: {key!r} has no message; remove the record")
    return tuple(_message_of(each, f"{where}, message {number}") for number, each in enumerate(value, 1))


def _message_of(value: object, where: str) -> dict[str, Any]:
    """A message in OpenAI's form."""
    if not isinstance(value, dict):
        raise DataError(f'{where}: not an object but {kind_of(value)}; a message is {{"role": ..., "content": ...}}')
    message = {name: each for name, each in value.items() if each is not None}
    for theirs, ours in (("from", "role"), ("value", "content")):
        if theirs in message and ours not in message:
            message[ours] = message.pop(theirs)
    role = message.get("role")
    if not isinstance(role, str):
        keys = ", ".join(map(repr, list(value)[:5])) or "none"
        raise DataError(
            f"{where}: no role (its keys: {keys}); a message has 'role' and 'content', or 'from' and 'value'"
        )
    message["role"] = role = _ROLES.get(role, role)
    if role not in _KNOWN_ROLES:
        raise DataError(f"{where}: the role {role[:40]!r} is unknown; use one of {', '.join((*_KNOWN_ROLES, *_ROLES))}")
    if "content" in message:
        message["content"] = _content_of(message["content"], where)
    elif "tool_calls" not in message:
        raise DataError(f"{where}: no content; give it 'content' (or 'value'), or remove the message")
    return message


def _content_of(value: object, where: str) -> str:
    """The text of a message; OpenAI's list of parts is joined."""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        for part in value:
            if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
                raise DataError(f"{where}: a part of type {part.get('type')!r}; only text is learned from")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise DataError(f"{where}: its content is not a string but {kind_of(value)}; make it a string")
    return check_text(value, where, "the content")


def with_system(value: Mapping[str, Any], messages: Messages, where: str) -> Messages:
    """Messages with the record's ``system`` before them."""
    system = value.get("system")
    if not isinstance(system, str) or not system or messages[0]["role"] == "system":
        return messages
    return ({"role": "system", "content": check_text(system, where, "'system'")}, *messages)


def tools_of(value: Mapping[str, Any], where: str) -> list[Any] | None:
    """The record's ``tools``. Raises DataError if they are none."""
    tools = value.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: 'tools' is a string that is no JSON: {error}; repair the record") from error
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: 'tools' is not a list but {kind_of(tools)}; repair the record")
    return tools or None


def variables_of(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The record's ``chat_template_kwargs``. Raises DataError if they are none."""
    variables = value.get("chat_template_kwargs")
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise DataError(f"{where}: 'chat_template_kwargs' is not an object but {kind_of(variables)}; repair the record")
    # Tables give every row the names of all rows.
    given = {name: each for name, each in variables.items() if each is not None}
    if reserved := {"messages", "tools", "documents", "add_generation_prompt"} & given.keys():
        raise DataError(f"{where}: 'chat_template_kwargs' has {min(reserved)!r}, which is not for it; remove it")
    return given
