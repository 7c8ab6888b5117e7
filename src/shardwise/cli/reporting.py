"""Turn every error into one line and an exit code: 2 for the user's mistakes, 1 for failures, 130 and 143 for signals.

A rank sends the line to the launcher that the environment names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, TextIO

from shardwise.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    OutOfMemoryError,
    ShardingError,
    ShardwiseError,
    TopologyError,
    VocabularyError,
)
from shardwise.run.processes.stopping import Interrupted, signals_raise, start_guard, write_complete
from shardwise.training.bounds import launcher_number

REPORTS_VARIABLE = "SHARDWISE_RANK_REPORTS"
"""Environment variable: the folder where ranks leave their FailureReport for the launcher to print."""

LAUNCHER_VARIABLE = "SHARDWISE_LAUNCHER_PID"
"""Environment variable: process id of the launcher; a rank ends when this process ends."""

DEBUG_HINT = "; run again with --debug for the stack trace"
"""End of the line about an unexpected error."""

EXIT_FAILURE = 1
EXIT_MISTAKE = 2
EXIT_CLOSED_OUTPUT = 141  # Shells report this code for SIGPIPE.

_MISTAKES = (ConfigError, DataError, ShardingError, VocabularyError, CheckpointError, TopologyError)
_PATH_MISTAKES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_PATH_ERRORS = {errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP}
_LONGEST_MESSAGE = 400
_HEAR_OTHERS_SECONDS = 1.0


@dataclass(frozen=True)
class FailureReport:
    """Failure of a rank: one line, empty if the output was closed, exit code, seconds since the epoch and stack trace.

    ``in_collective``: a collective failed, perhaps because another rank did.
    """

    rank: int
    message: str
    exit_code: int
    time: float
    trace: str = ""
    in_collective: bool = False

    def write(self, folder: Path) -> None:
        write_complete(folder / f"rank{self.rank}.json", json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read_all(cls, folder: Path) -> list[FailureReport]:
        """Read the reports in ``folder``, likeliest cause first: by time, with failed collectives last."""
        reports = [cls(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank*.json")]
        return sorted(reports, key=lambda report: (report.in_collective, report.time))


@dataclass(frozen=True)
class RankEnvironment:
    """Variables of a launcher in this process's environment.

    ``reports`` is the folder for this rank's FailureReport, None if the launcher is not ours; ``launcher_pid`` the
    process that this rank ends with; ``attempt`` the folder of the ranks of this host, our launcher's or torchrun's.
    """

    rank: int
    world_size: int
    reports: Path | None = None
    launcher_pid: int | None = None
    attempt: Path | None = None

    @classmethod
    def read(cls) -> RankEnvironment | None:
        """Read ``RANK``, ``WORLD_SIZE`` and others; None if both are unset, ConfigError if they make no sense."""
        rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if rank is None and world_size is None:
            return None
        try:
            numbers = int(rank or ""), int(world_size or "")
        except ValueError:
            numbers = (0, 0)
        if not 0 <= numbers[0] < numbers[1]:
            raise ConfigError(
                f"the environment has RANK={rank} and WORLD_SIZE={world_size}, which only a launcher sets; unset both"
            )
        folder, launcher_pid = os.environ.get(REPORTS_VARIABLE), launcher_number(LAUNCHER_VARIABLE)
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if launcher_pid is None and "TORCHELASTIC_RUN_ID" in os.environ:
            launcher_pid = os.getppid()
        reports = Path(folder) if folder else None
        # The error file is ATTEMPT/LOCAL_RANK/error.json.
        attempt = reports or (Path(error_file).parent.parent if error_file else None)
        return cls(*numbers, reports=reports, launcher_pid=launcher_pid, attempt=attempt)


def is_first_rank() -> bool:
    """True in the process that prints on behalf of all ranks."""
    return not launcher_number("RANK")


def describe(error: BaseException) -> tuple[str, int]:
    """Return one line about an error, followed by its detail lines if it has any, and the exit code.

    The line of an unexpected error has its type and a few hundred characters of its text, and suggests ``--debug``.
    """
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError) and error.details:
        return f"{text}\n{error.details}", EXIT_FAILURE
    if isinstance(error, ShardwiseError):
        return text or type(error).__name__, EXIT_MISTAKE if isinstance(error, _MISTAKES) else EXIT_FAILURE
    if isinstance(error, OSError) and error.strerror:
        names = " -> ".join(
            os.fsdecode(name)
            for name in (error.filename, error.filename2)
            if isinstance(name, str | bytes | os.PathLike)
        )
        reason = f"{names}: {error.strerror}" if names else error.strerror
        is_mistake = isinstance(error, _PATH_MISTAKES) or error.errno in _PATH_ERRORS
        return reason, EXIT_MISTAKE if is_mistake else EXIT_FAILURE
    if len(text) > _LONGEST_MESSAGE:
        text = text[:_LONGEST_MESSAGE] + "..."
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{named}{DEBUG_HINT}", EXIT_FAILURE


def print_line(line: str) -> None:
    """Print one line on stderr; on a terminal, overwrite the remains of a progress bar."""
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    with contextlib.suppress(BrokenPipeError):
        print(clear + line, file=sys.stderr, flush=True)


def print_note(command: str, note: str) -> None:
    """Print ``COMMAND: NOTE``."""
    print_line(f"{command}: {note}")


def print_error(command: str, message: str) -> None:
    """Print ``COMMAND: error: MESSAGE``; nothing if there is no message."""
    if message:
        print_line(f"{command}: error: {message}")


def allow_any_character() -> None:
    """Make stdout replace characters that its encoding lacks by question marks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="replace")


