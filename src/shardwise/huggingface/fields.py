"""Reading ``config.json`` field by field: defaults, synonyms, types, and the values that are not offered."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from shardwise.errors import ConfigError
from shardwise.json_files import shown

_T = TypeVar("_T", int, float, bool, str)

ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
}
"""Hugging Face's names of activations, and ours."""


class Fields:
    """The fields of a ``config.json``.

    Args:
        values: as read.
        where: the file's name, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of the synonyms ``names`` that is there and not null.

        Raises:
            ConfigError: it is not an integer, or none is there and there is no default.
        """
        return self._get(int, names, default)

    def number(self, *names: str, default: float | None = None) -> float:
        """As ``integer``, for any number."""
        return self._get(float, names, default)

    def flag(self, *names: str, default: bool | None = None) -> bool:
        """As ``integer``, for true or false."""
        return self._get(bool, names, default)

    def text(self, *names: str, default: str | None = None) -> str:
        """As ``integer``, for a string."""
        return self._get(str, names, default)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """An integer, or None if it is null, or ``default`` if it is missing."""
        if name in self.values and self.values[name] is None:
            return None
        return self._get(int, (name,), default) if name in self.values else default

    def activation(self, *names: str, default: str) -> str:
        """Our name of an activation.

        Raises:
            ConfigError: it is one that is not offered.
        """
        name = self.text(*names, default=default)
        if name not in ACTIVATION_NAMES:
            raise self.error(self._present(names) or names[0], name, f"one of {', '.join(ACTIVATION_NAMES)}")
        return ACTIVATION_NAMES[name]

    def require(self, name: str, value: object, *, default: object) -> None:
        """Check that ``name``, or else its default, is ``value``, the only one that is offered.

        Raises:
            ConfigError: it is another.
        """
        found = self.values.get(name, default)
        if found != value:
            raise self.error(name, found, f"{shown(value)}, the only value that is supported")

    def shown(self, name: str) -> str:
        """A value for messages, as it stands in the file, or its beginning."""
        return shown(self.values[name])

    def error(self, name: str, found: object, expected: str) -> ConfigError:
        """An error that names the field and its value."""
        return ConfigError(f"{self.where}: {name} is {shown(found)}; it must be {expected}")

    def _present(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if self.values.get(name) is not None), None)

    def _get(self, kind: type[_T], names: tuple[str, ...], default: _T | None) -> _T:
        name = self._present(names)
        if name is None:
            if default is None:
                raise ConfigError(f"{self.where} lacks {' or '.join(names)}")
            return default
        value = self.values[name]
        accepted: Any = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            article = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[kind]
            raise self.error(name, value, article)
        # JSON has integers of any length.
        if kind is float and not abs(value) <= sys.float_info.max:
            raise self.error(name, value, "a finite number")
        return kind(value)
