"""A case of the catalogue, and the decorator that adds one."""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups

Body = Callable[[Any, Groups], None]
"""A case's body: takes the target and this rank's process groups, and raises AssertionError for a difference."""


@dataclass(frozen=True)
class Case:
    """One known bug, or class of bugs, as a comparison with the dense computation.

    Attributes:
        name: ``theme/function``, the name of the file and of the function.
        summary: what must hold, in one line.
        report: project and number of the public report, or the project and "class of bug".
        needs: names that a target must offer, such as ``"uneven"``, or with a function's argument
            ``"row_linear.skip_bias_add"``; otherwise the case does not apply to it.
        tp, pp, dp, cp, ep, etp: sizes of the axes; tp, pp, dp and cp multiply to the number of ranks.
    """

    name: str
    summary: str
    report: str
    needs: tuple[str, ...]
    function: Body
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    seconds: float = 60.0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def theme(self) -> str:
        """First part of the name."""
        return self.name.partition("/")[0]


_CASES: dict[str, Case] = {}


def case(
    report: str,
    *needs: str,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    seconds: float = 60.0,
) -> Callable[[Body], Body]:
    """Add the decorated function to the catalogue; the first line of its docstring is the summary."""

    def add(function: Body) -> Body:
        theme = function.__module__.rpartition(".")[2].removesuffix("_cases")
        summary = (function.__doc__ or "").strip().partition("\n")[0]
        name = f"{theme}/{function.__name__}"
        _CASES[name] = Case(name, summary, report, needs, function, tp, pp, dp, cp, ep, etp, seconds)
        return function

    return add


def all_cases() -> list[Case]:
    """Return every case, by theme and in the order of the files."""
    package = importlib.import_module("shardwise.conformance.cases")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return sorted(_CASES.values(), key=lambda each: each.theme)


def cases_like(pattern: str | Sequence[str] | None) -> list[Case]:
    """Return the cases whose name matches a pattern of the shell or contains it; all if None."""
    every = all_cases()
    if pattern is None:
        return every
    chosen: set[str] = set()
    for one in [pattern] if isinstance(pattern, str) else pattern:
        found = {each.name for each in every if fnmatchcase(each.name, one) or one in each.name}
        if not found:
            themes = ", ".join(dict.fromkeys(each.theme for each in every))
            raise ConfigError(f"no case matches {one!r}; the themes are {themes}, and --list shows every case")
        chosen |= found
    return [each for each in every if each.name in chosen]
