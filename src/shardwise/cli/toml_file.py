"""A settings file: TOML, each value checked against its dataclass's types before flags override it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_origin

from shardwise.cli.reporting import nearest
from shardwise.errors import ConfigError
from shardwise.files import read_regular
from shardwise.training.bounds import annotations_of, check_value, kind_of

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


def checked_settings(cls: type, values: dict[str, Any], path: str) -> dict[str, Any]:
    """The values of a settings file by the fields' names, each of its setting's type.

    Ranges, and whether settings contradict each other, are for the dataclass to check: a flag may mend it.

    Args:
        cls: the settings' dataclass; its fields may be dataclasses too.
        values: from ``read_toml``; hyphens in names are taken for underscores.
        path: the file, for messages.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type.
    """
    return _checked(values, f"{path}: ", "", _setting_types(cls))


def _setting_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """The type of each setting by its dotted name, such as ``model.num_layers``; of each table by its name too."""
    types: dict[str, Any] = {}
    for name, (annotation, _) in annotations_of(cls).items():
        types[prefix + name] = annotation
        if dataclasses.is_dataclass(annotation):
            types |= _setting_types(cast(type, annotation), f"{prefix}{name}.")
    return types


def _checked(values: dict[str, Any], where: str, prefix: str, known: dict[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for key, value in values.items():
        last = key.replace("-", "_")
        name = prefix + last
        if name not in known or "." in last:
            close = nearest(name, known)
            hint = f"; did you mean {close}?" if close else ""
            raise ConfigError(f"{where}unknown setting {name}{hint}")
        kind = kind_of(known[name])
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}{name} must be a table, [{name}], got {value!r}")
            checked[last] = _checked(value, where, f"{name}.", known)
            continue
        if isinstance(value, list) and get_origin(kind) is tuple:
            value = tuple(value)
        check_value(where + name, value, kind)
        if kind is float:
            # What is too large for a float is out of range too, and refused as such.
            with contextlib.suppress(OverflowError):
                value = float(value)
        checked[last] = value
    return checked
