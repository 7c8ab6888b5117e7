"""JSON of strangers: objects with finite numbers and unique keys, of bounded depth and size.

Python's parser accepts NaN and Infinity, silently keeps the last of two equal keys, and recurses until the stack
overflows.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any

from shardwise.core.atomic_files import read_regular

MAX_DEPTH = 64
"""Largest depth of nested objects and lists; real files have about ten levels."""

MAX_CONFIG_BYTES = 8_000_000
"""Largest size of files such as ``config.json``; real ones have a few kilobytes."""

MAX_TABLE_BYTES = 100_000_000
"""Largest size of a list of tensors; safetensors limits its headers to the same size."""

_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


def read_json(
    path: str | os.PathLike[str], *, limit: int = MAX_CONFIG_BYTES, names_infinity: bool = False
) -> dict[str, Any]:
    """Read the JSON object in the regular file at ``path``, of at most ``limit`` bytes; see ``parse_json``.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger than ``limit``.
        ValueError: the content is not valid; see ``parse_json``.
    """
    return parse_json(read_regular(path, limit=limit), names_infinity=names_infinity)


def parse_json(content: bytes, *, names_infinity: bool = False) -> dict[str, Any]:
    """Parse a JSON object from UTF-8 text.

    With ``names_infinity``, an infinite number is returned as transformers 5 writes it, ``{"__float__": "Infinity"}``.

    Raises:
        ValueError: the text is not JSON or not an object, has a non-finite number or a duplicate key, or is nested
            deeper than ``MAX_DEPTH``. The message states the reason, but not the file's name.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: can't decode byte 0x{content[error.start]:02x} at {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=_checked_object, parse_constant=_named if names_infinity else float)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not isinstance(value, dict):
        raise ValueError(f"it must hold a JSON object, not {type(value).__name__}")
    _check_depth(value, MAX_DEPTH)
    return value


def _named(constant: str) -> Any:
    return float(constant) if constant == "NaN" else {"__float__": constant}


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
    """True if a number, or each number of a list, is finite. Nested objects were checked when they were parsed."""
    if isinstance(item, float):
        return math.isfinite(item)
    return not isinstance(item, list) or all(map(_is_finite, item))


def shown(value: object, longest: int = 80) -> str:
    """Format a value from a file as JSON for a message, cut off after ``longest`` characters."""
    text = ""
    try:
        # Part by part: in a pickle, a tuple of ten bytes can stand in itself many times, and have billions of elements.
        for part in json.JSONEncoder(default=str).iterencode(value):
            text += part
            if len(text) > longest:
                return f"{text[:longest]}..."
    except (ValueError, TypeError, RecursionError):
        # Python does not format integers of more than 4,300 digits, and JSON has no tuples as keys.
        return "a value that cannot be shown"
    return text


def first_of(names: Sequence[str], number: int = 3) -> str:
    """List the first names for a message, such as ``"a, b, c and 4 more"``."""
    more = f" and {len(names) - number} more" if len(names) > number else ""
    return ", ".join(names[:number]) + more
