"""Validation of settings against the type and range in their annotations.

::

    num_layers: Annotated[int, Range(1, 10_000)] = 4
    dropout: Annotated[float, Range(0, 1, high_included=False)] = 0.0

Values come from flags, TOML files and the JSON of checkpoints. Therefore types are always checked, and numbers must be
finite. PyTorch is not imported here, so that an invalid setting is reported at once.

Settings are also built here from plain values, such as those of a TOML or JSON file, which override the defaults.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, time
from difflib import get_close_matches
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from shardwise.core.errors import ConfigError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_LONGEST_SHOWN = 60
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


@dataclass(frozen=True)
class Range:
    """The finite numbers from ``low`` to ``high``.

    Attributes:
        low: lower bound.
        high: upper bound.
        low_included: True if ``low`` itself is in the range.
        high_included: True if ``high`` itself is in the range.
    """

    low: float
    high: float
    low_included: bool = True
    high_included: bool = True

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.low_included else value > self.low
        return above and (value <= self.high if self.high_included else value < self.high)

    def __str__(self) -> str:
        low, high = (f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (self.low, self.high))
        if self.low_included and self.high_included:
            return f"from {low} to {high}"
        if not (self.low_included or self.high_included):
            return f"between {low} and {high}"
        return f"at least {low} and under {high}" if self.low_included else f"over {low} and at most {high}"


STEPS = Range(0, 10**9)
"""Range of a number of steps or of an interval in steps; sample numbers then fit into 64 bits."""

RANKS = Range(1, 65_536)
"""Range of the number of ranks along an axis."""

LOCAL_RANKS = Range(1, 1_024)
"""Range of the number of ranks that one machine starts."""

DEFAULT_RANKS_PER_HOST = 8
"""Default number of ranks per machine in a plan."""

SHARE = Range(0, 1)
"""Range of a fraction."""

PROBABILITY = Range(0, 1, high_included=False)
"""Range of a probability, such as dropout's, or of a decay; below 1."""

TIMEOUT = Range(1, 86_400)
"""Range of the time limit for another rank, in seconds."""

DEFAULT_TIMEOUT = 300.0
"""Default time limit for another rank in a step, in seconds."""

SEED = Range(0, 2**63 - 1)
"""Range of a seed."""

TEMPERATURE = Range(0, 1e6)
"""Range of the sampling temperature; 0 takes the most likely token."""

TOP_P = Range(0, 1, low_included=False)
"""Range of the sum of probabilities in top-p sampling."""

PENALTY = Range(0, 1e6, low_included=False)
"""Range of a repetition penalty; 1 is off."""

DIFFERENCE = Range(-1e6, 1e6)
"""Range of a presence penalty; 0 is off."""

TOP_LOG_PROBS = Range(0, 1 << 24)
"""Range of a number of most likely tokens."""

DEFAULT_SEQUENCES = 32
"""Default number of sequences that are generated at once."""

PARTS = Range(1, 1024)
"""Range of the number of parts into which exact runs cut sums."""

DEFAULT_PARTS = 8
"""Default number of parts into which exact runs cut sums."""

FILE_GB = Range(1e-9, 1e9)
"""Range of the maximum size of a weight file, in 1e9 bytes."""

DEFAULT_FILE_GB = 5.0
"""Default maximum size of a weight file, in 1e9 bytes."""

BATCH = Range(1, 10**6)
"""Range of a batch size in samples, texts or windows."""

DEFAULT_BATCH = 8
"""Default batch size in texts or windows."""

NEW_TOKENS = Range(1, 1 << 24)
"""Range of the number of tokens to generate in a plan."""

SEQUENCE = Range(2, 1 << 24)
"""Range of the number of tokens in a sample."""

DEFAULT_SEQUENCE = 512
"""Default number of tokens in a sample, if the model allows it."""


@dataclass(frozen=True)
class Folder:
    """A path. A leading ``~``, which shells leave in ``--out=~/run`` and in files, is the user's home folder."""

    prefix: str = "--"
    lacking: str | None = None


