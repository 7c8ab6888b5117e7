"""Checks of settings: their kind, and the range of a number, both declared by the type.

::

    num_layers: Annotated[int, Range(1, 10_000)] = 4
    dropout: Annotated[float, Range(0, 1, high_included=False)] = 0.0

Values come from flags, TOML files and the JSON of checkpoints, so nothing is taken for granted: neither the kind, nor
that a number is finite. PyTorch is not imported here, so that a wrong setting is refused at once.

Settings from plain values, such as those of a TOML or JSON file, over their defaults.
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
    """The numbers from ``low`` to ``high``; neither infinities nor NaN.

    Attributes:
        low: the least.
        high: the largest.
        low_included: whether ``low`` itself is one of them.
        high_included: whether ``high`` itself is one of them.
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
"""Of a number of steps, or between two things; the number of samples drawn then stays within 64 bits."""

RANKS = Range(1, 65_536)
"""Of ranks along an axis."""

LOCAL_RANKS = Range(1, 1_024)
"""Of ranks that one machine starts."""

DEFAULT_RANKS_PER_HOST = 8
"""Ranks of one machine in a plan, if not told otherwise."""

SHARE = Range(0, 1)
"""Of a share of something."""

PROBABILITY = Range(0, 1, high_included=False)
"""Of the probability of dropping an element: not all of them."""

TIMEOUT = Range(1, 86_400)
"""Of the seconds that a rank waits for another."""

DEFAULT_TIMEOUT = 300.0
"""Seconds that a rank waits for another in a step, if not told otherwise."""

SEED = Range(0, 2**63 - 1)
"""Of a seed."""

TEMPERATURE = Range(0, 1e6)
"""Of the temperature of sampling; 0 takes the likeliest token."""

TOP_P = Range(0, 1, low_included=False)
"""Of the sum of probabilities in top-p sampling."""

FILE_GB = Range(1e-9, 1e9)
"""Of the largest file of weights, in 1e9 bytes."""

DEFAULT_FILE_GB = 5.0
"""The largest file of weights, in 1e9 bytes, if not told otherwise."""

BATCH = Range(1, 10**6)
"""Of samples, texts or windows that a model reads at once or in a step."""

DEFAULT_BATCH = 8
"""Texts or windows that a model reads at once, if not told otherwise."""

SEQUENCE = Range(2, 1 << 24)
"""Of tokens in a sample."""

DEFAULT_SEQUENCE = 512
"""Tokens of a sample of a model that takes as many, if not told otherwise."""


@dataclass(frozen=True)
class Folder:
    """A path. The user's home folder stands for a leading ``~``: in ``--out=~/run`` and in files shells leave it.

    Attributes:
        prefix: what stands before the setting's name in messages.
        lacking: what is said of an empty one.
    """

    prefix: str = "--"
    lacking: str | None = None


class Checked:
    """A frozen dataclass of settings that ``check_values`` checks when it is made.

    Args:
        prefix: what stands before a field's name in messages, such as ``model.`` or ``--``; as in the parent's if None.
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
        """Fields that are not at their default, of ``names`` or of all: each as messages name it, and its value."""
        values = {name: getattr(self, name) for name in names or annotations_of(cast(Any, type(self)))}
        changed = {name: value for name, value in values.items() if value != getattr(type(self), name)}
        return [(f"{self._prefix}{name.replace('_', '-')}", value) for name, value in changed.items()]


def check_values(settings: Any, prefix: str = "") -> None:
    """Check each field of a dataclass against its type, each number against its ``Range``, and resolve each ``Folder``.

    Args:
        settings: an instance, as its ``__post_init__`` finds it; its folders are modified. Fields that are dataclasses
            themselves have checked their own values.
        prefix: as for ``Checked``.

    Raises:
        ConfigError: a value of another kind or out of range, or an empty path; the message names the setting, the value
            and the range.
    """
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
    """The range among what ``Annotated`` says of a setting."""
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
    """Check a value against the type of its setting, and against a range if one is given.

    Raises:
        ConfigError: it is of another kind or out of range; the message begins with ``name``.
    """
    problem = _problem(value, annotation, limits)
    if problem is not None:
        raise ConfigError(f"{name} is {_shown(value)}; it must be {problem}")


def checks_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that checks those of its arguments that have a ``Range`` or a ``Literal`` before it does anything.

    It raises ConfigError as ``check_value`` does; the message begins with the argument's name.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        hints = get_type_hints(function, include_extras=True)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            kind, *marks = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
            if (limits := range_of(marks)) is not None or get_origin(kind) is Literal:
                check_value(name, value, kind, limits)
        return function(*args, **kwargs)

    return call


@functools.cache
def annotations_of(cls: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The type of each field of a dataclass, and the marks of ``Annotated``."""
    hints = get_type_hints(cls, include_extras=True)
    split = {name: get_args(hint) if get_origin(hint) is Annotated else (hint,) for name, hint in hints.items()}
    return {field.name: (split[field.name][0], split[field.name][1:]) for field in dataclasses.fields(cls)}


