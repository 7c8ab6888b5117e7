"""Fields that programs set and this library does not read: harmless ones are accepted, the others refused.

The reason stands in the field's metadata::

    >>> from shardwise.config import TransformerConfig
    >>> TransformerConfig.__dataclass_fields__["persist_layer_norm"].metadata["unused"]
    "PyTorch's own norm kernel is used"
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from shardwise.errors import ConfigError

T = TypeVar("T")

_FOLDER = os.path.dirname(__file__)


def unused(default: T, why: str) -> T:
    """A field that changes no number here; setting it says ``why``, once per process."""
    return field(default=default, metadata={"unused": why})


def refused(default: T, why: str) -> T:
    """A field that would change numbers and is not implemented; setting it raises ConfigError, with ``why``."""
    return field(default=default, metadata={"refused": why})


@functools.cache
def say_once(name: str, why: str) -> None:
    """Warn, the first time in this process, that setting ``name`` changes nothing, and why."""
    warnings.warn(f"{name} changes nothing here: {why}", stacklevel=_depth_of_the_caller())


def _depth_of_the_caller() -> int:
    """The ``stacklevel``, seen from the function that calls this one, of the line that makes the config."""
    depth, frame = 1, sys._getframe(1)
    # The __init__ of a dataclass is code without a file.
    while frame.f_back and (
        frame.f_code.co_filename == "<string>" or os.path.dirname(frame.f_code.co_filename) == _FOLDER
    ):
        depth, frame = depth + 1, frame.f_back
    return depth


def _is_set(config: Any, spec: Field[Any]) -> bool:
    value = getattr(config, spec.name)
    return value is not spec.default and bool(value != spec.default)


def check_fields(config: Any) -> None:
    """Raise for a refused field of a dataclass that differs from its default; else warn of the unused ones.

    Raises:
        ConfigError: a refused field is set, or a field for integers to a float.
    """
    for spec in fields(config):
        # Later it would fail in a layer, or not at all (8.0 == 8). Annotations are strings here.
        if spec.type in ("int", "int | None") and isinstance(getattr(config, spec.name), float):
            raise ConfigError(f"{spec.name} is {getattr(config, spec.name)!r}; it must be an integer")
    chosen = [spec for spec in fields(config) if spec.metadata and _is_set(config, spec)]
    for spec in chosen:
        if "refused" in spec.metadata:
            raise ConfigError(
                f"{spec.name} is {getattr(config, spec.name)!r}, which is not offered here: "
                f"{spec.metadata['refused']}; leave it at {spec.default!r}"
            )
    for spec in chosen:
        if "unused" in spec.metadata:
            say_once(spec.name, spec.metadata["unused"])
