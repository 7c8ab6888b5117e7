"""Services that programs expect of Megatron: a version, logs of configs, and a client of object stores."""

import json
import os
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core import parallel_state

# Megatron's release whose names programs find here; see docs/porting.md.
__version__ = "0.16.1"
__all__ = [
    "MultiStorageClientFeature",
    "__version__",
    "apply_module",
    "correct_amax_history_if_needed",
    "get_fp8_context",
    "has_config_logger_enabled",
    "is_experimental_enabled",
    "is_float8tensor",
    "is_mxfp8tensor",
    "log_config_to_disk",
    "not_none",
    "open_file",
    "set_experimental_flag",
]

__getattr__ = absent_names("fp8_utils")

_T = TypeVar("_T")

_COUNTS: Counter[str] = Counter()
ENABLE_EXPERIMENTAL = False


def set_experimental_flag(flag: bool) -> None:
    """Store a flag for the program; no feature here depends on it."""
    global ENABLE_EXPERIMENTAL
    ENABLE_EXPERIMENTAL = flag


def is_experimental_enabled() -> bool:
    """Return the stored flag, initially False."""
    return ENABLE_EXPERIMENTAL


def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager[None]:
    """Return a context that does nothing: a config with ``fp8`` is refused."""
    return nullcontext()


def correct_amax_history_if_needed(model: Any) -> None:
    """Do nothing: no parameter is in fp8."""


def is_float8tensor(tensor: Tensor) -> bool:
    """Return False: no parameter is in fp8."""
    return False


is_mxfp8tensor = is_float8tensor


def has_config_logger_enabled(config: Any) -> bool:
    """True if a config has a ``config_logger_dir``."""
    return bool(getattr(config, "config_logger_dir", ""))


def log_config_to_disk(config: Any, dict_data: dict[str, Any], prefix: str = "", rank_str: str = "") -> None:
    """Write values as JSON to ``{prefix}.rank_{ranks}.iter{n}.json`` in ``config.config_logger_dir``.

    Args:
        config: config with the folder.
        dict_data: values by name, for which text stands where JSON has no form; ``self`` is left out, and its class is
            the default ``prefix``.
        prefix: beginning of the file's name.
        rank_str: this rank in the name; by default its ranks in tp, dp, cp, pp and ep.
    """
    values = {name: value for name, value in dict_data.items() if name != "self"}
    prefix = prefix or (type(dict_data["self"]).__name__ if "self" in dict_data else "")
    path = os.path.join(config.config_logger_dir, f"{prefix}.rank_{rank_str or _ranks()}")
    os.makedirs(config.config_logger_dir, exist_ok=True)
    with open(f"{path}.iter{_COUNTS[path]}.json", "w", encoding="utf-8") as file:
        json.dump(values, file, default=str)
    _COUNTS[path] += 1


def _ranks() -> str:
    getters = ("tensor_model", "data", "context", "pipeline_model", "expert_model")
    return "_".join(str(getattr(parallel_state, f"get_{name}_parallel_rank")()) for name in getters)


def apply_module(m: _T, *, check_subclass: bool = True) -> _T:
    """Return the module; raise TypeError if it is none, unless ``check_subclass`` is False."""
    if check_subclass and not isinstance(m, nn.Module):
        raise TypeError(f"{type(m).__name__} is no torch.nn.Module")
    return m


def not_none(value: _T | None) -> _T:
    """Return the value; raise ValueError if it is None."""
    if value is None:
        raise ValueError("the value is None")
    return value


class _NoObjectStore:
    """The feature flag of ``multistorageclient``, which is off: files are opened as files."""

    def enable(self) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError("multistorageclient is not used here; give paths of files, and leave the call out")

    def disable(self) -> None:
        """Do nothing."""

    def is_enabled(self) -> bool:
        """Return False."""
        return False

    def import_package(self) -> NoReturn:
        """Raise ConfigError."""
        self.enable()


MultiStorageClientFeature = _NoObjectStore()


def open_file(*args: Any, **kwargs: Any) -> Any:
    """Open a file, as ``open`` does."""
    return open(*args, **kwargs)
