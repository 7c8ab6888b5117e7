"""The flags of a dataclass: read from a command line, in one pass, with one line for each mistake."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_origin

import tyro

from shardwise.core.errors import ConfigError
from shardwise.training.bounds import annotations_of, check_value, kind_of
from shardwise.training.plain_values import nearest

_TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")


@dataclass(frozen=True)
class _Argument:
    """A flag, or an argument without one.

    Attributes:
        path: the fields that lead to its value, the last one its own.
        annotation: the field's type.
        required: it has no default.
        sets: the value that a switch stands for.
        negation: the switch for the other one.
    """

    path: tuple[str, ...]
    annotation: Any
    required: bool
    sets: bool | None = None
    negation: str | None = None


@dataclass(frozen=True)
class FlagReader:
    """Reads the flags and arguments of a dataclass, and of those in it, named as tyro's help shows them.

    What ``tyro.conf`` says beside the type of a field holds: ``Positional``, ``FlagCreatePairsOff``, and of ``arg``
    ``name=""`` (the flags of a dataclass have no prefix), ``metavar`` and ``aliases``. An ``_`` may stand for a ``-``.

    Attributes:
        cls: the dataclass.
        flags: by name, such as ``--model.num-layers``.
        positional: those without a flag by what help calls them, in their order.
    """

    cls: type
    flags: dict[str, _Argument] = field(default_factory=dict)
    positional: dict[str, _Argument] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._add(self.cls, "", ())

    def _add(self, cls: Any, prefix: str, path: tuple[str, ...]) -> None:
        for each in dataclasses.fields(cls):
            annotation, marks = annotations_of(cls)[each.name]
            own = (*path, each.name)
            shown: Any = next((mark for mark in marks if hasattr(mark, "aliases")), tyro.conf.arg())
            if dataclasses.is_dataclass(annotation):
                self._add(annotation, prefix if shown.name == "" else f"{prefix}{each.name}.", own)
                continue
            required = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
            argument = _Argument(own, annotation, required)
            if tyro.conf.Positional in marks:
                self.positional[shown.metavar] = argument
                continue
            for name in (f"--{prefix}{each.name}", *(shown.aliases or ())):
                name = name.replace("_", "-")
                if annotation is not bool:
                    self.flags[name] = argument
                    continue
                group, dot, last = name.removeprefix("--").rpartition(".")
                no = None if tyro.conf.FlagCreatePairsOff in marks else f"--{group}{dot}no-{last}"
                self.flags[name] = dataclasses.replace(argument, sets=True, negation=no)
                if no is not None:
                    self.flags[no] = dataclasses.replace(argument, sets=False)

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """The values that are given, by the fields' names, those of a dataclass' fields as a dict of their own.

        Raises:
            ConfigError: an unknown flag, a value that is missing, of the wrong kind or after a switch, a flag with many
                values that is given twice, an argument that no flag takes or that is missing.
        """
        found: dict[tuple[str, ...], Any] = {}
        words, waiting = deque(argv), deque(self.positional.items())
        only_positional = False
        while words:
            word = words.popleft()
            if word == "--" and not only_positional:
                only_positional = True
            elif word.startswith("-") and not only_positional:
                self._read_flag(word, words, found)
            elif waiting:
                name, argument = waiting.popleft()
                found[argument.path] = _value_of(name, argument.annotation, word)
            else:
                raise ConfigError(f"no flag takes {word}")
        for name, argument in (self.positional | self.flags).items():
            if argument.required and argument.path not in found:
                raise ConfigError(f"{name} is missing; see --help")
        values: dict[str, Any] = {}
        for path, value in found.items():
            table = values
            for part in path[:-1]:
                table = table.setdefault(part, {})
            table[path[-1]] = value
        return values

    def _read_flag(self, word: str, words: deque[str], found: dict[tuple[str, ...], Any]) -> None:
        """Read the flag ``word``, and from ``words`` what belongs to it."""
        name, equals, text = word.partition("=")
        name = name.replace("_", "-")
        flag = self.flags.get(name)
        if flag is None:
            close = nearest(name.lstrip("-"), [known.removeprefix("--") for known in self.flags])
            raise ConfigError(f"unknown flag {name}" + (f"; did you mean --{close}?" if close else "; see --help"))
        if flag.annotation is bool:
            if equals or (words and words[0].lower() in _TRUTH_VALUES):
                hint = f"; write {name} or {flag.negation}" if flag.negation else ""
                raise ConfigError(f"{name} takes no value, got {text if equals else words[0]!r}{hint}")
            found[flag.path] = flag.sets
        elif get_origin(flag.annotation) is tuple:
            if flag.path in found:
                raise ConfigError(f"{name} is given twice; write all its values after one {name}")
            texts = [text] if equals else []
            while words and not words[0].startswith("--"):
                texts.append(words.popleft())
            found[flag.path] = tuple(texts)
        else:
            if not equals:
                if not words or words[0].startswith("--"):
                    raise ConfigError(f"{name} needs a value")
                text = words.popleft()
            found[flag.path] = _value_of(name, flag.annotation, text)


def _value_of(name: str, annotation: Any, text: str) -> Any:
    """The value that ``text`` stands for."""
    value: Any = text
    kind = kind_of(annotation)
    if kind in (int, float):
        try:
            value = cast(Any, kind)(text)
        except ValueError as error:
            # Python reads integers of a few thousand digits at most.
            if text.lstrip("+-").isdecimal():
                raise ConfigError(f"{name} is too large an integer") from error
    check_value(name, value, annotation)
    return value
