"""Start ranks on this machine, watch them, and report a failure in one line.

The ranks meet in a file of a folder that only this user can open, and connect over the loopback interface. Nothing
listens for other hosts, and no host name is looked up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.cli.reporting import (
    EXIT_FAILURE,
    LAUNCHER_VARIABLE,
    REPORTS_VARIABLE,
    FailureReport,
    describe,
    print_error,
    print_line,
)
from shardwise.core.errors import LaunchError
from shardwise.core.processes import STORE_VARIABLE, clear_leftovers, loopback_interface, temporary_prefix
from shardwise.run.processes.stopping import (
    ENDING_SIGNALS,
    SAME_REQUEST_SECONDS,
    Interrupted,
    handling_signals,
    request_stop,
)

_SHUTDOWN_SECONDS = 5.0
_MONITOR_SECONDS = 0.1
# A rank that was killed this long after another rank's failure did not cause the failure.
_SAME_MOMENT_SECONDS = 5.0


@dataclass(frozen=True)
class _Failure:
    """End of a rank with an exit code other than 0; the code is minus the signal's number if a signal killed it."""

    pid: int
    exit_code: int
    time: float


@dataclass(frozen=True)
class Ending:
    """Why ranks ended with a failure.

    Attributes:
        message: one line for the user.
        exit_code: 2 for the user's mistakes, 1 for other failures, 128 plus the number of a signal.
        rank: the rank that failed first.
        reports: what the ranks reported, likeliest cause first.
    """

    message: str
    exit_code: int
    rank: int
    reports: Sequence[FailureReport] = ()


def shardwise_command(*arguments: str) -> list[str]:
    """Return the command line that runs ``shardwise ARGUMENTS`` as a rank, with this interpreter."""
    # `-m` puts the current folder first on the path, where a user's random.py would shadow Python's. -P prevents that,
    # unless this process was started with that path too.
    here = bool(sys.path) and sys.path[0] in ("", os.getcwd())
    return [sys.executable, *([] if here else ["-P"]), "-m", "shardwise", *arguments]


def physical_cores() -> int:
    """Return the number of physical cores this process may use, or of logical cores if siblings are unknown."""
    return len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def launch_ranks(
    nproc: int,
    argv: Sequence[str],
    *,
    command: str = "shardwise",
    debug: bool = False,
    resume_hint: Callable[[], str] = lambda: "",
    once_started: Callable[[], object] = lambda: None,
) -> int:
    """Run ``argv`` as ``nproc`` ranks on this machine, wait for all of them, and print why they failed.

    Args:
        nproc: number of ranks.
        argv: the program and its arguments; see ``shardwise_command``.
        command: prefix of an error line.
        debug: whether to show stack traces and PyTorch's log.
        resume_hint: returns how to resume the command, for the line about a killed rank.
        once_started: called when the ranks have been started; a signal that arrives meanwhile reaches them.

    Returns:
        0, or the exit code of a failure whose reason was printed: 2 for the user's mistakes, 1 for other failures.
    """
    ending = run_ranks(nproc, argv, debug=debug, resume_hint=resume_hint, once_started=once_started)
    if ending is None:
        return 0
    if debug:
        for report in filter(lambda report: report.trace, ending.reports):
            print_line(f"rank {report.rank}:\n{report.trace.rstrip()}")
    if ending.exit_code - 128 in ENDING_SIGNALS:
        # A signal to one rank ended all ranks: no error.
        print_line(f"{command}: {ending.message}")
    else:
        print_error(command, ending.message)
    return ending.exit_code


