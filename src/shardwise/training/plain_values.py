"""Settings from plain values, such as those of a TOML or JSON file, over their defaults."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, cast, get_origin

from shardwise.core.errors import ConfigError
from shardwise.training.bounds import annotations_of, check_value, kind_of

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


def checked(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a file by the fields' names, each of its setting's type.

    Ranges, and whether settings contradict each other, are for the dataclass to check: a flag may mend it.

    Args:
        cls: the settings' dataclass; its fields may be dataclasses too.
        values: from TOML or JSON; hyphens in names are taken for underscores.
        where: what stands before names in messages, such as ``run.toml: ``.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type.
    """
    return _checked(values, where, "", _types_of(cls))


def from_keywords(cls: type[_T], values: Mapping[str, Any]) -> _T:
    """The settings of a run from keyword arguments, over their defaults.

    Args:
        cls: the settings' dataclass, with a field ``data`` of paths.
        values: by the fields' names; those of a table as a mapping, or by themselves where their flags have no prefix.
            Paths may be path objects, and one path may stand for a list of one in ``data``.

    Raises:
        ConfigError: an unknown name, a value of the wrong type or out of range, or settings that contradict each other.
    """
    given = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}
    data = given.get("data")
    if isinstance(data, str):
        given["data"] = (data,)
    elif isinstance(data, Iterable):
        given["data"] = tuple(os.fspath(each) if isinstance(each, os.PathLike) else each for each in data)
    for name, (table, marks) in annotations_of(cast(Any, cls)).items():
        if not dataclasses.is_dataclass(table) or not any(getattr(mark, "name", None) == "" for mark in marks):
            continue
        if own := {field.name: given.pop(field.name) for field in dataclasses.fields(table) if field.name in given}:
            given[name] = {**given.get(name, {}), **own}
    return with_values(cls, checked(cls, given, ""))


def _types_of(cls: type, prefix: str = "") -> dict[str, Any]:
    """The type of each setting by its dotted name, such as ``model.num_layers``; of each table by its name too."""
    types: dict[str, Any] = {}
    for name, (annotation, _) in annotations_of(cls).items():
        types[prefix + name] = annotation
        if dataclasses.is_dataclass(annotation):
            types |= _types_of(cast(type, annotation), f"{prefix}{name}.")
    return types


def _checked(values: Mapping[str, Any], where: str, prefix: str, known: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        last = key.replace("-", "_")
        name = prefix + last
        if name not in known or "." in last:
            close = nearest(name, known)
            raise ConfigError(f"{where}unknown setting {name}{f'; did you mean {close}?' if close else ''}")
        kind = kind_of(known[name])
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            found[last] = _checked(value, where, f"{name}.", known)
            continue
        if isinstance(value, list) and get_origin(kind) is tuple:
            value = tuple(value)
        check_value(where + name, value, known[name])
        if kind is float and value is not None:
            # What is too large for a float is out of range too, and refused as such.
            with contextlib.suppress(OverflowError):
                value = float(value)
        found[last] = value
    return found


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` was most likely meant to be, or None.

    ``tp`` finds ``parallel.tp``: a name whose last part is the same comes first, then one of which that is the initials
    (``optimizer.lr``). Of a name with a group the last part alone is compared with those of the group.
    """
    known = list(known)
    group, _, last = name.rpartition(".")
    for wanted in (lambda of: of == last, lambda of: _initials(of) == last):
        if close := get_close_matches(name, [each for each in known if wanted(each.rpartition(".")[2])], 1, 0.0):
            return close[0]
    of_group = {each.removeprefix(f"{group}."): each for each in known if group and each.startswith(f"{group}.")}
    if of_group:
        close = get_close_matches(last, of_group, 1)
        return of_group[close[0]] if close else None
    close = get_close_matches(name, known, 1)
    return close[0] if close else None


def _initials(name: str) -> str:
    words = name.replace("_", "-").split("-")
    return "".join(word[:1] for word in words) if len(words) > 1 else ""
