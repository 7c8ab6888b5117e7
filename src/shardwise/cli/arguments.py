"""The arguments of the commands: tyro reads them into a dataclass, and every mistake in them becomes one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from shardwise.cli.reporting import nearest
from shardwise.cli.toml_file import read_toml, settings_defaults
from shardwise.errors import ConfigError
from shardwise.training.bounds import LOCAL_RANKS, check_values
from shardwise.training.finetune_settings import FinetuneSettings
from shardwise.training.settings import RunSettings, Settings

_T = TypeVar("_T")
_Run = TypeVar("_Run", "TrainArguments", "FinetuneArguments")

# Two spaces keep tyro from joining the lines.
_TRAIN_DESCRIPTION = textwrap.indent(
    """\
Train a GPT on your text. Settings come from their defaults, then from the
TOML file of --config (a table for each group: [model] num_layers = 8), then
from flags. On this machine:
  shardwise train --data FOLDER --parallel.tp 2
On many hosts, where torchrun starts the ranks (leave --nproc out there, which
torchrun takes for a flag of its own unless "--" stands before it):
  torchrun --nnodes 2 --nproc-per-node 8 ... -m shardwise train --data FOLDER
""",
    "  ",
)

_FINETUNE_DESCRIPTION = textwrap.indent(
    """\
Fine-tune a Hugging Face model on your text: all of its weights, or low-rank
adapters (LoRA) beside them. OUT becomes a Hugging Face folder, or an adapter
folder of the peft library. Settings come from their defaults, then from the
TOML file of --config, then from flags:
  shardwise finetune MODEL_DIR --data FOLDER --out OUT --tp 2
  shardwise finetune MODEL_DIR --data FOLDER --out OUT --tp 2 --lora-rank 8
""",
    "  ",
)

_LONGEST_MESSAGE = 300
_TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")
_PLAINER = (
    (r"Missing value for argument '(\S+)'\. Expected .*", r"\1 needs a value"),
    (r"invalid choice ('.*') for argument '(\S+)'\. Expected one of \((.*)\)\.", r"\2 is \1; it must be one of \3"),
    (r"(\S+): Exceeds the limit .*", r"\1 is too large an integer"),
    (r"(\S+): invalid literal for int\(\) with base 10: (.*)", r"\1 is \2; it must be an integer"),
    (r"(\S+): no type matching INT could be instantiated from \[(.*)\]\.", r"\1 is \2; it must be an integer"),
    (r"(\S+): could not convert string to float: (.*)", r"\1 is \2; it must be a number"),
    (r"Unrecognized options: (.*)", r"no flag takes \1"),
)
"""What tyro says, as the other messages would say it."""


@dataclass(frozen=True)
class TrainArguments:
    """What ``shardwise train`` is told.

    Attributes:
        settings: the training run.
        config: TOML file with settings, which flags override.
        nproc: ranks to start on this machine; as many as parallel.tp x parallel.pp if not given.
        debug: show stack traces, and the launcher's log.
    """

    settings: Annotated[Settings, tyro.conf.arg(name="")]
    config: str | None = None
    nproc: Annotated[int | None, LOCAL_RANKS] = None
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def __post_init__(self) -> None:
        check_values(self, "--")


@dataclass(frozen=True)
class FinetuneArguments:
    """What ``shardwise finetune`` is told.

    Attributes:
        settings: the fine-tuning run.
        config: TOML file with settings, which flags override.
        nproc: ranks to start on this machine; as many as tp x pp if not given.
        debug: show stack traces, and the launcher's log.
    """

    settings: Annotated[FinetuneSettings, tyro.conf.arg(name="")]
    config: str | None = None
    nproc: Annotated[int | None, LOCAL_RANKS] = None
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def __post_init__(self) -> None:
        check_values(self, "--")


def parse_train_arguments(argv: Sequence[str]) -> TrainArguments:
    """Parse the arguments of ``shardwise train``: see ``_parse_run_arguments``."""
    return _parse_run_arguments(TrainArguments, Settings, argv, "shardwise train", _TRAIN_DESCRIPTION)


def parse_finetune_arguments(argv: Sequence[str]) -> FinetuneArguments:
    """Parse the arguments of ``shardwise finetune``: see ``_parse_run_arguments``.

    What ``train`` calls ``--parallel.tp`` is called ``--tp`` here; both are understood.
    """
    argv = [re.sub(r"^--parallel\.", "--", token) for token in argv]
    return _parse_run_arguments(FinetuneArguments, FinetuneSettings, argv, "shardwise finetune", _FINETUNE_DESCRIPTION)


def _parse_run_arguments(
    cls: type[_Run], settings_class: type[RunSettings], argv: Sequence[str], prog: str, description: str
) -> _Run:
    """Parse the arguments of a run: defaults, then the TOML file of ``--config``, then flags.

    Raises:
        ConfigError: an unknown flag or setting, a value that is missing or of the wrong kind, settings that contradict
            each other.
        OSError: the TOML file cannot be read.
        SystemExit: help was asked for and printed.
    """
    config = None if _asks_for_help(argv) else _value_of("--config", argv)
    values = {} if config is None else read_toml(Path(config))
    # Validated when tyro makes them anew: what contradicts itself in the file may be mended by a flag. The class is the
    # one that the arguments' own field is of, which mypy does not see.
    defaults = cls(settings_defaults(settings_class, values, config))  # type: ignore[arg-type]
    return parse_command(cls, argv, prog, description=description, default=defaults)


def parse_command(
    cls: type[_T], argv: Sequence[str], prog: str, *, description: str | None = None, default: _T | None = None
) -> _T:
    """Parse the arguments of a command into a dataclass, whose docstring's Attributes are the help.

    Args:
        cls: a dataclass.
        argv: the arguments after the command's name.
        prog: the command's name, for help.
        description: what help begins with; the docstring's text if None.
        default: an instance with the default values; those of the class if None.

    Raises:
        ConfigError: an unknown flag, a value that is missing or of the wrong kind, or what the dataclass itself raised.
        SystemExit: help was asked for and printed.
    """
    if not _asks_for_help(argv):
        _check_flags(cls, argv)
    options: dict[str, Any] = {} if default is None else {"default": default}
    boxes = io.StringIO()
    try:
        with contextlib.redirect_stderr(boxes):
            parsed: _T = tyro.cli(
                cls, prog=prog, description=description, args=argv, config=(tyro.conf.DisallowNone,), **options
            )
            return parsed
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise _one_line(end, boxes.getvalue()) from None


def _asks_for_help(argv: Sequence[str]) -> bool:
    return "-h" in argv or "--help" in argv


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The value of ``--flag VALUE`` or ``--flag=VALUE``, the last one given."""
    value = None
    for token, following in zip_longest(argv, argv[1:]):
        if token == flag:
            value = following
        elif token.startswith(f"{flag}="):
            value = token.partition("=")[2]
    return value


