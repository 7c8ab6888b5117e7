"""Settings of Megatron's that change nothing here: accepted with a warning, or refused, each for a reason.

They stand in ``inert_settings.json``.
"""

import functools
import json
import os
import sys
import warnings
from dataclasses import Field, field, fields, make_dataclass
from pathlib import Path
from typing import Any

from shardwise.core.errors import ConfigError

_FOLDER = os.path.join(os.path.dirname(__file__), "")
_INERT = json.loads((Path(_FOLDER) / "inert_settings.json").read_text(encoding="utf-8"))


def inert_settings_of(name: str) -> Any:
    """A dataclass of the settings of Megatron's class ``name`` that change nothing here."""
    return make_dataclass(
        f"{name}Inert",
        [
            (setting, "Any", field(default=default, metadata={group["kind"]: group["why"]}, kw_only=True))
            for group in _INERT[name]
            for setting, default in group["fields"].items()
        ],
    )


@functools.cache
def say_once(name: str, why: str) -> None:
    """Warn, the first time in this process, that setting ``name`` changes nothing, and why."""
    warnings.warn(f"{name} changes nothing here: {why}", stacklevel=_depth_of_the_caller())


def _depth_of_the_caller() -> int:
    """The ``stacklevel``, seen from the function that calls this one, of the line that makes the config."""
    depth, frame = 1, sys._getframe(1)
    # The __init__ of a dataclass is code without a file.
    while frame.f_back and (frame.f_code.co_filename == "<string>" or frame.f_code.co_filename.startswith(_FOLDER)):
        depth, frame = depth + 1, frame.f_back
    return depth


def _is_set(config: Any, spec: Field[Any]) -> bool:
    value = getattr(config, spec.name)
    return value is not spec.default and bool(value != spec.default)


def check_inert(config: Any) -> None:
    """Raise ConfigError for a refused field that differs from its default; else warn of the unused ones."""
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
