"""Regular expressions of adapters' settings, which strangers write, matched in a bounded number of steps.

Python's matcher tries one way to match after the other, which takes exponential time for some expressions. ``matches``
finds all ends of each part at each position, once. Characters and anchors are left to Python, so the answers are those
of ``re``.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from shardwise.core.errors import ConfigError

# Python's own parser and compiler have no declared types.
_parser: Any = re._parser  # type: ignore[attr-defined]
_compiler: Any = re._compiler  # type: ignore[attr-defined]

_LONGEST = 10_000
_MOST_STEPS = 50_000
# An expression without these signs matches in at most one way.
_AMBIGUOUS = re.compile(r"[*+?{|(]")
_SINGLE = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT")

# A compiled run of characters and anchors; or the name of an operation with its operands.
_Part = Any
_Parts = tuple[_Part, ...]
_Places = set[int]


def check_pattern(pattern: str) -> None:
    """Raise ConfigError if ``pattern`` is no regular expression, or not one that ``matches`` accepts."""
    if len(pattern) > _LONGEST:
        raise ConfigError(f"{pattern!r:.80} has {len(pattern):,} characters; it must have at most {_LONGEST:,}")
    try:
        _parsed(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{pattern!r:.80} is no regular expression: {error}") from error


@lru_cache(maxsize=1 << 16)
def matches(pattern: str, text: str, field: str, *, at_end: bool = False) -> bool:
    """Return whether ``re.fullmatch(pattern, text)`` finds a match.

    Args:
        pattern: a regular expression that ``check_pattern`` accepts.
        text: path of a module.
        field: name of the setting, for the error.
        at_end: whether the pattern may also match only the end of the path, after a dot.

    Raises:
        ConfigError: matching takes too many steps.
    """
    whole = rf"(.*\.)?({pattern})" if at_end else pattern
    if _AMBIGUOUS.search(pattern) is None:
        return re.fullmatch(whole, text) is not None
    try:
        return len(text) in _Matcher(text).ends(_parsed(whole), {0})
    except (_TooManyStepsError, RecursionError):
        raise ConfigError(
            f"{field}: the regular expression {pattern!r:.80} takes more than {_MOST_STEPS:,} steps for {text!r:.80}; "
            "write a simpler one"
        ) from None


@lru_cache(maxsize=1 << 10)
def _parsed(pattern: str) -> _Parts:
    tree = _parser.parse(pattern)
    return _parts_of(tree, tree.state.flags, tree.state)


def _parts_of(items: Iterable[tuple[Any, Any]], flags: int, state: Any) -> _Parts:
    parts: list[_Part] = []
    run: list[Any] = []
    for item in [*items, None]:
        if item is not None and str(item[0]) in _SINGLE:
            run.append(item)
            continue
        if run:
            parts.append(_compiler.compile(_parser.SubPattern(state, run), flags))
            run = []
        if item is not None:
            parts.append(_part_of(str(item[0]), item[1], flags, state))
    return tuple(parts)


def _part_of(name: str, value: Any, flags: int, state: Any) -> _Part:
    if name == "BRANCH":
        return "BRANCH", tuple(_parts_of(each, flags, state) for each in value[1])
    if name == "SUBPATTERN":
        _, added, removed, inner = value
        return "BRANCH", (_parts_of(inner, (flags | added) & ~removed, state),)
    if name in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, inner = value
        return "REPEAT", int(least), int(most), _parts_of(inner, flags, state)
    if name in ("ASSERT", "ASSERT_NOT"):
        direction, inner = value
        return name, 0 if direction > 0 else inner.getwidth()[0], _parts_of(inner, flags, state)
    if name == "FAILURE":
        return "BRANCH", ()
    raise re.error("it refers to a group, or has a possessive or atomic part, which is not supported")


class _TooManyStepsError(Exception):
    pass


class _Matcher:
    """Finds where matches in one text can end."""

    def __init__(self, text: str) -> None:
        self._text, self._steps = text, 0
        self._known: dict[tuple[int, int], _Places] = {}

    def ends(self, parts: _Parts, places: _Places) -> _Places:
        """Return the ends of all matches of the parts, one after the other, that begin at one of ``places``."""
        for part in parts:
            ends: set[int] = set()
            for place in places:
                self._steps += 1
                if self._steps > _MOST_STEPS:
                    raise _TooManyStepsError
                key = id(part), place
                if key not in self._known:
                    self._known[key] = self._found(part, place)
                ends |= self._known[key]
            places = ends
        return places

    def _found(self, part: _Part, start: int) -> _Places:
        if isinstance(part, re.Pattern):
            found = part.match(self._text, start)
            return set() if found is None else {found.end()}
        if part[0] == "BRANCH":
            return set().union(*(self.ends(each, {start}) for each in part[1]))
        if part[0] == "REPEAT":
            return self._repeated(part[1], part[2], part[3], start)
        name, width, inner = part
        # Behind a position, Python looks only as far as the width, which is fixed.
        ends = self.ends(inner, {start - width}) if start >= width else set()
        holds = start in ends if width else bool(ends)
        return {start} if holds is (name == "ASSERT") else set()

    def _repeated(self, least: int, most: int, inner: _Parts, start: int) -> _Places:
        # More rounds than there are characters change nothing, since the further ones take no character.
        rounds = len(self._text) + 1
        found = {start}
        for _ in range(min(least, rounds)):
            found = self.ends(inner, found)
        new = found = set(found)
        for _ in range(min(most - least, rounds)):
            new = self.ends(inner, new) - found
            if not new:
                break
            found |= new
        return found
