"""The arguments of the commands: read into a dataclass, whose fields are the flags; tyro writes the help."""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, cast

import tyro

from shardwise.cli.flags import FlagReader, read_toml
from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.folder_lock import check_free
from shardwise.run.processes.stopping import way_on
from shardwise.run.settings import RunSettings
from shardwise.training.bounds import (
    DEFAULT_TIMEOUT,
    LOCAL_RANKS,
    RANKS,
    TIMEOUT,
    Checked,
    annotations_of,
    checked,
    with_values,
)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Arguments(Checked, prefix="--"):
    """What every command is told, and what it does.

    Attributes:
        debug: show stack traces, and the launcher's log.
        lasts: it goes on when nobody reads what it prints.
    """

    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    lasts: ClassVar[bool] = False

    def work(self) -> Callable[[], object]:
        """What the command is for, to be called on one rank. Imported only here, because PyTorch takes seconds."""
        raise NotImplementedError

    def way_on(self) -> str:
        """How the command can go on after it ended early; nothing if there is nothing to say."""
        return ""


@dataclass(frozen=True, kw_only=True)
class LaunchArguments(Arguments):
    """What every command that starts ranks is told.

    Attributes:
        nproc: ranks to start on this machine; as many as parallel.tp x parallel.pp if not given.
    """

    nproc: Annotated[int | None, LOCAL_RANKS] = None

    @property
    def num_ranks(self) -> int:
        """How many ranks to start if neither the user nor a launcher says."""
        raise NotImplementedError

    def check_world(self, world_size: int) -> None:
        """Raise ConfigError unless the model can be split over ``world_size`` ranks as the arguments say."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise what is wrong with the rest, as far as it is found in no time; not called in a rank of several."""

    def prepare(self, world_size: int) -> None:
        """Raise what a rank of ``world_size`` would; called before they are started, and imports PyTorch as they do."""


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

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the function of ``shardwise.run`` that does the work: all but those of a launch."""
        names = {field.name for field in dataclasses.fields(self)} - {"debug", "nproc", "tp", "pp"}
        return {name: getattr(self, name) for name in names}

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
class SettingsArguments(Arguments):
    """What a command is told that has the settings of a run.

    Attributes:
        config: TOML file with settings, which flags override.
        settings: the run.
    """

    config: str | None = None
    settings: RunSettings


@dataclass(frozen=True, kw_only=True)
class RunArguments(SettingsArguments, LaunchArguments):
    """What a command is told that trains."""

    lasts: ClassVar[bool] = True

    @property
    def num_ranks(self) -> int:
        """One for each part of the model."""
        return self.settings.parallel.tp * self.settings.parallel.pp

    def check_world(self, world_size: int) -> None:
        """See ``RunSettings.check_world``."""
        self.settings.check_world(world_size)

    def check(self) -> None:
        """Raise ConfigError if another run is in the folder, or it cannot be written to."""
        check_free(Path(self.settings.out))

    def way_on(self) -> str:
        """From the newest checkpoint, if there is one."""
        folder = Path(self.settings.out) / "checkpoints"
        if not folder.exists():
            return way_on(None)
        # Late, because PyTorch takes seconds to import.
        from shardwise.storage.checkpoint import latest

        try:
            return way_on(latest(folder))
        except CheckpointError as error:
            return str(error)


def parse_command(cls: type[_T], argv: Sequence[str], prog: str) -> _T:
    """Parse the arguments of a command into a dataclass, whose docstring is the help.

    Where it has settings, they come from their defaults, then from the TOML file of ``--config``, then from flags.

    Args:
        cls: a dataclass.
        argv: the arguments after the command's name.
        prog: the command's name, for help.

    Raises:
        ConfigError: an unknown flag or setting, a value that is missing or of the wrong kind, or what the dataclass
            itself raised; the TOML file cannot be read.
        SystemExit: help was asked for and printed.
    """
    if "-h" in argv or "--help" in argv:
        # Two spaces keep tyro from joining the lines, some of which are examples. It shows the attributes as flags.
        summary = (inspect.getdoc(cls) or "").partition("\n\nAttributes:\n")[0]
        text = textwrap.indent(summary.replace("\n\n", "\n"), "  ") if issubclass(cls, SettingsArguments) else None
        tyro.cli(cls, prog=prog, description=text, args=["--help"], config=(tyro.conf.DisallowNone,))
    values = FlagReader(cls).read(argv)
    if issubclass(cls, SettingsArguments):
        path, settings_class = values.get("config"), annotations_of(cast(Any, cls))["settings"][0]
        table = {} if path is None else checked(settings_class, read_toml(Path(path)), f"{path}: ")
        values = _merged({"settings": table}, values)
    return with_values(cls, values)


def _merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``values`` with those of ``over`` in their place, in the tables likewise."""
    inner = {key: _merged(values.get(key, {}), value) for key, value in over.items() if isinstance(value, dict)}
    return values | over | inner
