"""Settings from plain values, such as those of a JSON file, over their defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from shardwise.errors import ConfigError
from shardwise.json_files import shown
from shardwise.training.bounds import annotations_of, check_value

_T = TypeVar("_T")


def with_values(cls: type[_T], values: Mapping[str, Any], defaults: _T | None = None) -> _T:
    """A settings dataclass with ``values`` over its defaults; those in it likewise.

    Args:
        cls: the dataclass.
        values: by the fields' names; those of a dataclass in it as a mapping, those of a tuple as a list if need be.
        defaults: an instance with the default values; those of the class if None.

    Raises:
        ConfigError: what the dataclasses refuse when they are made.
    """
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    any_class: Any = cls
    for field in dataclasses.fields(any_class):
        if not isinstance(table := values.get(field.name), Mapping):
            continue
        inner = None if defaults is None else getattr(defaults, field.name)
        if defaults is None and field.default_factory is not dataclasses.MISSING:
            inner = field.default_factory()
        arguments[field.name] = with_values(annotations_of(any_class)[field.name][0], table, inner)
    made: _T = any_class(**arguments) if defaults is None else dataclasses.replace(cast(Any, defaults), **arguments)
    return made


def from_plain_values(cls: type[_T], values: object, where: str) -> _T:
    """An instance of a dataclass, and of those in it.

    Args:
        cls: the dataclass.
        values: what ``dataclasses.asdict`` gives, with lists for tuples.
        where: what they are called in messages, such as ``settings``.

    Raises:
        ConfigError: an unknown name, a value of another type, or one that the class itself refuses.
    """
    _check(cls, values, where)
    return with_values(cls, cast(Mapping[str, Any], values))


def _check(cls: type, values: object, where: str) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is {shown(values)}; it must be an object")
    known = annotations_of(cls)
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where} are settings of another version: {shown(name)} is unknown")
        annotation = known[name][0]
        if dataclasses.is_dataclass(annotation):
            _check(cast(type, annotation), value, f"{where}.{name}")
        else:
            check_value(f"{where}.{name}", tuple(value) if isinstance(value, list) else value, annotation)
