"""The one way to read JSON from untrusted files.

Python's reader takes what is no JSON (NaN, Infinity), keeps the last of two equal keys in silence, and follows brackets
until its stack ends. What is read here is an object, nested at most ``MAX_DEPTH`` deep, with finite numbers and each
key once, from a regular file of a bounded size.
"""

import json
import math
import os
from typing import Any

from shardwise.core.files import read_regular

MAX_DEPTH = 64
"""Objects and lists within each other; real files have about ten."""

MAX_CONFIG_BYTES = 8_000_000
"""Of files that describe one thing, such as ``config.json``; real ones have some kilobytes."""

MAX_TABLE_BYTES = 100_000_000
"""Of files that list tensors; safetensors has the same limit for its headers."""

_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


def read_json(path: str | os.PathLike[str], *, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object in the JSON file at ``path``.

    Args:
        path: the path of a regular file.
        limit: its largest size in bytes; a larger file is not read.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
        ValueError: its content is not such an object; see ``parse_json``.
    """
    return parse_json(read_regular(path, limit=limit))


def parse_json(content: bytes) -> dict[str, Any]:
    """The object that a JSON text in UTF-8 is.

    Raises:
        ValueError: it is no JSON, no object, has a number that is not finite or a key twice, or is nested deeper than
            ``MAX_DEPTH``. The message says which, without the file's name.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: can't decode byte 0x{content[error.start]:02x} at {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=_checked_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not isinstance(value, dict):
        raise ValueError(f"it must hold a JSON object, not {type(value).__name__}")
    _check_depth(value, MAX_DEPTH)
    return value


def _check_depth(value: Any, depth: int) -> None:
    if isinstance(value, dict | list):
        if depth == 0:
            raise ValueError(_TOO_DEEP)
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, depth - 1)


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"it has {shown(key)} twice in one object")
        if not _is_finite(item):
            raise ValueError(f"its {shown(key)} is {shown(item)}, which is not finite")
        value[key] = item
    return value


def _is_finite(item: Any) -> bool:
    """Whether a number, or each number of a list, is finite. Objects within were looked at when they were made."""
    if isinstance(item, float):
        return math.isfinite(item)
    return not isinstance(item, list) or all(map(_is_finite, item))


def shown(value: object, longest: int = 80) -> str:
    """A value of a file as JSON has it, or its beginning, for a message."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        # Python does not convert integers of more than 4,300 digits.
        return "a value that cannot be shown"
    return text if len(text) <= longest else f"{text[:longest]}..."
