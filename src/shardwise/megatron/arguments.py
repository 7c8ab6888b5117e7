"""The arguments of a function that hands them on, without a second list of them."""

from collections.abc import Mapping
from typing import Any


def given(scope: Mapping[str, Any], *, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments by name.

    Args:
        scope: ``locals()`` of the function, as its first expression.
        but: names that are left out, besides ``self``.
    """
    return {name: value for name, value in scope.items() if name not in ("self", "__class__", *but)}
