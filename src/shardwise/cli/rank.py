"""What a process does because others run beside it: end when told to, end when its launcher died, say why it failed.

A rank that waits in a collective is inside C++ code, where Python's signal handlers do not run. So a thread watches for
the signal too, and ends the process if the main thread has not done so itself within ``GRACE_SECONDS``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from shardwise.core.errors import ConfigError
from shardwise.run.processes import stopping
from shardwise.run.processes.stopping import ENDING_SIGNALS, SAME_REQUEST_SECONDS, Interrupted, handling_signals
from shardwise.training.bounds import launcher_number

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

REPORTS_VARIABLE = "SHARDWISE_RANK_REPORTS"
"""Environment variable: the folder where ranks leave their FailureReport for the launcher to print."""

LAUNCHER_VARIABLE = "SHARDWISE_LAUNCHER_PID"
"""Environment variable: process id of the launcher, without which a rank does not go on."""

GRACE_SECONDS = 2.0
"""How long a rank that was told to end may take to do so by itself."""

LONGEST_LEAVING_SECONDS = 20.0
"""How long a rank whose step was done and saved on a signal may take to end."""

_POLL_SECONDS = 0.5
_AGAIN_SECONDS = 0.05
_REQUEST_NAME = "stop"


def request_stop(reports: Path, signum: int) -> None:
    """Ask all ranks that leave their reports in ``reports`` to end as on this signal.

    A file, because a signal might come twice: a terminal sends Ctrl-C to the ranks too.
    """
    _write(reports / _REQUEST_NAME, str(int(signum)))


def _write(path: Path, text: str) -> None:
    """Write a file, complete or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _requested_stop(reports: Path | None) -> int:
    """The signal of ``request_stop``; 0 if there was none."""
    try:
        return int((reports / _REQUEST_NAME).read_text(encoding="utf-8")) if reports is not None else 0
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True)
class FailureReport:
    """Why a rank failed.

    Attributes:
        rank: global rank.
        message: one line; empty if there is nothing to say (its output was closed).
        exit_code: 2 for the user's mistakes, 1 for failures.
        time: seconds since the epoch.
        trace: the stack trace.
        in_collective: a collective failed, which the failure of another rank may have caused.
    """

    rank: int
    message: str
    exit_code: int
    time: float
    trace: str = ""
    in_collective: bool = False

    def write(self, folder: Path) -> None:
        """Leave the report in ``folder``, complete or not at all."""
        _write(folder / f"rank{self.rank}.json", json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read_all(cls, folder: Path) -> list[FailureReport]:
        """The reports in ``folder``, the likeliest cause first: the earliest, and those of failed collectives last."""
        reports = [cls(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank*.json")]
        return sorted(reports, key=lambda report: (report.in_collective, report.time))


@dataclass(frozen=True)
class RankEnvironment:
    """What a launcher told this process through the environment.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        reports: folder for this rank's FailureReport; None if the launcher is not ours.
        launcher_pid: process without which this rank does not go on; None if that is not known.
        attempt: folder that torchrun gives the ranks of this host; None if it does not.
    """

    rank: int
    world_size: int
    reports: Path | None = None
    launcher_pid: int | None = None
    attempt: Path | None = None

    @classmethod
    def read(cls) -> RankEnvironment | None:
        """From ``RANK``, ``WORLD_SIZE`` and what else launchers set; None if this process is not a rank of several.

        Raises:
            ConfigError: only one of the two is set, or they are no numbers that fit.
        """
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
        return cls(
            *numbers,
            reports=Path(folder) if folder else None,
            launcher_pid=launcher_pid,
            # The error file is ATTEMPT/LOCAL_RANK/error.json.
            attempt=Path(error_file).parent.parent if error_file else None,
        )


def is_first_rank() -> bool:
    """Whether this process prints what is printed once."""
    return not launcher_number("RANK")


@contextlib.contextmanager
def signals_raise(*, once: bool) -> Iterator[None]:
    """Within, SIGINT, SIGTERM and SIGHUP raise Interrupted; one that is ignored (``nohup``) stays so.

    Args:
        once: what a second signal does: nothing if True, for a rank, which its guard ends; end the process if False.
    """

    def handle(signum: int, frame: FrameType | None) -> NoReturn:
        for each in ENDING_SIGNALS:
            if signal.getsignal(each) is handle:
                signal.signal(each, signal.SIG_IGN if once else signal.SIG_DFL)
        raise Interrupted(signum)

    def raise_again(lost: UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, Interrupted):
            others(lost)
            return
        # It came while Python was in a callback, such as a weak reference's, out of which nothing is raised.
        for each in before:
            signal.signal(each, handle)
        again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), lost.exc_value.signal))
        again.daemon = True
        again.start()

    others = sys.unraisablehook
    with handling_signals(handle) as before:
        sys.unraisablehook = raise_again
        try:
            yield
        finally:
            sys.unraisablehook = others