def run_ranks(
    nproc: int,
    argv: Sequence[str],
    *,
    debug: bool = False,
    resume_hint: Callable[[], str] = lambda: "",
    once_started: Callable[[], object] = lambda: None,
    streams: Mapping[str, Any] | None = None,
) -> Ending | None:
    """Run ``argv`` as ``nproc`` ranks on this machine, and wait for all of them.

    Each rank reads its place from ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``, and meets the
    others in the file ``SHARDWISE_RANK_STORE``. If a rank fails, the others are ended within seconds. Ranks inside
    ``run_command`` also end when this process is killed. On a first SIGINT, SIGTERM or SIGHUP they handle the signal
    and end in their own time (a training step is finished and saved). A further signal ends them at once.

    Args:
        nproc, argv, debug, resume_hint, once_started: as for ``launch_ranks``.
        streams: the ranks' ``stdin``, ``stdout`` and ``stderr``, as for ``subprocess.Popen``; else this process's.

    Returns:
        None, or why ranks failed.

    Raises:
        Interrupted: a signal ended the ranks.
        LaunchError: they could not be started.
    """
    clear_leftovers()
    # The folder can be opened by this user only.
    with tempfile.TemporaryDirectory(prefix=temporary_prefix("ranks"), ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with _signals_ask(folder) as received, contextlib.ExitStack() as ends:
            ranks: list[subprocess.Popen[bytes]] = []
            ends.callback(_end_ranks, ranks)
            environment = os.environ | _rank_variables(nproc, folder, debug)
            for rank in range(nproc):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                try:
                    # In its own session the rank does not receive the terminal's Ctrl-C, and all its processes can be
                    # ended together.
                    ranks.append(
                        subprocess.Popen(argv, env=environment | place, start_new_session=True, **(streams or {}))
                    )
                except OSError as error:
                    raise LaunchError(f"could not start {nproc} ranks: {describe(error)[0]}") from error
            once_started()
            failures = _wait(ranks, received)
        if received and (failures or _at_once(received)):
            raise Interrupted(received[-1])
        return _ending(nproc, failures, FailureReport.read_all(folder), resume_hint) if failures else None


def _wait(ranks: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> dict[int, _Failure]:
    """Wait until all ranks have ended, a rank has failed, or they must end at once; return the failures by rank.

    Ranks that were asked to end have some seconds to do so after the first of them.
    """
    failed_at = 0.0
    while not _at_once(received):
        codes = {rank: process.poll() for rank, process in enumerate(ranks)}
        failures = {rank: _Failure(ranks[rank].pid, code, time.time()) for rank, code in codes.items() if code}
        failed_at = failed_at or (time.monotonic() if failures else 0.0)
        may_end = received and time.monotonic() - failed_at < _SHUTDOWN_SECONDS
        if None not in codes.values() or (failures and not may_end):
            return failures
        time.sleep(_MONITOR_SECONDS)
    return {}


def _end_ranks(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that run, with their own processes: by SIGTERM, and after some seconds by SIGKILL."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        running = [process for process in ranks if process.poll() is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
        limit = time.monotonic() + _SHUTDOWN_SECONDS
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))


def _ending(
    nproc: int, failures: Mapping[int, _Failure], reports: list[FailureReport], resume_hint: Callable[[], str]
) -> Ending:
    if end := _end_without_report(failures, reports):
        rank, message = end
        return Ending("; ".join(filter(None, (message, resume_hint()))), EXIT_FAILURE, rank, reports)
    first = reports[0]
    unanimous = len(reports) == nproc and all(report.message == first.message for report in reports)
    # A user's mistake reads the same on every rank, so the line names no rank.
    named = first.exit_code == EXIT_FAILURE and not unanimous
    message = f"rank {first.rank}: {first.message}" if named and first.message else first.message
    return Ending(message, first.exit_code, first.rank, reports)


def _end_without_report(failures: Mapping[int, _Failure], reports: list[FailureReport]) -> tuple[int, str] | None:
    """Return the rank that made the others end, and how it ended; None if that rank left a report."""
    # The launcher ends the other ranks with SIGTERM.
    rank, failure = next(iter(failures.items()))
    killed = [item for item in failures.items() if item[1].exit_code < 0 and item[1].exit_code != -signal.SIGTERM]
    silent = rank not in {report.rank for report in reports}
    # A rank in a collective waited for the killed one. The time of another failure tells which came first.
    is_cause = not reports or reports[0].in_collective
    if killed and (is_cause or reports[0].time > killed[0][1].time - _SAME_MOMENT_SECONDS):
        rank, failure = killed[0]
        how = f"was killed by {_name_of(-failure.exit_code)}"
        if failure.exit_code == -signal.SIGKILL:
            how += ", by hand or for lack of memory"
    elif not reports or (silent and reports[0].in_collective):
        # For a rank that a signal ended, the exit code is minus the signal's number or 128 plus the number.
        signum = -failure.exit_code if failure.exit_code < 0 else failure.exit_code - 128
        if signum in ENDING_SIGNALS:
            how = f"was ended by {signal.Signals(signum).name}"
        else:
            how = f"ended with exit code {failure.exit_code} and no message"
    else:
        return None
    return rank, f"rank {rank} (pid {failure.pid}) {how}"


def _name_of(signum: int) -> str:
    """Return the name of a signal; a real-time signal has none."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _rank_variables(nproc: int, folder: Path, debug: bool) -> dict[str, str]:
    """Return the variables that all ranks need; the user's own threads and log level take precedence."""
    variables = {"OMP_NUM_THREADS": str(max(1, physical_cores() // nproc))}
    if not debug:
        # Otherwise each surviving rank warns about the closed connection of a failed rank.
        variables["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    variables = {name: os.environ.get(name, value) for name, value in variables.items()}
    if (loopback := loopback_interface()) is not None:
        # The user's own interface is for ranks of other hosts, and here are none.
        variables["GLOO_SOCKET_IFNAME"] = variables["NCCL_SOCKET_IFNAME"] = loopback
    return variables | {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        STORE_VARIABLE: str(folder / "store"),
        REPORTS_VARIABLE: str(folder),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }


@contextlib.contextmanager
def _signals_ask(reports: Path) -> Iterator[list[int]]:
    """In the block, a first signal asks the ranks to end.

    Yields a list that receives the signals; see ``_at_once``. Ignored signals (``nohup``) stay ignored.
    """
    received: list[int] = []
    since = 0.0

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal since
        if not received:
            since = time.monotonic()
            received.append(signum)
            try:
                request_stop(reports, signum)
            except OSError:
                received.append(signum)
        elif time.monotonic() - since >= SAME_REQUEST_SECONDS:
            received.append(signum)

    with handling_signals(handle):
        yield received


def _at_once(received: Sequence[int]) -> bool:
    """True after a second signal, or a first one that could not be passed on."""
    return len(received) > 1
