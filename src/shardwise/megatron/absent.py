"""Names of Megatron's for what the engine does not have: each can be imported and compared, and using it is an error.

They stand in ``absent_names.json``: by module, each name with the reason and what to use instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from shardwise.errors import ConfigError

_ABSENT: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "absent_names.json").read_text(encoding="utf-8")
)


def absent_names(module: str, base: type = object) -> dict[str, type]:
    """The classes that stand for the absent names of Megatron's module.

    A class may be subclassed and used with ``isinstance``; calling it, or a subclass, is an error. A function is such a
    class too, as nothing but its call can be told apart.

    Args:
        module: below ``megatron.core``, such as ``"transformer.attention"``.
        base: what the classes inherit from.
    """
    return {name: _absent(name, why, base) for name, why in _ABSENT[module].items()}


def _absent(name: str, why: str, base: type) -> type:
    def refuse(cls: type, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"{name} is not offered here: {why}")

    return type(name, (base,), {"__doc__": f"Refused: {why}.", "__new__": refuse, "__module__": __name__})
