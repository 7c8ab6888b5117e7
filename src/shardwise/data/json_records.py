"""Texts in JSON: records as the lines of a file (JSON lines), or as one array.

A record of JSON lines is an object that has its text under a key; a record of an array may be the text itself.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from shardwise.errors import DataError

_BLANK = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def texts_of_lines(content: str, file: Path, text_key: str) -> list[str]:
    """The texts of JSON lines; blank lines are left out.

    Args:
        content: the file's content.
        file: its name, for messages.
        text_key: name of the text in each object.

    Raises:
        DataError: a line that is not a JSON object with a text. The message names file and line.
    """
    # Only \n ends a line of JSON lines; str.splitlines would also split at U+2028, which JSON strings may contain.
    lines = enumerate(content.split("\n"), start=1)
    return [_text_of_line(line, f"{str(file)!r}, line {number}", text_key) for number, line in lines if line.strip()]


def texts_of_json(content: str, file: Path, text_key: str) -> list[str]:
    """The texts of a ``.json`` file: an array of records, or JSON lines; nothing if it is blank.

    Args:
        content: the file's content.
        file: its name, for messages.
        text_key: name of the text in each object. A string in an array is a text without one.

    Raises:
        DataError: it is neither, or a record has no text. The message names file, record and line.
    """
    start = _skip_blank(content, 0)
    if content[start : start + 1] == "[":
        return list(_texts_of_array(content, start, file, text_key))
    if content[start : start + 1] in ("{", ""):
        try:
            return texts_of_lines(content, file, text_key)
        except DataError:
            if not _begins_object_of_lines(content, start):
                raise
            raise DataError(
                f"{str(file)!r}, {_position(content, start)}: a JSON object over several lines, which is neither an "
                f"array of records nor JSON lines; put its records in an array: [...]"
            ) from None
    raise DataError(
        f"{str(file)!r}, {_position(content, start)}: {content[start]!r} begins neither a JSON array of records nor "
        f"JSON lines; make it one of the two, or name the file .txt if its characters are the text"
    )


def _texts_of_array(content: str, start: int, file: Path, text_key: str) -> Iterator[str]:
    """The text of each record of the array that begins at ``start``, decoded one by one."""
    at = _skip_blank(content, start + 1)
    line, counted = 1, 0
    number = 0
    while content[at : at + 1] != "]" or number:
        number += 1
        line, counted = line + content.count("\n", counted, at), at
        where = f"{str(file)!r}, record {number} (line {line})"
        try:
            value, at = _DECODER.raw_decode(content, at)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated string") or _skip_blank(content, error.pos) == len(content):
                raise DataError(f"{where}: the file ends within it; it is cut off, or a quote is missing") from error
            raise DataError(
                f"{where}: broken JSON: {error.msg} at {_position(content, error.pos)}; repair the file"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: JSON that cannot be read: {error}; repair or remove the record") from error
        yield _text_of_record(value, where, text_key)
        at = _skip_blank(content, at)
        sign = content[at : at + 1]
        if sign == "]":
            break
        if sign != ",":
            if not sign:
                raise DataError(f"{where}: the file ends after it, within the array; it is cut off")
            raise DataError(
                f"{where}: {sign!r} after it, at {_position(content, at)}, where ',' or ']' belongs; repair the file"
            )
        at = _skip_blank(content, at + 1)
    after = _skip_blank(content, at + 1)
    if after < len(content):
        raise DataError(
            f"{str(file)!r}, {_position(content, after)}: {content[after]!r} after the end of the array; a .json file "
            f"is one array of records or JSON lines, not both"
        )


def _begins_object_of_lines(content: str, start: int) -> bool:
    """Whether a whole JSON object of more than one line begins at ``start``."""
    try:
        _, end = _DECODER.raw_decode(content, start)
    except (ValueError, RecursionError):
        return False
    return "\n" in content[start:end]


def _skip_blank(content: str, start: int) -> int:
    blank = _BLANK.match(content, start)
    assert blank is not None
    return blank.end()


def _position(content: str, offset: int) -> str:
    line = content.count("\n", 0, offset) + 1
    return f"line {line}, column {offset - content.rfind(chr(10), 0, offset)}"


def _text_of_line(line: str, where: str, text_key: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: broken JSON: {error.msg} at column {error.colno}; repair or remove the line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: JSON that cannot be read: {error}; repair or remove the line") from error
    return _text_of_object(value, where, text_key, problem="not a JSON object")


def _text_of_record(value: object, where: str, text_key: str) -> str:
    if isinstance(value, str):
        return _checked(value, where, "the text")
    return _text_of_object(value, where, text_key, problem="neither a JSON object nor a string")


def _text_of_object(value: object, where: str, text_key: str, *, problem: str) -> str:
    if not isinstance(value, dict):
        example = f'{{{json.dumps(text_key)}: "..."}}'
        raise DataError(f"{where}: {problem} but {_kind(value)}; each record must be like {example}")
    if text_key not in value:
        keys = ", ".join(map(repr, list(value)[:5])) or "none"
        raise DataError(
            f"{where}: no key {text_key!r} (its keys: {keys}); name the key of the text (--corpus.text-key) or repair "
            f"the record"
        )
    text = value[text_key]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: {text_key!r} is not a string but {_kind(text)}; make it a string or remove the record"
        )
    return _checked(text, where, repr(text_key))


def _checked(text: str, where: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: a lone surrogate \\u{ord(text[error.start]):04x} in {what}, which is no character; remove it"
        ) from error
    return text


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
