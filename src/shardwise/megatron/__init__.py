"""The door for programs written for Megatron, which makes ``import megatron.core...`` find this library.

::

    import shardwise.megatron

    shardwise.megatron.install()
    from megatron.core import parallel_state, tensor_parallel

The names are aliases: ``megatron.core.parallel_state`` *is* ``shardwise.parallel_state``. Importing a module that is
not offered raises ModuleNotFoundError; ``docs/porting.md`` lists these modules, with reasons. Installed
packages next to ``megatron.core``, such as ``megatron.bridge``, are found.
"""

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.megatron.aliases import MEGATRON, PACKAGES, SHORT, TRAINING

# All prefixes of other names.
_PARENTS = {name[:end] for name in (*MEGATRON, *PACKAGES) for end, sign in enumerate(name) if sign == "."}
_PACKAGES = sorted({*PACKAGES} | _PARENTS - MEGATRON.keys())

_MARK, _RANDOM = "__shardwise__", "shardwise.megatron.core.tensor_parallel.random"


def install(*, rng: str = "global") -> None:
    """Make ``megatron.core`` and its modules aliases of Shardwise's modules; a second call only sets ``rng``.

    Args:
        rng: default of ``model_parallel_cuda_manual_seed``. With "global", dropout masks and therefore losses are the
            same for any number of tensor-parallel ranks and stages. With "per_rank", each rank draws its own masks, as
            in Megatron, which is faster.

    Raises:
        ConfigError: ``rng`` has another value, or a package named ``megatron`` is imported already. Nothing has
            changed.
    """
    foreign = sorted(name for name in sys.modules if _is_named_here(name) and not _is_ours(sys.modules[name]))
    if foreign:
        raise ConfigError(
            f"{', '.join(foreign[:3])}{' and others are' if len(foreign) > 3 else ' is'} already imported; call "
            "shardwise.megatron.install() before anything imports megatron"
        )
    set_default_rng = importlib.import_module(_RANDOM).set_default_rng
    set_default_rng(rng)
    modules: dict[str, ModuleType] = {}
    left_out = TRAINING if PathFinder.find_spec(TRAINING, _folders()) else " "
    for name in _PACKAGES:
        if name.startswith(left_out):
            continue
        # Imported packages next to megatron.core are attributes of the earlier one.
        package = sys.modules.get(name) or ModuleType(name, "An alias of Shardwise; see shardwise.megatron.")
        # Without a folder, missing modules of Megatron Core are not found even if it is installed.
        package.__path__ = _folders() if name == "megatron" else []
        setattr(package, _MARK, True)
        # Python names it where a name cannot be imported.
        package.__file__ = __file__
        for source in map(importlib.import_module, PACKAGES.get(name, ())):
            vars(package).update({public: getattr(source, public) for public in source.__all__})
        package.__getattr__ = _absent_in(PACKAGES.get(name, ()))  # type: ignore[method-assign]
        modules[name] = package
    for name, target in MEGATRON.items():
        if not name.startswith(left_out):
            modules[name] = importlib.import_module(target)
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        # A function may have the name of its module.
        if parent in _PACKAGES and not hasattr(modules[parent], child):
            setattr(modules[parent], child, module)
    sys.modules.update(modules)


def uninstall() -> None:
    """Undo ``install``: remove the aliases and reset ``rng``. Modules that imported aliases keep them."""
    importlib.import_module(_RANDOM).set_default_rng("per_rank")
    for name in (*_PACKAGES, *MEGATRON):
        if name in sys.modules and _is_ours(sys.modules[name]):
            del sys.modules[name]


def _absent_in(sources: tuple[str, ...]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package: the names that its modules refuse."""

    def look_up(name: str) -> Any:
        for source in map(sys.modules.__getitem__, sources):
            # A module that refuses nothing has no such function.
            with suppress(AttributeError, KeyError):
                return vars(source)["__getattr__"](name)
        raise AttributeError(f"a package of megatron has no attribute {name!r} here")

    return look_up


def _folders() -> list[str]:
    """Return the folders of installed packages next to ``megatron.core``, such as ``megatron.bridge``."""
    spec = PathFinder.find_spec("megatron")
    return [] if spec is None else [*(spec.submodule_search_locations or ())]


def _is_named_here(name: str) -> bool:
    """True for ``megatron`` and the packages that ``install`` defines, with everything below them."""
    first, _, rest = name.partition(".")
    return first == "megatron" and (not rest or f"megatron.{rest.partition('.')[0]}" in {*_PACKAGES, *MEGATRON})


def _is_ours(module: ModuleType) -> bool:
    return getattr(module, _MARK, False) or module.__name__.partition(".")[0] == "shardwise"


def __getattr__(name: str) -> ModuleType:
    if f"{__name__}.{name}" not in SHORT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
