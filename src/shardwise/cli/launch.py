"""Start ranks on this machine with PyTorch's elastic agent, and report a failure in one line.

Only the loopback interface is used, and no host name is looked up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

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
from shardwise.core.processes import clear_leftovers, temporary_prefix
from shardwise.run.processes.stopping import (
    ENDING_SIGNALS,
    SAME_REQUEST_SECONDS,
    Interrupted,
    handling_signals,
    request_stop,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

_SHUTDOWN_SECONDS = 5
_MONITOR_SECONDS = 0.1
# A rank that was killed this long after another rank's failure did not cause the failure.
_SAME_MOMENT_SECONDS = 5.0


def shardwise_command(*arguments: str) -> list[str]:
    """Return the command line that runs ``shardwise ARGUMENTS`` as a rank, with this interpreter."""
    # `-m` puts the current folder first on the path, where a user's random.py would shadow Python's. -P prevents that,
    # unless this process was started with that path too.
    here = bool(sys.path) and sys.path[0] in ("", os.getcwd())
    return [sys.executable, *([] if here else ["-P"]), "-m", "shardwise", *arguments]


def physical_cores() -> int:
    """Return the number of physical cores this process may use, or of logical cores if siblings are unknown."""
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
    else:
        usable = set(range(os.cpu_count() or 1))
    return len({_siblings(cpu) for cpu in usable})


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
) -> int:
    """Run ``argv`` as ``nproc`` ranks on this machine, and wait for all of them.

    Each rank reads its place from ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``. If a rank fails, the others are ended within seconds. Ranks inside ``run_command`` also end when
    this process is killed. On a first SIGINT, SIGTERM or SIGHUP they handle the signal and end in their own time (a
    training step is finished and saved). A further signal ends them at once.

    Args:
        nproc: number of ranks.
        argv: the program and its arguments; see ``shardwise_command``.
        command: prefix of an error line.
        debug: whether to show stack traces and the agent's log.
        resume_hint: returns how to resume the command, for the line about a killed rank.

    Returns:
        0, or the exit code of a failure whose reason was printed: 2 for the user's mistakes, 1 for other failures.

    Raises:
        Interrupted: SIGINT, SIGTERM or SIGHUP reached this process; the ranks have ended.
        LaunchError: the ranks could not be started.
    """
    clear_leftovers()
    with (
        tempfile.TemporaryDirectory(prefix=temporary_prefix("ranks"), ignore_cleanup_errors=True) as name,
        _surroundings(_rank_variables(nproc, Path(name), debug), silent=not debug),
        _first_signal_asks(Path(name)) as asked,
    ):
        # Imported here because it takes seconds, and must find the environment variables that keep it quiet.
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(name) / "agent")),
            run_id=f"shardwise-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=_MONITOR_SECONDS,
            # The agent needs at least one signal; this file handles the others.
            signals_to_handle="SIGQUIT",
            **_shutdown_options(LaunchConfig),
        )
        # The agent expands "${local_rank}" in arguments; escaped arguments arrive unchanged.
        arguments = [argument.replace("$", "$$") for argument in argv[1:]]
        try:
            elastic_launch(config, argv[0])(*arguments)
        except SignalException as error:
            raise Interrupted(error.sigval) from None
        except ChildFailedError as error:
            if asked:
                raise Interrupted(asked[0]) from None
            return _report(command, nproc, error.failures, FailureReport.read_all(Path(name)), debug, resume_hint)
        except Exception as error:
            raise LaunchError(f"could not start {nproc} ranks: {describe(error)[0]}") from error
    return 0


def _report(
    command: str,
    nproc: int,
    failures: Mapping[int, ProcessFailure],
    reports: list[FailureReport],
    debug: bool,
    resume_hint: Callable[[], str],
) -> int:
    if debug:
        for report in filter(lambda report: report.trace, reports):
            print_line(f"rank {report.rank}:\n{report.trace.rstrip()}")
    if end := _end_without_report(failures, reports):
        print_error(command, "; ".join(filter(None, (end, resume_hint()))))
        return EXIT_FAILURE
    first = reports[0]
    if first.exit_code - 128 in ENDING_SIGNALS:
        # A signal to one rank ended all ranks: no error.
        print_line(f"{command}: {first.message}")
        return first.exit_code
    unanimous = len(reports) == nproc and all(report.message == first.message for report in reports)
    # A user's mistake reads the same on every rank, so the line names no rank.
    named = first.exit_code == EXIT_FAILURE and not unanimous
    print_error(command, f"rank {first.rank}: {first.message}" if named else first.message)
    return first.exit_code


def _end_without_report(failures: Mapping[int, ProcessFailure], reports: list[FailureReport]) -> str:
    """Describe the end of the rank that made the others end; empty if that rank left a report."""
    # The agent lists failures in the order in which it found them. It ends the other ranks with SIGTERM.
    rank, failure = next(iter(failures.items()))
    killed = [item for item in failures.items() if item[1].exitcode < 0 and item[1].exitcode != -signal.SIGTERM]
    silent = rank not in {report.rank for report in reports}
    if killed and (not reports or reports[0].time > killed[0][1].timestamp - _SAME_MOMENT_SECONDS):
        rank, failure = killed[0]
        how = f"was killed by {failure.signal_name()}"
        if failure.exitcode == -signal.SIGKILL:
            how += ", by hand or for lack of memory"
    elif not reports or (silent and reports[0].in_collective):
        # For a rank that a signal ended, the exit code is minus the signal's number or 128 plus the number.
        signum = -failure.exitcode if failure.exitcode < 0 else failure.exitcode - 128
        if signum in ENDING_SIGNALS:
            how = f"was ended by {signal.Signals(signum).name}"
        else:
            how = f"ended with exit code {failure.exitcode} and no message"
    else:
        return ""
    return f"rank {rank} (pid {failure.pid}) {how}"


def _rank_variables(nproc: int, folder: Path, debug: bool) -> dict[str, str]:
    """Return the variables that the ranks need besides the agent's; the user's own values take precedence."""
    variables = {
        "OMP_NUM_THREADS": str(max(1, physical_cores() // nproc)),
        # PyTorch's store looks up the name of 127.0.0.1 for its log; where DNS does not answer, that takes 10 s.
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    loopback = next((name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)), None)
    if loopback is not None:
        variables["GLOO_SOCKET_IFNAME"] = variables["NCCL_SOCKET_IFNAME"] = loopback
    if not debug:
        # Otherwise each surviving rank warns about the closed connection of a failed rank.
        variables["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    variables = {name: os.environ.get(name, value) for name, value in variables.items()}
    return variables | {REPORTS_VARIABLE: str(folder), LAUNCHER_VARIABLE: str(os.getpid())}


def _shutdown_options(config: type[LaunchConfig]) -> dict[str, Any]:
    """Return the option for the ranks' time to end. PyTorch 2.11 lacks it and gives them 30 seconds."""
    known = any(field.name == "shutdown_timeout" for field in dataclasses.fields(config))
    return {"shutdown_timeout": _SHUTDOWN_SECONDS} if known else {}


