"""How tests wait: for the event itself, however slow the machine is, under one generous limit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

WATCHDOG_SECONDS = float(os.environ.get("TEST_WATCHDOG_SECONDS", "600"))
"""After this many seconds a wait has failed. Only a hang should ever meet it; while you look for one, make it short."""


def wait_until(happened: Callable[[], bool], what: str, *, report: Callable[[], str] = str) -> None:
    """Wait until a condition holds.

    Args:
        happened: the condition; cheap, since it is asked a hundred times a second.
        what: it, in words, for the message.
        report: what else is to be said when it does not come to hold; called before anything is ended.

    Raises:
        AssertionError: the watchdog ended the wait.
    """
    __tracebackhide__ = True
    end = time.monotonic() + WATCHDOG_SECONDS
    while not happened():
        if time.monotonic() > end:
            raise AssertionError(f"waited {WATCHDOG_SECONDS:g} s in vain until {what}\n{report()}".rstrip())
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs. One that has ended is not alive, though its parent may not have asked for it yet."""
    return states(pid)[:1] not in ("", "Z", "X")


def is_at_work(pid: int | None) -> bool:
    """Whether a thread of a process, or of one that it started, runs, waits for a core, or reads from a disk."""
    if pid is None:
        return False
    if not set(states(pid)).isdisjoint("RD"):
        return True
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            if any(map(is_at_work, map(int, task.joinpath("children").read_text().split()))):
                return True
    return False


def wait_until_ended(*pids: int) -> None:
    """Wait until these processes have ended by themselves."""
    __tracebackhide__ = True
    wait_until(lambda: not any(map(is_alive, pids)), f"processes {', '.join(map(str, pids))} end")


def states(pid: int) -> str:
    """What each thread of a process does, the main one first, a letter each as in ``ps``; empty if there is none.

    S sleeps, as one in a collective does; R runs, or waits for a core to run on; T is stopped; Z and X have ended.
    """
    found = ""
    # A thread, or the process, may end meanwhile.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: task.name != str(pid)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += task.joinpath("stat").read_text().rpartition(")")[2].split()[0]
    return found
