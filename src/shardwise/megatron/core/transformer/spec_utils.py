"""Megatron's specs of modules: a class, imported or named, and what it is made with."""

import functools
import importlib
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.core.errors import ConfigError

__all__ = [
    "IdentityFuncOp",
    "IdentityOp",
    "ModuleSpec",
    "build_module",
    "get_module",
    "get_submodules",
    "import_module",
]


@dataclass
class ModuleSpec:
    """How a module is built; calling the spec builds it.

    Attributes:
        module: a class or function, or where one is found: ``(module, name)``.
        params: keyword arguments of the class.
        submodules: handed to the class as ``submodules``, unless None.
        metainfo: for the program; nothing depends on it.
    """

    module: tuple[str, str] | Callable[..., Any]
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``build_module`` of this spec."""
        return build_module(self, *args, **kwargs)


def import_module(module_path: tuple[str, str]) -> Any:
    """What ``(module, name)`` says.

    Raises:
        ImportError: there is no such module, or no such name in it.
    """
    base, name = module_path
    module = importlib.import_module(base)
    if not hasattr(module, name):
        raise ImportError(f"a spec names {name!r} of module {base!r}, which has no such name")
    return getattr(module, name)


def get_module(spec_or_module: Any, **additional_kwargs: Any) -> Any:
    """The class or function of a spec; a class or function itself as it is."""
    if not isinstance(spec_or_module, ModuleSpec):
        return spec_or_module
    module = spec_or_module.module
    return import_module(module) if isinstance(module, tuple) else module


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the module of a spec; a function is returned as it is.

    Args:
        spec_or_module: a spec, or a class.
        args, kwargs: of the class, added to the spec's own.

    Raises:
        ConfigError: it is neither.
        Exception: what the class raises, with a note that names it.
    """
    module = get_module(spec_or_module)
    if isinstance(module, types.FunctionType):
        return module
    if not callable(module):
        raise ConfigError(f"{spec_or_module!r} builds no module; give a class or a ModuleSpec")
    params: dict[str, Any] = {}
    if isinstance(spec_or_module, ModuleSpec):
        params = spec_or_module.params
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
    try:
        return module(*args, **params, **kwargs)
    except Exception as error:
        error.add_note(f"when a spec's {getattr(module, '__name__', module)} was built")
        raise


def get_submodules(spec: Any) -> Any:
    """The ``submodules`` of a spec, or of a ``functools.partial`` that was given them.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(spec, functools.partial):
        spec = types.SimpleNamespace(**spec.keywords)
    if not hasattr(spec, "submodules"):
        raise ConfigError(f"{spec!r} has no submodules; give a ModuleSpec with submodules")
    return spec.submodules


class IdentityOp(nn.Module):
    """A part that a layer does not have: returns its first argument."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """``x``."""
        return x


class IdentityFuncOp(IdentityOp):
    """The same where a function is expected: returns one that returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A function that returns its first argument."""
        return super().forward
