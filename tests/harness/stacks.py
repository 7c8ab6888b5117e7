"""Stacks of processes, from ``faulthandler``: each process writes its stack to its own file on ``STACK_SIGNAL``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from harness.watchdog import is_alive, states

STACK_SIGNAL = signal.SIGUSR1
_ANSWER_SECONDS = 30.0
_BUSY_SECONDS = 1.0


def stacks(files: Mapping[int, Path]) -> dict[int, str]:
    """Ask processes for their stacks."""
    begins, texts, waiting = {}, dict.fromkeys(files, ""), set()
    for pid, path in files.items():
        if path.exists() and is_alive(pid):
            begins[pid] = path.stat().st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)
                waiting.add(pid)
    begun = time.monotonic()
    changed = dict.fromkeys(waiting, begun)
    while waiting and time.monotonic() < begun + _ANSWER_SECONDS:
        time.sleep(0.02)
        for pid in list(waiting):
            # Read the state before the file: a process that sleeps at this time is not in the middle of writing.
            found, now = states(pid), time.monotonic()
            with files[pid].open("rb") as file:
                file.seek(begins[pid])
                text = file.read().decode(errors="replace")
            if text != texts[pid]:
                texts[pid], changed[pid] = text, now
            sleeps = "R" not in found and "D" not in found
            if "T" in found or not is_alive(pid) or (text and (sleeps or now > changed[pid] + _BUSY_SECONDS)):
                waiting.remove(pid)
    return texts