class Checked:
    """Base of frozen dataclasses of settings, which ``check_values`` checks on construction.

    Args:
        prefix: text before a field's name in messages, such as ``model.`` or ``--``; that of the parent class if None.
    """

    _prefix: ClassVar[str] = ""

    def __init_subclass__(cls, prefix: str | None = None) -> None:
        super().__init_subclass__()
        if prefix is not None:
            cls._prefix = prefix

    def __post_init__(self) -> None:
        check_values(self, self._prefix)
        self._check_together()

    def _check_together(self) -> None:
        """Raise ConfigError for values that contradict each other."""

    def changed(self, *names: str) -> list[tuple[str, Any]]:
        """Return the display name and value of each field, of ``names`` or of all, that differs from its default."""
        values = {name: getattr(self, name) for name in names or annotations_of(cast(Any, type(self)))}
        changed = {name: value for name, value in values.items() if value != getattr(type(self), name)}
        return [(f"{self._prefix}{name.replace('_', '-')}", value) for name, value in changed.items()]


def check_values(settings: Any, prefix: str = "") -> None:
    """Check each field of a dataclass by its type, each number by its ``Range``, and resolve each ``Folder``."""
    cls: Any = type(settings)
    for name, (annotation, marks) in annotations_of(cls).items():
        value, shown = getattr(settings, name), name.replace("_", "-")
        check_value(prefix + shown, value, annotation, range_of(marks))
        folder = next((mark for mark in marks if isinstance(mark, Folder)), None)
        if folder is not None and value is not None:
            if not value:
                raise ConfigError(folder.lacking or f"{folder.prefix}{shown} is empty; name a folder")
            object.__setattr__(settings, name, os.path.expanduser(value))


def range_of(marks: Iterable[object]) -> Range | None:
    """Return the range in the ``Annotated`` metadata of a setting, or None."""
    return next((mark for mark in marks if isinstance(mark, Range)), None)


def require(holds: bool, message: str) -> None:
    """Raise ConfigError with ``message`` unless ``holds``."""
    if not holds:
        raise ConfigError(message)


def refuse(message: str, *cases: tuple[object, str]) -> None:
    """Raise ConfigError for the first of ``cases`` that holds, with its text for ``{}`` in ``message``."""
    for applies, text in cases:
        require(not applies, message.format(text))


def check_value(name: str, value: Any, annotation: Any, limits: Range | None = None) -> None:
    """Check a value against the type of its setting and against an optional range."""
    problem = _problem(value, annotation, limits)
    if problem is not None:
        raise ConfigError(f"{name} is {_shown(value)}; it must be {problem}")


def checks_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function to check its arguments with a ``Range`` or a ``Literal``, and those that are bool, first.

    The function raises ConfigError as ``check_value`` does; the message starts with the argument's name.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        hints = get_type_hints(function, include_extras=True)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            kind, *marks = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
            if (limits := range_of(marks)) is not None or get_origin(kind) is Literal or kind in (bool, bool | None):
                check_value(name, value, kind, limits)
        return function(*args, **kwargs)

    return call


