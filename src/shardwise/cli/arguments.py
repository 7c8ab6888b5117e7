"""The arguments of the commands: read into a dataclass, whose fields are the flags; tyro writes the help."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, cast

import tyro

from shardwise.cli.flags import FlagReader
from shardwise.cli.toml_file import checked_settings, read_toml
from shardwise.errors import ConfigError
from shardwise.training.bounds import (
    DEFAULT_TIMEOUT,
    LOCAL_RANKS,
    RANKS,
    TIMEOUT,
    annotations_of,
    check_values,
)
from shardwise.training.finetune_settings import FinetuneSettings
from shardwise.training.plain_values import with_values
from shardwise.training.settings import RunSettings, Settings

_T = TypeVar("_T")
_Run = TypeVar("_Run", bound="RunArguments")

# Two spaces keep tyro from joining the lines.
_TRAIN_DESCRIPTION = textwrap.indent(
    """\
Train a GPT on your text. Settings come from their defaults, then from the
TOML file of --config (a table for each group: [model] num_layers = 8), then
from flags. On this machine:
  shardwise train --data FOLDER --tp 2
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


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """What every command that starts ranks is told.

    Attributes:
        nproc: ranks to start on this machine; as many as parallel.tp x parallel.pp if not given.
        debug: show stack traces, and the launcher's log.
    """

    nproc: Annotated[int | None, LOCAL_RANKS] = None
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def __post_init__(self) -> None:
        check_values(self, "--")

    @property
    def num_ranks(self) -> int:
        """How many ranks to start if neither the user nor a launcher says."""
        raise NotImplementedError

    def check_world(self, world_size: int) -> None:
        """Raise ConfigError unless the model can be split over ``world_size`` ranks as the arguments say."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SplitArguments(LaunchArguments):
    """What every command is told whose ranks do nothing but split the layers of one model.

    Attributes:
        tp: ranks that split each layer; all that there are if not given.
        pp: pipeline stages; this command has one.
        nproc: ranks to start on this machine; as many as tp if not given.
        timeout: seconds that a rank waits for another, before all end with an error that names it.
    """

    tp: Annotated[int | None, LOCAL_RANKS, tyro.conf.arg(aliases=("--parallel.tp",))] = None
    pp: Annotated[int, RANKS, tyro.conf.arg(aliases=("--parallel.pp",))] = 1
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pp > 1:
            raise ConfigError(f"--pp is {self.pp}, but this command has no pipeline stages; split the layers with --tp")

    @property
    def num_ranks(self) -> int:
        """As many as ``tp`` says."""
        return self.tp or 1

    def check_world(self, world_size: int) -> None:
        """Raise ConfigError unless ``world_size`` ranks are as many as ``tp`` asks for."""
        if self.tp not in (None, world_size):
            raise ConfigError(
                f"--tp {self.tp} is not the number of ranks, {world_size}, all of which split the layers here; leave "
                "--tp or --nproc out"
            )


@dataclass(frozen=True, kw_only=True)
class RunArguments(LaunchArguments):
    """What a command is told that trains.

    Attributes:
        config: TOML file with settings, which flags override.
        settings: the run.
    """

    config: str | None = None
    settings: RunSettings

    @property
    def num_ranks(self) -> int:
        """One for each part of the model."""
        return self.settings.parallel.tp * self.settings.parallel.pp

    def check_world(self, world_size: int) -> None:
        """See ``RunSettings.check_world``."""
        self.settings.check_world(world_size)


@dataclass(frozen=True, kw_only=True)
class TrainArguments(RunArguments):
    """What ``shardwise train`` is told."""

    settings: Annotated[Settings, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class FinetuneArguments(RunArguments):
    """What ``shardwise finetune`` is told."""

    settings: Annotated[FinetuneSettings, tyro.conf.arg(name="")]


def parse_train_arguments(argv: Sequence[str]) -> TrainArguments:
    """Parse the arguments of ``shardwise train``: defaults, then the TOML file of ``--config``, then flags.

    Raises:
        ConfigError: an unknown flag or setting, a value that is missing or of the wrong kind, settings that contradict
            each other; the TOML file cannot be read.
        SystemExit: help was asked for and printed.
    """
    return _parse_run_arguments(TrainArguments, argv, "shardwise train", _TRAIN_DESCRIPTION)


def parse_finetune_arguments(argv: Sequence[str]) -> FinetuneArguments:
    """Parse the arguments of ``shardwise finetune``, as ``parse_train_arguments`` does those of ``train``."""
    return _parse_run_arguments(FinetuneArguments, argv, "shardwise finetune", _FINETUNE_DESCRIPTION)


def _parse_run_arguments(cls: type[_Run], argv: Sequence[str], prog: str, description: str) -> _Run:
    if _asks_for_help(argv):
        _print_help(cls, prog, description)
    values = FlagReader(cls).read(argv)
    path = values.get("config")
    settings_class = annotations_of(cast(Any, cls))["settings"][0]
    table = {} if path is None else checked_settings(settings_class, read_toml(Path(path)), path)
    return with_values(cls, _merged({"settings": table}, values))


def _merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``values`` with those of ``over`` in their place, in the tables likewise."""
    inner = {key: _merged(values.get(key, {}), value) for key, value in over.items() if isinstance(value, dict)}
    return values | over | inner


def parse_command(cls: type[_T], argv: Sequence[str], prog: str) -> _T:
    """Parse the arguments of a command into a dataclass, whose docstring is the help.

    Args:
        cls: a dataclass.
        argv: the arguments after the command's name.
        prog: the command's name, for help.

    Raises:
        ConfigError: an unknown flag, a value that is missing or of the wrong kind, or what the dataclass itself raised.
        SystemExit: help was asked for and printed.
    """
    if _asks_for_help(argv):
        _print_help(cls, prog)
    return with_values(cls, FlagReader(cls).read(argv))


def _asks_for_help(argv: Sequence[str]) -> bool:
    return "-h" in argv or "--help" in argv


def _print_help(cls: type, prog: str, description: str | None = None) -> NoReturn:
    tyro.cli(cls, prog=prog, description=description, args=["--help"], config=(tyro.conf.DisallowNone,))
    raise AssertionError("help ends the program")
