"""Megatron's names and settings for features that the engine lacks, each with the reason.

``absent_names.json`` lists the names by module and reason. They can be imported and compared; using one raises an
error.
``inert_settings.json`` lists the settings by class. Each is either ignored with a warning or raises an error.
"""

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields, make_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Optional

from torch import nn

from shardwise.core.errors import ConfigError

_FOLDER = os.path.join(os.path.dirname(__file__), "")
# By module and name, the reason.
ABSENT: dict[str, dict[str, str]] = {
    module: {name: why for why, names in reasons.items() for name in names.split()}
    for module, reasons in json.loads((Path(_FOLDER) / "absent_names.json").read_text(encoding="utf-8")).items()
}
_INERT = json.loads((Path(_FOLDER) / "inert_settings.json").read_text(encoding="utf-8"))
_TYPES = {"int": int, "float": float, "Callable": Callable, "list": list, "object": object}
_OF_NULL = {
    name: _TYPES[kind] for kind, names in _INERT.pop("types of settings that are null").items() for name in names
}


class HasInstances(type):
    """Class of a class whose instances are the objects of its ``implementation``; subclasses have their own."""

    def __instancecheck__(cls, instance: object) -> bool:
        return (
            isinstance(instance, vars(cls)["implementation"])
            if "implementation" in vars(cls)
            else (super().__instancecheck__(instance))
        )


def absent_names(
    *modules: str, base: type = nn.Module, implemented: Mapping[str, type] = MappingProxyType({})
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module that stands for some of Megatron's, which defines their absent names.

    Each name, even of a function, is a class that can be subclassed and used with ``isinstance``. Calling it or a
    subclass raises ConfigError.

    Args:
        modules: paths below ``megatron.core``, such as ``"transformer.attention"``.
        base: base class of the classes.
        implemented: by name, the class whose objects are instances of that name's class too.
    """

    reasons = {name: why for module in modules for name, why in ABSENT[module].items()}

    @functools.cache
    def look_up(name: str) -> Any:
        if name not in reasons:
            raise AttributeError(f"megatron.core.{modules[0]} has no attribute {name!r} here")
        why = reasons[name]

        def refuse(cls: type, *_: Any, **__: Any) -> NoReturn:
            raise ConfigError(f"{name} is not offered here: {why}")

        members = {"__doc__": f"Refused: {why}.", "__new__": refuse}
        if name in implemented:
            return HasInstances(name, (base,), members | {"implementation": implemented[name]})
        return type(name, (base,), members)

    return look_up


def inert_settings_of(name: str) -> Any:
    """Return a dataclass of the settings of Megatron's class ``name`` that have no effect here."""
    settings = []
    for group in _INERT[name]:
        for setting, default in group["fields"].items():
            inert = field(default=default, metadata={group["kind"]: group["why"]}, kw_only=True)
            # Programs make options of the fields' types.
            kind = Optional[_OF_NULL.get(setting, str)] if default is None else type(default)  # noqa: UP045
            settings.append((setting, kind, inert))
    return make_dataclass(f"{name}Inert", settings, bases=(_Guarded,))


class _Guarded:
    """Base of a config: a setting that is changed after construction is checked as the constructor checks it."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The constructor sets each for the first time, and then checks all of them.
        spec = type(self).__dataclass_fields__.get(name) if name in vars(self) else None  # type: ignore[attr-defined]
        if spec is not None and spec.metadata:
            _check_setting(spec, value)
        super().__setattr__(name, value)


@functools.cache
def say_once(name: str, why: str) -> None:
    """Warn once per process that setting ``name`` has no effect, and why."""
    warnings.warn(f"{name} changes nothing here: {why}", stacklevel=_depth_of_the_caller())


def _depth_of_the_caller() -> int:
    """Return the ``stacklevel`` of the line that makes the config, as seen from the caller of this function."""
    depth, frame = 1, sys._getframe(1)
    # The __init__ of a dataclass has no file.
    while frame.f_back and (frame.f_code.co_filename == "<string>" or frame.f_code.co_filename.startswith(_FOLDER)):
        depth, frame = depth + 1, frame.f_back
    return depth


def _check_setting(spec: Field[Any], value: Any) -> None:
    if value is spec.default or not bool(value != spec.default):
        return
    if "refused" in spec.metadata:
        raise ConfigError(
            f"{spec.name} is {value!r}, which is not offered here: {spec.metadata['refused']}; leave it at "
            f"{spec.default!r}"
        )
    say_once(spec.name, spec.metadata["unused"])


def check_inert(config: Any) -> None:
    """Raise ConfigError for a refused field that differs from its default, or else warn about unused fields."""
    for kind in ("refused", "unused"):
        for spec in fields(config):
            if kind in spec.metadata:
                _check_setting(spec, getattr(config, spec.name))
