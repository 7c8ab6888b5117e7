"""A settings file: TOML, each value checked against its dataclass before flags override it."""

from __future__ import annotations

import dataclasses
import re
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shardwise.cli.reporting import nearest
from shardwise.errors import ConfigError
from shardwise.files import read_regular

_T = TypeVar("_T")

_MAX_BYTES = 1_000_000
_MAX_DEPTH = 16
# A key of many parts, for each of which the reader keeps all before it.
_LONG_KEY = re.compile(
    r"""^[ \t\[]*+(?:[ \t]*+(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.){17}""",
    re.MULTILINE,
)


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        ConfigError: it is not TOML, and the message names the line; it is no regular file, larger than ``_MAX_BYTES``,
            or nested deeper than settings are.
    """
    try:
        text = read_regular(path, limit=_MAX_BYTES).decode()
        too_deep = _LONG_KEY.search(text) is not None
        values = {} if too_deep else tomllib.loads(text)
        too_deep = too_deep or any(depth > _MAX_DEPTH for depth in _depths(values))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    # Among them TOMLDecodeError, text that is not UTF-8, and integers of more digits than Python reads.
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ConfigError(f"{path} is nested more than {_MAX_DEPTH} deep; settings stand in tables of one level")
    return values


def _depths(value: object) -> Iterator[int]:
    """How deep each value within ``value`` stands."""
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        yield depth
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        pending.extend((each, depth + 1) for each in inner)


def settings_defaults(cls: type[_T], values: dict[str, Any], path: str | None = None) -> _T:
    """An instance of a settings dataclass with ``values`` over its defaults, for flags to override.

    Its own validation does not run: what contradicts itself here may be mended by a flag. Only names and types are
    checked.

    Args:
        cls: the dataclass; its fields may be dataclasses too.
        values: from ``read_toml``; hyphens in names are taken for underscores.
        path: the file, for messages.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type.
    """
    return _filled(cls, values, f"{path}: " if path else "", "", _setting_types(cls))


def _setting_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """The type of each setting by its dotted name, such as ``model.num_layers``; of each table by its name too."""
    types: dict[str, Any] = {}
    for name, annotation in get_type_hints(cls).items():
        types[prefix + name] = annotation
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            types |= _setting_types(annotation, f"{prefix}{name}.")
    return types


def _filled(cls: type[_T], values: dict[str, Any], where: str, prefix: str, known: dict[str, Any]) -> _T:
    given = {key.replace("-", "_"): value for key, value in values.items()}
    for key in given:
        if prefix + key not in known or "." in key:
            close = nearest(prefix + key, known)
            hint = f"; did you mean {close}?" if close else ""
            raise ConfigError(f"{where}unknown setting {prefix}{key}{hint}")
    instance = object.__new__(cls)
    # Only dataclasses come here.
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name = prefix + field.name
        annotation = known[name]
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            table = given.get(field.name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{where}{name} must be a table, [{name}], got {table!r}")
            value: Any = _filled(annotation, table, where, f"{name}.", known)
        elif field.name in given:
            value = _checked(given[field.name], annotation, f"{where}{name}")
        elif field.default is not dataclasses.MISSING:
            value = field.default
        else:
            assert field.default_factory is not dataclasses.MISSING
            value = field.default_factory()
        object.__setattr__(instance, field.name, value)
    return instance


def _checked(value: Any, annotation: Any, name: str) -> Any:
    """``value`` as its setting has it: an integer may stand for a float, and a list for a tuple."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f'{name} is {value!r}; it must be a list of strings, such as ["a.txt", "b"]')
        return tuple(value)
    if origin in (types.UnionType, Union):
        annotation = next(argument for argument in arguments if argument is not type(None))
    accepted = (int, float) if annotation is float else annotation
    if not isinstance(value, accepted) or (isinstance(value, bool) and annotation is not bool):
        what = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[annotation]
        raise ConfigError(f"{name} is {value!r}; it must be {what}")
    try:
        return annotation(value)
    except OverflowError as error:
        raise ConfigError(f"{name} is an integer too large for a number: {error}") from error