def show(piece: str) -> None:
    """Print a piece of a text without buffering."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def has_colours() -> bool:
    """Follow NO_COLOR and FORCE_COLOR (no-color.org, force-color.org); without them, True on a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def run_command(command: str, body: Callable[[], int | None], *, debug: bool = False) -> int:
    """Run a command, report any error in one line, and return the exit code.

    A rank (``RANK`` and ``WORLD_SIZE`` are set) sends the line to the launcher, which prints one line for all ranks.
    Under ``torchrun`` the first rank of a host to fail prints it. A rank that fails does not return from this function.
    The code is 0, 1 or 2; 128 plus the signal's number after SIGINT or SIGTERM; 141 if the output's reader is gone.
    """
    try:
        reporter = _Reporter(command, RankEnvironment.read(), debug)
    except ConfigError as error:
        print_error(command, str(error))
        return EXIT_MISTAKE
    environment = reporter.environment
    try:
        with reporter.prints_log(), signals_raise(once=environment is not None):
            if environment is not None:
                start_guard(environment.launcher_pid, environment.reports)
                reporter.hear_other_threads()
            try:
                code = body() or 0
                sys.stdout.flush()
            except BaseException as error:
                code = reporter.report(error)
    except Interrupted as interruption:  # Before the command began, or during the report of its end.
        code = interruption.exit_code
    if environment is not None and code != 0:
        exit_with(code)
    return code


def exit_with(exit_code: int) -> NoReturn:
    """End a failed rank at once, because destructors of its process groups would wait for other ranks and complain."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


class _Reporter(logging.Handler):
    """Reports the error of a command and the log of a rank, to the launcher or once per host."""

    def __init__(self, command: str, environment: RankEnvironment | None, debug: bool) -> None:
        super().__init__()
        self.command = command
        self.environment = environment
        self.debug = debug

    def hear_other_threads(self) -> None:
        """End this rank if another of its threads (the watch) raises an error."""

        def end(args: threading.ExceptHookArgs) -> None:
            if isinstance(args.exc_value, ShardwiseError):
                exit_with(self._failure(args.exc_value))
            others(args)

        others, threading.excepthook = threading.excepthook, end

    @contextlib.contextmanager
    def prints_log(self) -> Iterator[None]:
        """Print the package's log within a ``with`` block."""
        logger = logging.getLogger("shardwise")
        logger.addHandler(self)
        propagates, logger.propagate = logger.propagate, False
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.propagate = propagates

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.command}: {record.getMessage()}"
        self._print_first(line, name=getattr(record, "once", line))

    def report(self, error: BaseException) -> int:
        if isinstance(error, Interrupted):
            self._interruption(error)
            return error.exit_code
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                print_error(self.command, error.code)
                return EXIT_MISTAKE
            return int(error.code or 0)
        if isinstance(error, BrokenPipeError) and (closed := list(filter(_nobody_reads, (sys.stdout, sys.stderr)))):
            for stream in closed:
                # The interpreter flushes again at exit, and would complain.
                with open(os.devnull, "wb") as sink:
                    os.dup2(sink.fileno(), stream.fileno())
            self._leave_report("", EXIT_CLOSED_OUTPUT)
            return EXIT_CLOSED_OUTPUT
        if not isinstance(error, Exception):
            raise error
        return self._failure(error)

    def _interruption(self, interruption: Interrupted) -> None:
        note = f"; {interruption.note}" if interruption.note else ""
        if self.environment is not None and self.environment.reports is not None:
            # Our launcher prints this if it received the signal itself. It did not if only a rank did.
            if interruption.agreed:
                self._leave_report(f"interrupted by {interruption.signal.name}{note}", interruption.exit_code)
        # torchrun also sends SIGTERM after another rank's failure, which needs no line, unless all ranks agreed to end.
        elif self.environment is None or interruption.agreed or interruption.signal is signal.SIGINT:
            self._print_first(f"{self.command}: interrupted{note}")

    def _failure(self, error: Exception) -> int:
        message, code = describe(error)
        trace = "".join(traceback.format_exception(error))
        in_collective = self.environment is not None and _failed_in_collective(error)
        if not self._leave_report(message, code, trace, in_collective):
            if self.debug:
                print_line(trace.rstrip())
            self._print_first(f"{self.command}: error: {message}")
        if in_collective:
            # Another rank's failure ended the collective. That rank may still be cleaning up: let it report first.
            with contextlib.suppress(Interrupted):
                time.sleep(_HEAR_OTHERS_SECONDS)
        return code

    def _leave_report(self, message: str, code: int, trace: str = "", in_collective: bool = False) -> bool:
        """Write a report for the launcher; return False if it expects none or the disk is full."""
        if self.environment is None or self.environment.reports is None:
            return False
        report = FailureReport(self.environment.rank, message, code, time.time(), trace, in_collective)
        try:
            report.write(self.environment.reports)
        except OSError:
            return False
        return True

    def _print_first(self, line: str, *, name: str | None = None) -> None:
        """Print ``line`` unless a rank of this host has printed it, or a line with the same ``name``."""
        if self.environment is not None and self.environment.attempt is not None:
            name = f"printed-{hashlib.sha256((name or line).encode()).hexdigest()[:16]}"
            try:
                (self.environment.attempt / name).touch(exist_ok=False)
            except FileExistsError:
                return
            except OSError:
                pass  # Better twice than never.
        print_line(line)


def _nobody_reads(stream: TextIO) -> bool:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # A replaced stream, such as a StringIO.
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _failed_in_collective(error: BaseException) -> bool:
    """True if the error comes from a collective, which fails on each rank that waits for a failed one."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    folders = Path(frames[-1].filename).parts[:-1] if frames else ()
    pairs = set(pairwise(folders))
    return ("torch", "distributed") in pairs or ("core", "communication") in pairs
