"""Check values from a JSON file against declared types.

A type is ``bool``, ``int``, ``float``, ``str``, ``None``, ``Any``, a ``Literal`` of strings, a union of these,
``list[T]``, ``dict[str, T]``, a ``tuple`` for a list of fixed length, or a ``TypedDict`` for an object, whose other
keys are ignored. ``Annotated[int, LOW]`` is an integer of at least LOW. No integer is larger than ``MAX_INTEGER``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from shardwise.core.files import shown

MAX_INTEGER = (1 << 63) - 1
"""Largest integer, the largest size that PyTorch can count."""

Count = Annotated[int, 0]
"""An integer of at least 0."""

_Check = Callable[[Any], str | None]
_WORDS: dict[Any, str] = {bool: "true or false", str: "a string", types.NoneType: "null", float: "a number"}


def problem(value: Any, kind: Any) -> str | None:
    """Return what is wrong with a value from JSON, such as ``.steps is null; it must be an integer``; None if nothing.

    Args:
        value: value from ``files.parse_json``, which excludes numbers that are not finite.
        kind: its declared type.
    """
    return _check_of(kind)(value)


@functools.cache
def _check_of(kind: Any) -> _Check:
    if is_typeddict(kind):
        return _object(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        return _list(_check_of(arguments[0]))
    if origin is dict:
        return _mapping(_check_of(arguments[1]))
    if origin is tuple:
        return _tuple(tuple(map(_check_of, arguments)))
    if kind is Any:
        return lambda value: None
    return _simple(_words(kind), tuple(_alternatives(kind)))


def _alternatives(kind: Any) -> list[tuple[Any, Any]]:
    """Return the exact types of a simple kind, each with its least value or its only values, if any."""
    if get_origin(kind) in (types.UnionType, Union):
        return [each for inner in get_args(kind) for each in _alternatives(inner)]
    if get_origin(kind) is Literal:
        return [(str, get_args(kind))]
    if get_origin(kind) is Annotated:
        return [get_args(kind)]
    # JSON writes a whole float as an integer in some programs.
    return (
        [(int, -MAX_INTEGER), *([(float, None)] if kind is float else [])] if kind in (int, float) else [(kind, None)]
    )


def _words(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return " or ".join(map(_words, arguments))
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin is Annotated:
        return f"an integer from {arguments[1]} to {MAX_INTEGER}"
    return _WORDS.get(kind, "an integer")


def _wrong(value: Any, words: str) -> str:
    return f" is {shown(value)}; it must be {words}"


def _simple(words: str, alternatives: tuple[tuple[Any, Any], ...]) -> _Check:
    def check(value: Any) -> str | None:
        for kind, bound in alternatives:
            # isinstance would accept True and False as integers.
            if type(value) is kind and (
                bound is None or (value in bound if kind is str else bound <= value <= MAX_INTEGER)
            ):
                return None
        return _wrong(value, words)

    return check


def _list(inner: _Check) -> _Check:
    def check(value: Any) -> str | None:
        if type(value) is not list:
            return _wrong(value, "a list")
        for number, item in enumerate(value):
            if (wrong := inner(item)) is not None:
                return f"[{number}]{wrong}"
        return None

    return check


def _tuple(inner: tuple[_Check, ...]) -> _Check:
    def check(value: Any) -> str | None:
        if type(value) is not list or len(value) != len(inner):
            return _wrong(value, f"a list of {len(inner)}")
        for number, (item, of_item) in enumerate(zip(value, inner, strict=True)):
            if (wrong := of_item(item)) is not None:
                return f"[{number}]{wrong}"
        return None

    return check


def _mapping(inner: _Check) -> _Check:
    def check(value: Any) -> str | None:
        if type(value) is not dict:
            return _wrong(value, "an object")
        for key, item in value.items():
            if (wrong := inner(item)) is not None:
                return f".{key[:80]}{wrong}"
        return None

    return check


def _object(kind: Any) -> _Check:
    hints = get_type_hints(kind, include_extras=True)
    required = kind.__required_keys__
    fields = [(name, _check_of(hint), name in required) for name, hint in hints.items()]

    def check(value: Any) -> str | None:
        if type(value) is not dict:
            return _wrong(value, "an object")
        for name, of_field, is_required in fields:
            if name not in value:
                if is_required:
                    return f".{name} is missing"
            elif (wrong := of_field(value[name])) is not None:
                return f".{name}{wrong}"
        return None

    return check
