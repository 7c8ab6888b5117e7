"""Run a command while busy processes compete with it for the cores: ``under_load.py 50 COMMAND ...``.

No test may fail because it is slow. ``make test-under-load`` checks this.

The busy processes are distributed over ``NUM_SESSIONS`` sessions, as if other users had started them. If Linux's
scheduler groups processes by session (``/proc/sys/kernel/sched_autogroup_enabled``), all sessions with work get the
same time: the command gets a share of 1 / (``NUM_SESSIONS`` + 1), and so does each program that a test starts, which
has its own session. If the 50 processes were in the command's own session, it would get 1/51 of the session's share,
which no other user could cause. Without groups, each process gets about 1/51.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

NUM_SESSIONS = 5

# The first process of a session starts the others. Each process watches its parent, so that all of them end with this
# program, for any reason.
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
    """Run ``command`` next to ``num_busy`` busy processes, end them by their session ids, and return the exit code."""
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
            # The first process of a session also leads a process group, which contains all processes it started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session.pid, signal.SIGKILL)
        for session in sessions:
            session.wait()


def main() -> int:
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal() or int(sys.argv[1]) < 1:
        print(f"{sys.argv[0]}: the number of busy processes and a command, please", file=sys.stderr)
        return 2
    # Handle SIGTERM like Ctrl-C, so that the busy processes are ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return under_load(int(sys.argv[1]), sys.argv[2:])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
