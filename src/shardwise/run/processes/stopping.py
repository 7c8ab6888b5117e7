"""A signal that asks a run to end: the step at work is done and saved first, and a further signal ends it at once.

Signals are the process's, and so is the one object here that says what they do at the moment.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ENDING_SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if name in signal.Signals.__members__
)
"""The signals that ask a process to end, as far as this system has them."""

SAME_REQUEST_SECONDS = 1.0
"""Within this time a further signal is the first one come twice: from the terminal and from torchrun, or two shells."""

_LEAST_SECONDS = 25.0
_STEPS = 3


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end; a KeyboardInterrupt, so that code which tidies up after Ctrl-C does here too.

    Attributes:
        signal: the signal.
        exit_code: what shells report for it, 128 plus its number.
        agreed: every rank ends alike, after its step.
        note: what to say about it.
    """

    def __init__(self, signum: int, *, agreed: bool = False) -> None:
        self.signal = signal.Signals(signum)
        self.exit_code = 128 + signum
        self.agreed = agreed
        self.note = ""
        super().__init__(f"ended by {self.signal.name}")


class Postponed:
    """Signals wait for the end of the step.

    Attributes:
        signum: of the first signal that came to this process; 0 if none did.
        agreed: every rank knows that the run ends.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.agreed = False
        self._hurried = True
        self._since = 0.0
        self._slowest_step = 0.0
        self._abandoned = False

    def step_took(self, seconds: float) -> None:
        """Tell how long a step was: one that has begun is given a few times as long."""
        self._slowest_step = max(self._slowest_step, seconds)

    def receive(self, signum: int) -> bool:
        """Take note of a signal; True if it is to end the process at once."""
        if self.signum == 0 and not self._abandoned:
            self.signum, self._since = signum, time.monotonic()
            return False
        return self._abandoned or time.monotonic() - self._since >= SAME_REQUEST_SECONDS

    def abandon(self) -> None:
        """Wait no longer: the next signal ends the process at once."""
        self._abandoned = True

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """Within, the process takes the time it needs: a checkpoint is written, or held-out text measured."""
        self._hurried = False
        try:
            yield
        finally:
            self._hurried = True

    def overdue(self) -> bool:
        """Whether the step has had its time since the first signal: 25 seconds, or three times the slowest step.

        Most schedulers kill 30 seconds after SIGTERM.
        """
        if self.signum == 0 or not self._hurried:
            return False
        return time.monotonic() - self._since > max(_LEAST_SECONDS, _STEPS * self._slowest_step)


@contextlib.contextmanager
def handling_signals(handle: Callable[[int, FrameType | None], object]) -> Iterator[dict[signal.Signals, Any]]:
    """Within, ``handle`` handles the ending signals; yields what did so before.

    Those that are ignored (``nohup``) stay so. Nothing changes outside of the main thread, where Python handles none.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {each: signal.getsignal(each) for each in ENDING_SIGNALS}
        # None stands for a handler that was not set from Python, which cannot be put back.
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
    """What makes signals wait now; None if they end the process at once. For any thread."""
    return _current


@contextlib.contextmanager
def signals_postponed() -> Iterator[Postponed]:
    """Within, the first SIGINT, SIGTERM or SIGHUP is noted, for the end of the step; a further one does what it did.

    Signals that are ignored (``nohup``) stay so. One that came and was not acted upon takes effect at the end. Outside
    of the main thread, where Python handles no signals, they do what they did.
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


def way_on(checkpoint: Path | None) -> str:
    """How to go on after a run that ended early.

    Args:
        checkpoint: its newest; None if there is none.
    """
    if checkpoint is None:
        return "no checkpoint was saved; run the same command again to start anew"
    return f"the last checkpoint is {checkpoint}; run the same command with --resume auto to go on from it"
