"""Sharded checkpoints in safetensors and JSON, which are never incomplete and load at any layout.

The first access to a function that reads or writes one imports torch.distributed.checkpoint, which takes a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardwise.core.sharding import ParamShard as ParamShard
from shardwise.storage.checkpoint.folder import latest as latest

if TYPE_CHECKING:
    from shardwise.storage.checkpoint.checkpoint import load as load, read_meta as read_meta, verify as verify
    from shardwise.storage.checkpoint.saving import PendingSave as PendingSave, Snapshot as Snapshot, save as save

_MODULES = {
    "load": "checkpoint",
    "read_meta": "checkpoint",
    "verify": "checkpoint",
    "PendingSave": "saving",
    "Snapshot": "saving",
    "save": "saving",
}

__all__ = sorted([*_MODULES, "ParamShard", "latest"])


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
