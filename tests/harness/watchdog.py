"""Waits of tests: for the event itself, however slow the machine is, with one generous limit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

WATCHDOG_SECONDS = float(os.environ.get("TEST_WATCHDOG_SECONDS", "600"))
"""Seconds after which a wait fails. Only a hang should reach this limit; to debug a hang, make it short."""


def wait_until(happened: Callable[[], bool], what: str, *, report: Callable[[], str] = str) -> None:
    """Wait until a condition holds."""
    __tracebackhide__ = True
    end = time.monotonic() + WATCHDOG_SECONDS
    while not happened():
        if time.monotonic() > end:
            raise AssertionError(f"waited {WATCHDOG_SECONDS:g} s in vain until {what}\n{report()}".rstrip())
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """True if a process runs. A zombie, which has ended but was not waited for by its parent, is not alive."""
    return states(pid)[:1] not in ("", "Z", "X")


def is_at_work(pid: int | None) -> bool:
    """True if a thread of a process or of one of its descendants runs, waits for a core, or reads from a disk."""
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
    """Wait until these processes have ended."""
    __tracebackhide__ = True
    wait_until(lambda: not any(map(is_alive, pids)), f"processes {', '.join(map(str, pids))} end")


def states(pid: int) -> str:
    """Return the state of each thread of a process, the main thread first, as letters of ``ps``; empty if it ended.

    S sleeps, for example in a collective; R runs or waits for a core; T is stopped; Z and X have ended.
    """
    found = ""
    # A thread or the process may end in the meantime.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: task.name != str(pid)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += task.joinpath("stat").read_text().rpartition(")")[2].split()[0]
    return found