@functools.cache
def annotations_of(cls: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the type of each field of a dataclass, and its ``Annotated`` metadata."""
    hints = get_type_hints(cls, include_extras=True)
    split = {name: get_args(hint) if get_origin(hint) is Annotated else (hint,) for name, hint in hints.items()}
    return {field.name: (split[field.name][0], split[field.name][1:]) for field in dataclasses.fields(cls)}


def kind_of(annotation: Any) -> Any:
    """Return the type of a setting, without None."""
    if get_origin(annotation) not in (types.UnionType, Union):
        return annotation
    (kind,) = (argument for argument in get_args(annotation) if argument is not type(None))
    return kind


def _problem(value: Any, annotation: Any, limits: Range | None) -> str | None:
    """Return the requirement that ``value`` violates, or None."""
    kind = kind_of(annotation)
    if kind is not annotation and value is None:
        return None
    annotation = kind
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        # Compare the type too, because True == 1. A value may be unhashable.
        fits = any(type(value) is type(choice) and value == choice for choice in arguments)
        return None if fits else f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple and get_origin(arguments[0]) is Literal:
        choices = get_args(arguments[0])
        fits = isinstance(value, tuple) and all(item in choices for item in value)
        return None if fits else f"a list of some of {', '.join(map(repr, choices))}"
    if origin is tuple:
        fits = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        return None if fits else 'a list of strings, such as ["a.txt", "b"]'
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return None if isinstance(value, annotation) else "a table of settings"
    accepted = (int, float) if annotation is float else annotation
    if not isinstance(value, accepted) or (isinstance(value, bool) and annotation is not bool):
        return _KINDS[annotation]
    if limits is not None and value not in limits:
        return f"{_KINDS[annotation]}, {limits}" if value != value else str(limits)
    return None


def _shown(value: Any) -> str:
    """Format ``value`` for a message as a file has it, truncated if it is long."""
    # Python refuses to write out an integer of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 4 * _LONGEST_SHOWN:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(_shown, value[:_LONGEST_SHOWN]))}]"
    else:
        # TOML has dates and times.
        text = str(value) if isinstance(value, int | float | date | time) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def launcher_number(variable: str, *, least: int = 0) -> int | None:
    """Read a number from an environment variable of the launcher; None if the variable is not set."""
    text = os.environ.get(variable)
    if text is not None and (not re.fullmatch(r"\d{1,9}", text) or int(text) < least):
        raise ConfigError(f"the environment has {variable}={text}, which only a launcher sets, to a number; unset it")
    return None if text is None else int(text)


_T = TypeVar("_T")


def with_values(cls: type[_T], values: Mapping[str, Any], defaults: _T | None = None) -> _T:
    """Build a settings dataclass, in which ``values`` override defaults, also those of nested dataclasses."""
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    any_class: Any = cls
    for field in dataclasses.fields(any_class):
        if not isinstance(table := values.get(field.name), Mapping):
            continue
        inner = None if defaults is None else getattr(defaults, field.name)
        if defaults is None and field.default_factory is not dataclasses.MISSING:
            inner = field.default_factory()
        arguments[field.name] = with_values(annotations_of(any_class)[field.name][0], table, inner)
    made: _T = any_class(**arguments) if defaults is None else dataclasses.replace(cast(Any, defaults), **arguments)
    return made


def checked(
    cls: type, values: Mapping[str, Any], where: str, others: Mapping[str, type] = types.MappingProxyType({})
) -> dict[str, Any]:
    """Check the types of a file's values, and return the values by field name.

    An unknown setting that ``others`` has, the settings of other commands by name, is said to be theirs.

    Ranges and contradictions are checked by the dataclass, because a flag may still override a value.
    """
    known = _types_of(cls), _aliases_of(cls)
    return _checked(values, where, "", *known, {name: _types_of(each) for name, each in others.items()})


def from_keywords(cls: type[_T], values: Mapping[str, Any]) -> _T:
    """Build the settings of a run from keyword arguments, which override the defaults."""
    given = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}
    data = given.get("data")
    if isinstance(data, str):
        given["data"] = (data,)
    elif isinstance(data, Iterable):
        given["data"] = tuple(os.fspath(each) if isinstance(each, os.PathLike) else each for each in data)
    for name, (table, marks) in annotations_of(cast(Any, cls)).items():
        if not dataclasses.is_dataclass(table) or not any(getattr(mark, "name", None) == "" for mark in marks):
            continue
        if own := {field.name: given.pop(field.name) for field in dataclasses.fields(table) if field.name in given}:
            given[name] = {**given.get(name, {}), **own}
    return with_values(cls, checked(cls, given, ""))


def _types_of(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of each setting and each table by dotted name, such as ``model.num_layers``."""
    types: dict[str, Any] = {}
    for name, (annotation, _) in annotations_of(cls).items():
        types[prefix + name] = annotation
        if dataclasses.is_dataclass(annotation):
            types |= _types_of(cast(type, annotation), f"{prefix}{name}.")
    return types


def _aliases_of(cls: type, prefix: str = "") -> dict[str, str]:
    """Return the names of settings by the short names that their flags have, such as ``optimizer.lr``."""
    aliases: dict[str, str] = {}
    for name, (annotation, marks) in annotations_of(cls).items():
        if dataclasses.is_dataclass(annotation):
            aliases |= _aliases_of(cast(type, annotation), f"{prefix}{name}.")
        for alias in (alias for mark in marks for alias in getattr(mark, "aliases", None) or ()):
            aliases[prefix + alias.lstrip("-").replace("-", "_")] = prefix + name
    return aliases


def _checked(
    values: Mapping[str, Any],
    where: str,
    prefix: str,
    known: dict[str, Any],
    aliases: dict[str, str],
    others: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key.replace("-", "_")
        name = name if name in known else aliases.get(name, name)
        last = name.removeprefix(prefix)
        if last in found:
            raise ConfigError(f"{where}{name} is given twice, under two names; leave one of them out")
        if "." in last and name in known:
            table, _, field = name.rpartition(".")
            raise ConfigError(f"{where}{name} is not one key; give the table {table} with the key {field}")
        if name not in known or "." in last:
            raise ConfigError(f"{where}{_unknown(name, known, others)}")
        kind = kind_of(known[name])
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            found[last] = _checked(value, where, f"{name}.", known, aliases, others)
            continue
        if isinstance(value, list) and get_origin(kind) is tuple:
            value = tuple(value)
        check_value(where + name, value, known[name])
        if kind is float and value is not None:
            # A number too large for a float is reported as out of range.
            with contextlib.suppress(OverflowError):
                value = float(value)
        found[last] = value
    return found


def _unknown(name: str, known: Iterable[str], others: Mapping[str, Mapping[str, Any]]) -> str:
    last = name.rpartition(".")[2]
    theirs = [of for of, names in others.items() if last in (each.rpartition(".")[2] for each in names)]
    if len(name) <= _LONGEST_SHOWN:
        if theirs and last not in (each.rpartition(".")[2] for each in known):
            return f"{name} is a setting of shardwise {' and '.join(theirs)}, not of this command; leave it out"
        if close := nearest(name, known):
            return f"unknown setting {name}; did you mean {close}?"
    return f"unknown setting {name if len(name) <= _LONGEST_SHOWN else name[:_LONGEST_SHOWN] + '...'}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to ``name``, or None.

    A name with the same last part comes first (``parallel.tp`` for ``tp``), then a name with these initials
    (``optimizer.lr``) or this beginning (``optimizer.warmup``); those of the profiler, which share words with training,
    come last. If ``name`` has a group, its last part is compared with the names of that group.
    """
    known = list(known)
    group, _, last = name.rpartition(".")
    likely = [each for each in known if not each.startswith("profile.") or group == "profile"]
    for names, wanted in (
        (likely, lambda of: of == last),
        (likely, lambda of: _initials(of) == last),
        (likely, lambda of: of.replace("_", "-").startswith(f"{last}-")),
        (known, lambda of: of == last),
    ):
        if close := get_close_matches(name, [each for each in names if wanted(each.rpartition(".")[2])], 1, 0.0):
            return close[0]
    of_group = {each.removeprefix(f"{group}."): each for each in known if group and each.startswith(f"{group}.")}
    if of_group:
        close = get_close_matches(last, of_group, 1)
        return of_group[close[0]] if close else None
    close = get_close_matches(name, known, 1)
    return close[0] if close else None


def _initials(name: str) -> str:
    words = name.replace("_", "-").split("-")
    return "".join(word[:1] for word in words) if len(words) > 1 else ""
