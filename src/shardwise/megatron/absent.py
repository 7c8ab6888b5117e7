"""Names of Megatron's for what the engine does not have: each can be imported and compared, and using it is an error.

They stand in ``absent_names.json``: by module, each name with the reason and what to use instead.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from shardwise.core.errors import ConfigError

ABSENT: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "absent_names.json").read_text(encoding="utf-8")
)


def absent_names(module: str, base: type = nn.Module) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that offers the absent names of one of Megatron's.

    Each is a class. It may be subclassed and used with ``isinstance``; calling it, or a subclass, is an error. A
    function is such a class too, as nothing but its call can be told apart.

    Args:
        module: below ``megatron.core``, such as ``"transformer.attention"``.
        base: what the classes inherit from.
    """

    @functools.cache
    def look_up(name: str) -> Any:
        if name not in ABSENT[module]:
            raise AttributeError(f"megatron.core.{module} has no attribute {name!r} here")
        why = ABSENT[module][name]

        def refuse(cls: type, *_: Any, **__: Any) -> NoReturn:
            raise ConfigError(f"{name} is not offered here: {why}")

        return type(name, (base,), {"__doc__": f"Refused: {why}.", "__new__": refuse})

    return look_up
