"""Handle signals that end a process: at once between steps, or after a running step is completed and saved.

Signals belong to the process. Therefore a variable of this module holds the object that currently postpones them.

A rank that waits in a collective is inside C++ code, where Python's signal handlers do not run. Therefore a thread also
watches for the signal, and ends the process if the main thread has not done so within ``GRACE_SECONDS``.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

ENDING_SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if name in signal.Signals.__members__
)
"""Signals that end a process, as far as this system has them."""

SAME_REQUEST_SECONDS = 1.0
"""A further signal within this time is a duplicate, for example from both the terminal and torchrun."""

GRACE_SECONDS = 2.0
"""Maximum time in seconds for a rank to end after a signal."""

LONGEST_LEAVING_SECONDS = 20.0
"""Maximum time for a rank to end after its step was completed and saved on a signal."""

_POLL_SECONDS = 0.5
_AGAIN_SECONDS = 0.05
_REQUEST_NAME = "stop"
_LEAST_SECONDS = 25.0
_STEPS = 3


class Interrupted(KeyboardInterrupt):
    """Raised when a signal ends this process. A KeyboardInterrupt, so that cleanup code for Ctrl-C also runs."""

    def __init__(self, signum: int, *, agreed: bool = False) -> None:
        self.signal = signal.Signals(signum)
        self.exit_code = 128 + signum
        self.agreed = agreed
        self.note = ""
        super().__init__(f"ended by {self.signal.name}")


class Postponed:
    """State of signals that wait for the end of the step.

    Attributes:
        signum: number of the first signal that this process received; 0 for none.
        agreed: True once every rank knows that the run ends.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.agreed = False
        self._hurried = True
        self._since = 0.0
        self._slowest_step = 0.0
        self._abandoned = False

    def step_took(self, seconds: float) -> None:
        """Record the duration of a step, which determines the time limit of later steps."""
        self._slowest_step = max(self._slowest_step, seconds)

    def receive(self, signum: int) -> bool:
        """Record a signal; return True if it must end the process at once."""
        if self.signum == 0 and not self._abandoned:
            self.signum, self._since = signum, time.monotonic()
            return False
        return self._abandoned or time.monotonic() - self._since >= SAME_REQUEST_SECONDS

    def abandon(self) -> None:
        """Stop postponing: the next signal ends the process at once."""
        self._abandoned = True

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """Suspend the time limit during the block, for a checkpoint or an evaluation."""
        self._hurried = False
        try:
            yield
        finally:
            self._hurried = True

    def overdue(self) -> bool:
        """True if the step exceeds its limit after a signal: 25 s, or three times the slowest step if that is more.

        Most schedulers kill a process 30 seconds after SIGTERM.
        """
        if self.signum == 0 or not self._hurried:
            return False
        return time.monotonic() - self._since > max(_LEAST_SECONDS, _STEPS * self._slowest_step)


@contextlib.contextmanager
def handling_signals(handle: Callable[[int, FrameType | None], object]) -> Iterator[dict[signal.Signals, Any]]:
    """Install ``handle`` for the ending signals during the block; yield the previous handlers.

    Ignored signals (``nohup``) stay ignored. Outside the main thread, where Python handles no signals, nothing changes.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {each: signal.getsignal(each) for each in ENDING_SIGNALS}
        # None means a handler that was not set from Python; it cannot be restored.
        before = {each: handler for each, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for each in before:
        signal.signal(each, handle)
    try:
        yield before
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


_current: Postponed | None = None


def current() -> Postponed | None:
    """Return the object that postpones signals; None if they end the process at once. Thread-safe."""
    return _current


@contextlib.contextmanager
def signals_postponed() -> Iterator[Postponed]:
    """Postpone the first SIGINT, SIGTERM or SIGHUP to the end of the step; a second signal takes effect as before.

    Ignored signals (``nohup``) stay ignored. A pending signal takes effect at the end of the block.
    """
    global _current
    postponed = Postponed()

    def handle(signum: int, frame: FrameType | None) -> None:
        global _current
        if postponed.receive(signum):
            _current = None
            for each, handler in before.items():
                signal.signal(each, handler)
            signal.raise_signal(signum)

    if threading.current_thread() is threading.main_thread():
        _current = postponed
    with handling_signals(handle) as before:
        try:
            yield postponed
        finally:
            _current = None
    if postponed.signum and not postponed.agreed:
        signal.raise_signal(postponed.signum)


def request_stop(reports: Path, signum: int) -> None:
    """Ask all ranks that write their reports to ``reports`` to end as if they had received this signal.

    The request is a file, because a signal might arrive twice: a terminal also sends Ctrl-C to the ranks.
    """
    write_complete(reports / _REQUEST_NAME, str(int(signum)))


def write_complete(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _requested_stop(reports: Path | None) -> int:
    try:
        return int((reports / _REQUEST_NAME).read_text(encoding="utf-8")) if reports is not None else 0
    except (OSError, ValueError):
        return 0


def num_imports(frame: FrameType | None) -> int:
    """Return the number of calls of Python's import system on the stack of ``frame``."""
    number = 0
    while frame is not None:
        number += frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return number


