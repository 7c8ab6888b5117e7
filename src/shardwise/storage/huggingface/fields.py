"""Reading ``config.json`` field by field: defaults, synonyms, types, and the values that are not offered."""

import math
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from shardwise.core.errors import ConfigError
from shardwise.core.json_files import shown

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
        values: the fields as they were read.
        where: the file's name, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def get(
        self,
        kind: type[_T],
        *names: str,
        default: _T | None = None,
        within: tuple[float, float] = (-math.inf, math.inf),
    ) -> _T:
        """The first of the synonyms ``names`` that is there and not null.

        Args:
            kind: its type; an integer of the file is a float, too.
            *names: names of the field; the first that is present is used.
            default: if none of them is there.
            within: the smallest and the largest number that it may be.

        Raises:
            ConfigError: it is of another type or out of range, or none is there and there is no default.
        """
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            if default is None:
                raise ConfigError(f"{self.where} lacks {' or '.join(names)}")
            return default
        value = self.values[name]
        accepted: Any = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            article = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[kind]
            raise self.error(name, value, article)
        # A JSON file may hold integers too long for a float.
        if kind is float and not abs(value) <= sys.float_info.max:
            raise self.error(name, value, "a finite number")
        if kind is not str and not within[0] <= value <= within[1]:
            raise self.error(name, value, f"from {within[0]:,} to {within[1]:,}")
        return kind(value)

    def optional(self, kind: type[_T], name: str, default: _T | None = None) -> _T | None:
        """As ``get``, but None if it is null, and ``default`` if it is missing."""
        if name not in self.values:
            return default
        return None if self.values[name] is None else self.get(kind, name)

    def require(self, name: str, value: object) -> None:
        """Check that ``name`` is missing, or is ``value``, the default and the only one that is offered.

        Raises:
            ConfigError: it is another.
        """
        found = self.values.get(name, value)
        if found != value:
            raise self.error(name, found, f"{shown(value)}, the only value that is supported")

    def error(self, name: str, found: object, expected: str) -> ConfigError:
        """An error that names the field and its value."""
        return ConfigError(f"{self.where}: {name} is {shown(found)}; it must be {expected}")
