"""Check values from a JSON file against declared types.

A type is ``bool``, ``int``, ``float``, ``str``, ``None``, ``Any``, a ``Literal`` of strings, ``list[T]``,
``dict[str, T]``, a ``tuple`` for a list of fixed length, a union of these, or a ``TypedDict`` for an object, whose
other keys are ignored. ``Annotated[int, LOW]`` is an integer of at least LOW, and ``Annotated[T, WORDS, *TESTS]`` a T
that passes all tests, with words for the message. No integer is larger than ``MAX_INTEGER``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from shardwise.core.json_text import shown

MAX_INTEGER = (1 << 63) - 1
"""Largest integer, the largest size that PyTorch can count."""

Count = Annotated[int, 0]
"""An integer of at least 0."""

_Check = Callable[[Any], str | None]
_WORDS: dict[Any, str] = {
    bool: "true or false",
    str: "a string",
    types.NoneType: "null",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def problem(value: Any, kind: Any) -> str | None:
    """Return what is wrong with a value from JSON, such as ``.steps is null; it must be an integer``; None if nothing.

    ``files.parse_json`` has excluded numbers that are not finite.
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
    words, accepts = _words(kind), _test_of(kind)
    return lambda value: None if accepts(value) else _wrong(value, words)


def _test_of(kind: Any) -> Callable[[Any], bool]:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: True
    if origin in (types.UnionType, Union):
        tests = [*map(_test_of, arguments)]
        return lambda value: any(test(value) for test in tests)
    if origin is Literal:
        return lambda value: type(value) is str and value in arguments
    if origin is Annotated:
        low, *more = arguments[1:]
        if isinstance(low, int):
            return lambda value: type(value) is int and low <= value <= MAX_INTEGER
        tests = [_test_of(arguments[0]), *more]
        return lambda value: all(test(value) for test in tests)
    if origin is not None:
        check = _check_of(kind)
        return lambda value: check(value) is None
    if kind in (int, float):
        # isinstance would accept True and False. JSON writes a whole float as an integer in some programs.
        return lambda value: type(value) is kind is float or (type(value) is int and abs(value) <= MAX_INTEGER)
    return lambda value: type(value) is kind


def _words(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return " or ".join(map(_words, arguments))
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin is Annotated:
        low = arguments[1]
        return low if isinstance(low, str) else f"an integer from {low} to {MAX_INTEGER}"
    return _WORDS.get(origin or kind, "an integer")


def _wrong(value: Any, words: str) -> str:
    return f" is {shown(value)}; it must be {words}"


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
