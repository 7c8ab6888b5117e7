"""Settings from the plain values of a JSON file, each checked against its dataclass."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shardwise.errors import ConfigError
from shardwise.json_files import shown

_T = TypeVar("_T")


def from_plain_values(cls: type[_T], values: object, where: str) -> _T:
    """An instance of a dataclass, and of those in it.

    Args:
        cls: the dataclass.
        values: what ``dataclasses.asdict`` gives, with lists for tuples.
        where: what they are called in messages, such as ``settings``.

    Raises:
        ConfigError: an unknown name, a value of another type, or one that the class itself refuses.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is {shown(values)}; it must be an object")
    annotations = get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in annotations:
            raise ConfigError(f"{where} are settings of another version: {shown(name)} is unknown")
        annotation = annotations[name]
        if dataclasses.is_dataclass(annotation):
            arguments[name] = from_plain_values(annotation, value, f"{where}.{name}")  # type: ignore[arg-type] # not an instance
        elif _is_of(value, annotation):
            arguments[name] = tuple(value) if isinstance(value, list) else value
        else:
            raise ConfigError(f"{where}.{name} is {shown(value)}, which cannot be")
    return cls(**arguments)


def _is_of(value: object, annotation: Any) -> bool:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (types.UnionType, Union):
        return any(_is_of(value, choice) for choice in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        return isinstance(value, list) and all(_is_of(item, inner[0]) for item in value)
    # Exactly: for isinstance, True and False are integers too.
    return type(value) in ((int, float) if annotation is float else (annotation,))
