"""The targets that come with the library, by name; their modules are imported in the ranks alone."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from shardwise.core.errors import ConfigError

TARGETS = {
    "shardwise": "shardwise_engine",
    "shardwise.megatron": "shardwise_megatron",
    "megatron": "megatron",
    "transformers": "transformers",
    "dtensor": "dtensor",
}


def check_target(name: str) -> None:
    """Raise ConfigError unless there is a target of this name, or a file of Python at this path."""
    if name in TARGETS:
        return
    path = Path(name)
    if path.suffix != ".py":
        raise ConfigError(f"unknown target {name!r}; give a file of Python, or one of {', '.join(TARGETS)}")
    if not path.is_file():
        raise ConfigError(f"the target {name} is not a file")


def load_target(name: str) -> ModuleType:
    """Import a target: a name of ``TARGETS``, or the path of a file of Python."""
    check_target(name)
    if name in TARGETS:
        module = importlib.import_module(f"{__name__}.{TARGETS[name]}")
    else:
        spec = importlib.util.spec_from_file_location("conformance_target", name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    getattr(module, "prepare", lambda: None)()
    return module