def start_guard(launcher_pid: int | None, reports: Path | None = None) -> None:
    """Start the thread that ends this process when the main thread cannot: on a signal, or when the launcher died.

    Where signals wait for the end of a training step, it waits too, until the step has had its time.

    Call it once, in the main thread, after ``signals_raise``.

    Args:
        launcher_pid: the parent process to watch; None watches signals alone.
        reports: folder where the launcher may ask to stop.
    """
    receive, send = os.pipe()
    os.set_blocking(send, False)
    # The interpreter writes each signal's number here at once, whatever the main thread is doing.
    signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    guard = _Guard(receive, launcher_pid, reports)
    threading.Thread(target=guard.watch, name="shardwise-guard", daemon=True).start()


@dataclass
class _Guard:
    """What ``start_guard`` starts.

    Attributes:
        receive: where the numbers of signals arrive.
        launcher_pid: as for ``start_guard``.
        reports: as for ``start_guard``.
    """

    receive: int
    launcher_pid: int | None
    reports: Path | None
    # Of the first signal, and when it came; or when the step that it waited for was done.
    _signum: int = 0
    _since: float = 0.0
    _waits: bool = False

    def watch(self) -> NoReturn:
        while not self._is_to_end():
            pass
        time.sleep(GRACE_SECONDS)
        os._exit(128 + self._signum)

    def _is_to_end(self) -> bool:
        """Look once, for at most ``_POLL_SECONDS``."""
        readable, _, _ = select.select([self.receive], [], [], _POLL_SECONDS)
        now, postponed = time.monotonic(), stopping.current()
        if readable:
            received = os.read(self.receive, 1)[0]
            return received in ENDING_SIGNALS and self._takes(received, now, postponed)
        if self.launcher_pid is not None and os.getppid() != self.launcher_pid:
            # Killed, with all that it started as far as its user knows.
            return self._end_at_once(signal.SIGTERM, postponed)
        if not self._signum:
            if asked := _requested_stop(self.reports):
                os.kill(os.getpid(), asked)
            return False
        if postponed is not None:
            return postponed.overdue() and self._end_at_once(self._signum, postponed)
        if self._waits:
            self._waits, self._since = False, now
        return now - self._since > LONGEST_LEAVING_SECONDS

    def _takes(self, signum: int, now: float, postponed: stopping.Postponed | None) -> bool:
        if not self._signum:
            self._signum, self._since, self._waits = signum, now, postponed is not None
            return postponed is None
        return now - self._since >= SAME_REQUEST_SECONDS

    def _end_at_once(self, signum: int, postponed: stopping.Postponed | None) -> bool:
        if postponed is not None:
            postponed.abandon()
        self._signum = signum
        os.kill(os.getpid(), signum)
        return True


def leave(exit_code: int) -> NoReturn:
    """End a rank that failed, at once: its process group's destructors would wait for the other ranks, and complain."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)