@contextlib.contextmanager
def _surroundings(variables: Mapping[str, str], *, silent: bool) -> Iterator[None]:
    """Set ``variables`` in ``os.environ`` in the block, for the ranks, and turn off the agent's log if ``silent``.

    Changes by the agent are undone too.
    """
    logger = logging.getLogger("torch.distributed.elastic")
    environment, handler, propagate = dict(os.environ), signal.getsignal(signal.SIGQUIT), logger.propagate
    full_name, nothing = socket.getfqdn, logging.NullHandler()
    os.environ.update(variables)
    # The agent calls it at every event, for logs that are off; where DNS does not answer, each call takes many seconds.
    socket.getfqdn = lambda name="": name or socket.gethostname()
    if silent:
        logger.addHandler(nothing)
        logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(nothing)
        logger.propagate = propagate
        socket.getfqdn = full_name
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, handler)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextlib.contextmanager
def _first_signal_asks(reports: Path) -> Iterator[list[int]]:
    """In the block, a first signal asks the ranks to end, and a further one makes the agent end them.

    Yields a list that receives the first signal. Ignored signals (``nohup``) stay ignored.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    asked: list[int] = []
    since = 0.0

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal since
        if not asked:
            asked.append(signum)
            since = time.monotonic()
            with contextlib.suppress(OSError):
                request_stop(reports, signum)
                return
        elif time.monotonic() - since < SAME_REQUEST_SECONDS:
            return
        raise SignalException(f"signal {signum}", signal.Signals(signum))

    with handling_signals(handle):
        yield asked
