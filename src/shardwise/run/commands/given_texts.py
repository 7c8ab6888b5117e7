"""Read texts to continue or to measure: a file, standard input, or strings and records of a program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise.core.atomic_files import open_regular
from shardwise.core.communication.agreement import agree, gather_objects
from shardwise.core.errors import ConfigError, DataError
from shardwise.core.json_text import shown
from shardwise.data import ExampleEncoder
from shardwise.data.examples import Example, common_length, messages_of, tools_of, variables_of, with_system
from shardwise.data.json_records import check_text, keys_of, kind_of, records_of_json, value_of_line
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.commands.text_generation import SamplingRequest, checked_stops
from shardwise.run.processes.ranks import Ranks
from shardwise.training.bounds import SEED, annotations_of, check_value, checked, range_of

# Keys of a record with messages.
_OF_CHATS = ("system", "tools", "functions", "chat_template_kwargs")
_STDIN = "-"
"""The name of standard input."""

Texts = str | PathLike[str] | Sequence[str | Mapping[str, Any]]
"""Texts: a file of JSON lines, a ``.txt`` file with one in each line, ``"-"`` for JSON lines of standard input; or a
sequence of strings and of records as the lines have them."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of ``generate_many``, and what was asked for it."""

    text: str
    ids: list[int]
    request: SamplingRequest
    stops: tuple[str, ...]
    seed: int
    turn_ends: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        where: str,
        value: Any,
        given: SamplingRequest,
        stops: tuple[str, ...],
        seed: int,
        tokenizer: Tokenizer,
        chats: Callable[[], tuple[ExampleEncoder, tuple[int, ...]]],
        *,
        parse_special: bool,
    ) -> Prompt:
        """Read a prompt, whose own settings override the given ones.

        ``chats`` returns an encoder of chats, and the tokens that end a turn; it is called for a prompt of messages.
        """
        record = {"prompt": value} if isinstance(value, str) else value
        _check_record(record, '{"prompt": "..."}')
        kinds = ("prompt", "messages", "tokens")
        first, *others = [key for key in kinds if record.get(key) is not None] or ["prompt"]
        if others:
            raise DataError(f"it has both {first} and {others[0]}; leave one out")
        if first == "prompt":
            _string_of(record, "prompt", where)
        its_text = {*kinds, *(_OF_CHATS if first == "messages" else ())}
        own = checked(SamplingRequest, {name: record[name] for name in record.keys() - its_text - {"seed", "stop"}}, "")
        # As in a table, null stands for what is not given.
        own = {name: value for name, value in own.items() if value is not None}
        for name, (kind, marks) in annotations_of(SamplingRequest).items():
            check_value(name, own.get(name), kind, range_of(marks))
        settings = {spec.name: getattr(given, spec.name) for spec in fields(SamplingRequest)}
        request = SamplingRequest(**settings | own)
        own_seed: Any = seed if record.get("seed") is None else record["seed"]
        check_value("seed", own_seed, int, SEED)
        stops = stops if record.get("stop") is None else checked_stops(record["stop"])
        if first == "tokens":
            ids = _ids_of(record, "tokens")
            return cls(tokenizer.decode(ids), ids, request, stops, own_seed)
        if first == "messages":
            encoder, turn_ends = chats()
            ids = encoder.prompt_of(_asked(record, where))
            return cls(tokenizer.decode(ids), ids, request, stops, own_seed, turn_ends)
        text = _string_of(record, "prompt", where)
        ids = [*tokenizer.beginning, *tokenizer.encode(text, parse_special=parse_special)]
        return cls(text, ids, request, stops, own_seed)


