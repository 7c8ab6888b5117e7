"""Run a command while processes that only compute compete with it for the cores: ``under_load.py 50 COMMAND ...``.

No test may fail for being slow. ``make test-under-load`` shows it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

# They end with this program, whatever ends it.
_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(10**6))"


def under_load(num_busy: int, command: Sequence[str]) -> int:
    """Run ``command`` beside ``num_busy`` busy processes, and end these by their ids; its exit code."""
    busy = [subprocess.Popen([sys.executable, "-S", "-c", _BUSY, str(os.getpid())]) for _ in range(num_busy)]
    print(f"{num_busy} busy processes, {busy[0].pid} to {busy[-1].pid}, on {os.cpu_count()} cores", flush=True)
    try:
        return subprocess.call(command)
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


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
