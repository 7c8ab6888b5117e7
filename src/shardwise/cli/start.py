"""Whether this process is a rank or the launcher of ranks, decided once for every command.

Standard input and outputs that are closed, or that nobody reads any more.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, cast

from shardwise.cli.arguments import Arguments, LaunchArguments
from shardwise.cli.launch import launch_ranks, shardwise_command
from shardwise.cli.rank import RankEnvironment
from shardwise.core.errors import ConfigError


def start_ranks(command: str, argv: Sequence[str], arguments: Arguments) -> int | None:
    """Start the ranks of a command, unless this process is one of them, or the only one.

    Args:
        command: of ``shardwise``.
        argv: the arguments after it.
        arguments: the same, parsed.

    Returns:
        The exit code of the ranks; None if this process is to do the work itself.

    Raises:
        ConfigError: the arguments do not fit the number of ranks, or ``--nproc`` asks for another than a launcher
            started.
        ShardwiseError: what ``arguments`` raised when it looked at the rest.
    """
    if not isinstance(arguments, LaunchArguments):
        return None
    environment = RankEnvironment.read()
    world_size = environment.world_size if environment is not None else arguments.nproc or arguments.num_ranks
    if arguments.nproc not in (None, world_size):
        raise ConfigError(
            f"--nproc asks for {arguments.nproc} ranks, but the launcher started {world_size}; leave --nproc out"
        )
    try:
        arguments.check_world(world_size)
    except ConfigError as error:
        if environment is None:
            raise
        raise ConfigError(
            f"{error} (WORLD_SIZE={world_size} is in the environment; unset it and RANK if no launcher set them)"
        ) from error
    if environment is not None:
        return None
    arguments.check()
    if world_size == 1:
        return None
    arguments.prepare(world_size)
    program, name = shardwise_command(command, *argv), f"shardwise {command}"
    return launch_ranks(world_size, program, command=name, debug=arguments.debug, way_on=arguments.way_on)


def open_closed_streams() -> None:
    """Open ``/dev/null`` where standard input or an output is closed (``>&-``).

    A file that is opened later would get the output's number, and what libraries print would stand in the file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            # Not by its number, which may be another file's by now. Open until the process ends.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


class LastingOutput:
    """An output whose loss ends nothing: when it cannot be written any more, what is written goes nowhere.

    Args:
        stream: the output.
        other: where one line then says so.
        name: of the output, for that line.
    """

    def __init__(self, stream: TextIO, other: TextIO, name: str) -> None:
        self._stream, self._other, self._name = stream, other, name

    def write(self, text: str) -> int:
        """Write, or lose, a text."""
        with self._loss_accepted():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what was written."""
        with self._loss_accepted():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _loss_accepted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What the stream still holds goes where all that follows goes.
            with open(os.devnull, "wb") as sink:
                os.dup2(sink.fileno(), self._stream.fileno())
            with contextlib.suppress(OSError):
                print(
                    f"{self._name} cannot be written any more ({error.strerror}); the run goes on",
                    file=self._other,
                    flush=True,
                )


@contextlib.contextmanager
def lasting_outputs() -> Iterator[None]:
    """Within, a run goes on when nobody reads what it prints: when a pager ends or a disk is full."""
    out, err = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, LastingOutput(out, err, "standard output"))
    sys.stderr = cast(TextIO, LastingOutput(err, out, "standard error"))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


def allow_any_character() -> None:
    """Where the terminal's encoding lacks a character, show a question mark and go on."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="replace")


def show(piece: str) -> None:
    """Print a piece of a text, at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def has_colours() -> bool:
    """As no-color.org and force-color.org say, or else if a terminal reads this."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()
