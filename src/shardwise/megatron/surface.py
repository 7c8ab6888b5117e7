"""Names and arguments of the door that would otherwise be listed twice."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any


def given(scope: Mapping[str, Any], *, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments of a function that hands them on, by name.

    Args:
        scope: ``locals()`` of the function, as its first expression.
        but: names that are left out, besides ``self``.
    """
    return {name: value for name, value in scope.items() if name not in ("self", "__class__", *but)}


def offer(namespace: dict[str, Any], *others: str | ModuleType) -> None:
    """Set a module's ``__all__``: its own functions and classes without an underscore, and ``others``.

    Type checkers take a module without ``__all__`` to offer the same names.

    Args:
        namespace: ``globals()`` of the module, in its last line.
        others: names that the module imports, or that are neither functions nor classes, with spaces between them; or
            a module, for all names that it offers.
    """
    names = {name for name, value in namespace.items() if getattr(value, "__module__", "") == namespace["__name__"]}
    for other in others:
        names |= {*other.split()} if isinstance(other, str) else {*other.__all__}
    namespace["__all__"] = sorted(name for name in names if not name.startswith("_"))