def kind_of(annotation: Any) -> Any:
    """The type of a setting's values other than None."""
    if get_origin(annotation) not in (types.UnionType, Union):
        return annotation
    (kind,) = (argument for argument in get_args(annotation) if argument is not type(None))
    return kind


def _problem(value: Any, annotation: Any, limits: Range | None) -> str | None:
    """The requirement that ``value`` breaks; None if it is valid."""
    kind = kind_of(annotation)
    if kind is not annotation and value is None:
        return None
    annotation = kind
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        # Of the same type too, as True is 1. A value may be unhashable.
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
    """``value`` for a message, cut if it is long."""
    # Python refuses to write out an integer of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 4 * _LONGEST_SHOWN:
        return f"an integer of {value.bit_length()} bits"
    # As a file has it, which has no tuples.
    value = list(value) if isinstance(value, tuple) else value
    text = str(value) if isinstance(value, int | float) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def launcher_number(variable: str, *, least: int = 0) -> int | None:
    """The number in an environment variable that a launcher sets; None if it is not set.

    Raises:
        ConfigError: it is no number, or less than ``least``.
    """
    text = os.environ.get(variable)
    if text is not None and (not re.fullmatch(r"\d{1,9}", text) or int(text) < least):
        raise ConfigError(f"the environment has {variable}={text}, which only a launcher sets, to a number; unset it")
    return None if text is None else int(text)


_T = TypeVar("_T")


def with_values(cls: type[_T], values: Mapping[str, Any], defaults: _T | None = None) -> _T:
    """A settings dataclass with ``values`` over its defaults, also in the dataclasses within it.

    Args:
        cls: the dataclass.
        values: by the fields' names; those of a dataclass in it as a mapping, those of a tuple as a list if need be.
        defaults: an instance with the default values; those of the class if None.

    Raises:
        ConfigError: what the dataclasses refuse when they are made.
    """
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


def checked(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a file by the fields' names, each of its setting's type.

    Ranges, and whether settings contradict each other, are for the dataclass to check: a flag may mend it.

    Args:
        cls: the settings' dataclass; its fields may be dataclasses too.
        values: from TOML or JSON; hyphens in names are taken for underscores.
        where: what stands before names in messages, such as ``run.toml: ``.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type.
    """
    return _checked(values, where, "", _types_of(cls))


def from_keywords(cls: type[_T], values: Mapping[str, Any]) -> _T:
    """The settings of a run from keyword arguments, over their defaults.

    Args:
        cls: the settings' dataclass, with a field ``data`` of paths.
        values: by the fields' names; those of a table as a mapping, or by themselves where their flags have no prefix.
            Paths may be path objects, and one path may stand for a list of one in ``data``.

    Raises:
        ConfigError: an unknown name, a value of the wrong type or out of range, or settings that contradict each other.
    """
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
    """The type of each setting by its dotted name, such as ``model.num_layers``; of each table by its name too."""
    types: dict[str, Any] = {}
    for name, (annotation, _) in annotations_of(cls).items():
        types[prefix + name] = annotation
        if dataclasses.is_dataclass(annotation):
            types |= _types_of(cast(type, annotation), f"{prefix}{name}.")
    return types


def _checked(values: Mapping[str, Any], where: str, prefix: str, known: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        last = key.replace("-", "_")
        name = prefix + last
        if name not in known or "." in last:
            close = nearest(name, known)
            raise ConfigError(f"{where}unknown setting {name}{f'; did you mean {close}?' if close else ''}")
        kind = kind_of(known[name])
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            found[last] = _checked(value, where, f"{name}.", known)
            continue
        if isinstance(value, list) and get_origin(kind) is tuple:
            value = tuple(value)
        check_value(where + name, value, known[name])
        if kind is float and value is not None:
            # A number that is too large for a float is refused as out of range.
            with contextlib.suppress(OverflowError):
                value = float(value)
        found[last] = value
    return found


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` was most likely meant to be, or None.

    ``tp`` finds ``parallel.tp``: a name whose last part is the same comes first, then one whose initials they are
    (``optimizer.lr``). The last part of a name with a group is compared with those of the group.
    """
    known = list(known)
    group, _, last = name.rpartition(".")
    for wanted in (lambda of: of == last, lambda of: _initials(of) == last):
        if close := get_close_matches(name, [each for each in known if wanted(each.rpartition(".")[2])], 1, 0.0):
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