def _flag_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """The type of each flag of a dataclass, by name; a switch has a negation too."""
    flags: dict[str, Any] = {}
    for name, annotation in get_type_hints(cls, include_extras=True).items():
        marks: list[Any] = []
        if get_origin(annotation) is Annotated:
            annotation, *marks = get_args(annotation)
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            unnamed = any(getattr(mark, "name", None) == "" for mark in marks)
            flags |= _flag_types(annotation, prefix if unnamed else f"{prefix}{name}.")
        else:
            flags[f"--{prefix}{name}".replace("_", "-")] = annotation
            if annotation is bool and tyro.conf.FlagCreatePairsOff not in marks:
                flags[f"--{prefix}no-{name}".replace("_", "-")] = bool
    return flags


def _check_flags(cls: type, argv: Sequence[str]) -> None:
    """Check the names of the flags, before the lack of a flag that is misspelt makes another error.

    Raises:
        ConfigError: an unknown flag, a value after a switch, or a flag with many values given twice.
    """
    types = _flag_types(cls)
    seen = set()
    for token, following in zip_longest(argv, argv[1:]):
        if token == "--":
            break
        if not token.startswith("--") or token.startswith("--tyro-"):
            continue
        name, equals, value = token.partition("=")
        name = name.replace("_", "-")
        if name not in types:
            close = nearest(name.removeprefix("--"), [known.removeprefix("--") for known in types])
            if close is None and name in ("--tp", "--parallel.tp") and "--nproc" in types:
                # Commands whose ranks do nothing but split the model.
                close = "nproc"
            hint = f"; did you mean --{close}?" if close else "; see --help"
            raise ConfigError(f"unknown flag {name}{hint}")
        if types[name] is bool and (equals or str(following).lower() in _TRUTH_VALUES):
            group, dot, last = name.removeprefix("--").rpartition(".")
            negation = f"--{group}{dot}no-{last}"
            hint = f"; write {name} or {negation}" if negation in types else ""
            raise ConfigError(f"{name} takes no value, got {value if equals else following!r}{hint}")
        if get_origin(types[name]) is tuple and name in seen:
            raise ConfigError(f"{name} is given twice; write all its values after one {name}")
        seen.add(name)


def _one_line(end: SystemExit, boxes: str) -> ConfigError:
    """The error that made tyro exit: what a dataclass raised if one did, else the text in the box that it drew."""
    error: BaseException | None = end
    while error is not None:
        if isinstance(error, ConfigError):
            return error
        error = error.__context__
    # Under the title, the message goes up to the first rule.
    text = ""
    for line in boxes.splitlines()[1:]:
        inside = line.strip("│╭╮╰╯─ ")
        if not inside:
            break
        text += f" {inside}"
    text = text.strip().removeprefix("Error parsing ")
    for theirs, ours in _PLAINER:
        text = re.sub(f"^{theirs}$", ours, text)
    if len(text) > _LONGEST_MESSAGE:
        text = text[:_LONGEST_MESSAGE] + "..."
    return ConfigError(text or "wrong arguments; see --help")