@contextlib.contextmanager
def signals_raise(*, once: bool) -> Iterator[None]:
    """Raise Interrupted on SIGINT, SIGTERM and SIGHUP during the block; ignored signals (``nohup``) stay ignored.

    A signal that arrives during an import takes effect after it, because an exception in the middle of the import of a
    C extension, such as PyTorch's, may crash the process.

    Args:
        once: True ignores a second signal, for ranks, which have a guard that ends them; with False it ends the
            process.
    """

    waits = False

    def again(signum: int) -> None:
        time.sleep(_AGAIN_SECONDS)
        if waits:
            os.kill(os.getpid(), signum)

    def try_again(signum: int) -> None:
        nonlocal waits
        waits = True
        # Unlike ``threading.Thread`` this takes no lock, which the interrupted code may hold.
        _thread.start_new_thread(again, (signum,))

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal waits
        if num_imports(frame) > own_imports:
            try_again(signum)
            return
        waits = False
        for each in ENDING_SIGNALS:
            if signal.getsignal(each) is handle:
                signal.signal(each, signal.SIG_IGN if once else signal.SIG_DFL)
        raise Interrupted(signum)

    def raise_again(lost: UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, Interrupted):
            others(lost)
            return
        # The signal arrived during a callback, such as one of a weak reference, whose exceptions Python drops.
        for each in before:
            signal.signal(each, handle)
        try_again(lost.exc_value.signal)

    # The command itself may be called while a module is imported.
    own_imports, others = num_imports(sys._getframe()), sys.unraisablehook
    with handling_signals(handle) as before:
        sys.unraisablehook = raise_again
        try:
            yield
        finally:
            sys.unraisablehook = others


def start_guard(
    launcher_pid: int | None, reports: Path | None = None, *, last_words: Callable[[], object] = lambda: None
) -> Callable[[], None]:
    """Start the thread that ends this process when the main thread cannot: on a signal, or if the launcher has died.

    If signals are postponed to the end of a training step, the thread also waits, up to the step's time limit. Call the
    function once, in the main thread, after ``signals_raise``.
    """
    receive, send = os.pipe()
    os.set_blocking(send, False)
    # The interpreter writes each signal's number here at once, even if the main thread is blocked.
    before = signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    guard = _Guard(receive, launcher_pid, reports, last_words)
    thread = threading.Thread(target=guard.watch, name="shardwise-guard", daemon=True)
    thread.start()

    def end() -> None:
        signal.set_wakeup_fd(before)
        guard.is_over.set()
        os.close(send)
        thread.join()
        os.close(receive)

    return end


@dataclass
class _Guard:
    receive: int
    launcher_pid: int | None
    reports: Path | None
    last_words: Callable[[], object]
    is_over: threading.Event = field(default_factory=threading.Event)
    # Number of the first signal, and the time of its arrival or of the end of the step it was postponed to.
    _signum: int = 0
    _since: float = 0.0
    _waits: bool = False

    def watch(self) -> None:
        while not self.is_over.is_set():
            if self._is_to_end() and not self.is_over.wait(GRACE_SECONDS):
                self.last_words()
                os._exit(128 + self._signum)

    def _is_to_end(self) -> bool:
        readable, _, _ = select.select([self.receive], [], [], _POLL_SECONDS)
        now, postponed = time.monotonic(), current()
        if readable:
            # Empty after the end of the guard.
            received = os.read(self.receive, 1)
            return bool(received) and self._takes(received[0], now, postponed)
        if self.launcher_pid is not None and os.getppid() != self.launcher_pid:
            # The launcher was killed. Its user expects that all of its processes end.
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

    def _takes(self, signum: int, now: float, postponed: Postponed | None) -> bool:
        if signum not in ENDING_SIGNALS:
            return False
        if not self._signum:
            self._signum, self._since, self._waits = signum, now, postponed is not None
            return postponed is None
        return now - self._since >= SAME_REQUEST_SECONDS

    def _end_at_once(self, signum: int, postponed: Postponed | None) -> bool:
        if postponed is not None:
            postponed.abandon()
        self._signum = signum
        os.kill(os.getpid(), signum)
        return True
