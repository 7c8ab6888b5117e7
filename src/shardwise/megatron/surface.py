"""Helpers that collect names and arguments of the door, which otherwise would be listed twice."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any


def given(scope: Mapping[str, Any], *, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a function's arguments by name, to pass them on.

    Args:
        scope: ``locals()`` of the function, evaluated first in its body.
        but: names to leave out, besides ``self``.
    """
    return {name: value for name, value in scope.items() if name not in ("self", "__class__", *but)}


def offer(namespace: dict[str, Any], *others: str | ModuleType) -> None:
    """Set a module's ``__all__`` to its public functions and classes, and ``others``.

    Type checkers infer the same names for a module without ``__all__``.

    Args:
        namespace: ``globals()`` of the module, in its last line.
        others: names of imports and of other objects, separated by spaces; or a module, for all names in its
            ``__all__``.
    """
    names = {name for name, value in namespace.items() if getattr(value, "__module__", "") == namespace["__name__"]}
    for other in others:
        names |= {*other.split()} if isinstance(other, str) else {*other.__all__}
    namespace["__all__"] = sorted(name for name in names if not name.startswith("_"))
