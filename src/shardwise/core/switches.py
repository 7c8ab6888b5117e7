"""The switches in the environment: variables that are 0 or 1, and whose other values are errors."""

from __future__ import annotations

import os

from shardwise.core.errors import ConfigError

SHARED_MEMORY, ONEDNN = "SHARDWISE_SHARED_MEMORY", "SHARDWISE_ONEDNN"
TRITON, CUDA_GRAPHS = "SHARDWISE_TRITON", "SHARDWISE_CUDA_GRAPHS"

_ON_IF_NOT_SET = {SHARED_MEMORY: True, ONEDNN: True, TRITON: True, CUDA_GRAPHS: False}


def is_on(name: str) -> bool:
    """Whether a switch is 1; what it is by default if the variable is not set, or empty.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"the environment has {name}={value}, which must be 0 or 1; change it, or unset it")
    return value == "1" if value else _ON_IF_NOT_SET[name]


def check_switches() -> None:
    """Raise ConfigError unless each switch is 0 or 1."""
    for name in _ON_IF_NOT_SET:
        is_on(name)
