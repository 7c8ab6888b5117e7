"""Run a command while processes that only compute compete with it for the cores: ``under_load.py 50 COMMAND ...``.

No test may fail for being slow. ``make test-under-load`` shows it.

The busy processes are shared out among ``NUM_SESSIONS`` sessions, as if other users had started them. Linux, where its
scheduler groups processes by session (``/proc/sys/kernel/sched_autogroup_enabled``), gives each session that has work
the same time: the command gets one part of ``NUM_SESSIONS + 1``, and each program that a test starts, which has a
session of its own, gets as much. In the command's own session the 50 would leave it one part in 51 of its share, which
is what no other user can do to it. Where sessions are not grouped, each process gets one part in 51 or so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

NUM_SESSIONS = 5

# The first process of a session starts the others. Each looks after its parent: they end with this program, whatever
# ends it.
_BUSY = """
import os, sys
parent, num_others = map(int, sys.argv[1:])
first = os.getpid()
for _ in range(num_others):
    if os.fork() == 0:
        parent = first
        break
while os.getppid() == parent:
    sum(range(10**6))
"""


def under_load(num_busy: int, command: Sequence[str]) -> int:
    """Run ``command`` beside ``num_busy`` busy processes, and end these by their sessions' ids; its exit code."""
    sizes = [len(range(first, num_busy, NUM_SESSIONS)) for first in range(min(num_busy, NUM_SESSIONS))]
    sessions = [
        subprocess.Popen([sys.executable, "-S", "-c", _BUSY, str(os.getpid()), str(size - 1)], start_new_session=True)
        for size in sizes
    ]
    ids = ", ".join(str(session.pid) for session in sessions)
    print(f"{num_busy} busy processes in the sessions {ids}, on {os.cpu_count()} cores", flush=True)
    try:
        return subprocess.call(command)
    finally:
        for session in sessions:
            # A session's first process leads a process group too, and all that it started are in it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session.pid, signal.SIGKILL)
        for session in sessions:
            session.wait()


def main() -> int:
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal() or int(sys.argv[1]) < 1:
        print(f"{sys.argv[0]}: the number of busy processes and a command, please", file=sys.stderr)
        return 2
    # As Ctrl-C does, so that the busy processes are ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return under_load(int(sys.argv[1]), sys.argv[2:])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