def text_to_measure(where: str, value: Any, tokenizer: Tokenizer, *, parse_special: bool) -> tuple[list[int], int]:
    """Return the ids of a text, and the index of the first that is measured."""
    record = {"text": value} if isinstance(value, str) else value
    _check_record(record, '{"text": "..."}')

    if isinstance(record.get("prompt"), str) and "completion" not in record and "tokens" not in record:
        raise DataError(f"no key 'completion' after the 'prompt' (its keys: {keys_of(record)})")

    def encoded(name: str) -> list[int]:
        return tokenizer.encode(_string_of(record, name, where), parse_special=parse_special)

    if "tokens" in record:
        before, ids = _ids_of(record, "prompt_tokens") if "prompt_tokens" in record else [], _ids_of(record, "tokens")
    elif "completion" in record:
        # Encoded as one text, as in fine-tuning: some tokenizers put a blank before each text.
        together = _string_of(record, "prompt", where) + _string_of(record, "completion", where)
        whole = tokenizer.encode(together, parse_special=parse_special)
        first = common_length(encoded("prompt"), whole)
        before, ids = [*tokenizer.beginning, *whole[:first]], whole[first:]
    else:
        before, ids = list(tokenizer.beginning), encoded("text")
    if not ids:
        raise DataError("the text has no tokens; give it at least one")
    return [*before, *ids], len(before)


def _asked(record: Mapping[str, Any], where: str) -> Example:
    """Return the chat of a record, which waits for an answer."""
    messages = with_system(record, messages_of(record["messages"], where, "messages"), where)
    if messages[-1]["role"] == "assistant":
        raise DataError("the last message is the assistant's, so there is nothing to answer; remove it")
    return Example(where, messages, (), tools_of(record, where), variables_of(record, where))


def _check_record(record: Any, example: str) -> None:
    if isinstance(record, DataError):
        raise record
    if not isinstance(record, Mapping):
        raise DataError(f"neither a JSON object nor a string but {kind_of(record)}; it must be like {example}")
    if not all(isinstance(key, str) for key in record):
        raise DataError(f"its keys are {keys_of(record)}; they must be strings, as in {example}")


def _string_of(record: Mapping[str, Any], name: str, where: str) -> str:
    if name not in record:
        raise DataError(f"no key {name!r} (its keys: {keys_of(record)})")
    if not isinstance(record[name], str):
        raise DataError(f"{name!r} is not a string but {kind_of(record[name])}")
    return check_text(record[name], where, repr(name))


def _ids_of(record: Mapping[str, Any], name: str) -> list[int]:
    ids = record[name]
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or any(type(each) is not int for each in ids):
        raise DataError(f"{name!r} must be a list of integers, the ids of tokens")
    return list(ids)


def at_place(where: str, error: Exception) -> str:
    """Return an error with the place of its text before it."""
    text = " ".join(str(error).split())
    return text if text.startswith(where) else f"{where}: {text}"


def read_on_first(ranks: Ranks, texts: Texts) -> list[tuple[str, Any]]:
    """Return place and value of each text, as the first rank reads them."""
    read = agree(lambda: list(_read(texts)) if ranks.is_first else [], group=ranks.control)
    found: list[tuple[str, Any]] = gather_objects(read, "the texts", group=ranks.control)[0]
    return found


def _read(texts: Texts) -> Iterator[tuple[str, Any]]:
    if not isinstance(texts, str | PathLike):
        if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
            raise ConfigError(f"the texts are {shown(texts)}; give the name of a file, or a list of texts")
        yield from ((f"text {number}", value) for number, value in enumerate(texts, start=1))
        return
    name, path = "standard input" if texts == _STDIN else repr(str(texts)), Path(texts)
    try:
        if texts == _STDIN:
            read = sys.stdin.buffer.read()
        else:
            with open_regular(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
                read = file.read()
        content = read.decode("utf-8-sig")
    except OSError as error:
        raise DataError(
            f"{name} cannot be read: {error.strerror or error}; name a file of texts, or - for standard input"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is no text: {error}; write it in UTF-8") from error
    if path.suffix == ".json" and content.lstrip().startswith("["):
        yield from ((record.where, record.value) for record in records_of_json(content, path))
        return
    for number, line in enumerate(content.split("\n"), start=1):
        where = f"{name}, line {number}"
        if not line.strip():
            continue
        if texts != _STDIN and path.suffix == ".txt":
            yield where, line.removesuffix("\r")
            continue
        try:
            yield where, value_of_line(line, where)
        except DataError as error:
            # One that is no record; the others are answered.
            yield where, error
