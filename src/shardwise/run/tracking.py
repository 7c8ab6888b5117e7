"""Send a run's metrics to experiment trackers, each in a process that follows ``metrics.jsonl``.

The run writes its metrics once, to its own file. A tracker's process reads them there, so that a tracker that is slow,
hangs or crashes neither stops nor slows the run, and catches up when the run resumes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PROGRAM = "from shardwise.run.tracker_process import main; main()"
# Time that a tracker has after the end of the run; then its process is killed.
_END_SECONDS = 30
# Of them, for the plan of a run that ends before it is there.
_PLAN_SECONDS = 10
# The launcher ends the ranks some seconds after the first of them has ended on a signal.
_INTERRUPTED_SECONDS = 3.0


class Tracking:
    """The trackers of a run, as a context on the rank that tracks; its end waits a limited time for them.

    Args:
        names: names of trackers.
        folder: folder for the trackers' logs and their places in the run.

    Attributes:
        report: text of the run's result, which the trackers get at the end.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.report = ""
        self._names, self._folder = names, folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        name: str,
        settings: Mapping[str, Any],
        *,
        metrics: Path | None = None,
        first_step: int = 0,
        values: Mapping[str, float] | None = None,
        plan: bytes | None = None,
    ) -> None:
        """Start a process for each tracker.

        Args:
            name: name of the run.
            settings: settings of the run, as JSON values.
            metrics: file of metrics that the trackers follow.
            first_step: first step of this part of the run; if not 0, trackers continue their runs.
            values: metrics of step 0, instead of the file.
            plan: pickled arguments of ``shardwise.plan.advice.plan_table``.
        """
        request = {
            "folder": os.path.abspath(self._folder),
            "name": name,
            "settings": dict(settings),
            "metrics": None if metrics is None else os.path.abspath(metrics),
            "first_step": first_step,
            "values": dict(values or {}),
            "plan": plan,
            "end_seconds": _END_SECONDS,
            "plan_seconds": _PLAN_SECONDS,
        }
        command = [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {_PROGRAM}"]
        pipe = subprocess.PIPE
        for tracker in self._names:
            try:
                # In a new session the process gets no Ctrl-C of the terminal.
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
                assert process.stdin is not None
                assert process.stdout is not None
                self._processes[tracker] = process
                os.set_blocking(process.stdout.fileno(), False)
                process.stdin.write(pickle.dumps(request | {"tracker": tracker}))
                process.stdin.flush()
            except OSError as error:
                _note(tracker, f"does not start: {error.strerror or error}")

    def show_notes(self) -> None:
        """Print what the trackers have reported since: where the run is, and the first failure of each."""
        for tracker, process in self._processes.items():
            assert process.stdout is not None
            for line in (process.stdout.read() or b"").decode(errors="replace").splitlines():
                _note(tracker, line)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        status = "finished" if kind is None else "interrupted" if is_interrupted else "failed"
        for process in self._processes.values():
            with contextlib.suppress(OSError), process.stdin as pipe:  # type: ignore[union-attr]  # a pipe, see start
                pipe.write(pickle.dumps({"status": status, "report": self.report}))
        # After a failure the other ranks, and the user, wait for the message. The processes end by themselves.
        limit = {"finished": _END_SECONDS + 5.0, "interrupted": _INTERRUPTED_SECONDS, "failed": 0.0}[status]
        for tracker, process in self._processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
                if code < 0 and status == "finished":
                    late = f"was not done {_END_SECONDS} s after the run"
                    how = late if code == -signal.SIGALRM else f"was ended by {signal.Signals(-code).name}"
                    _note(tracker, f"{how}, and lacks metrics or the end; see {self._folder / tracker}.log")
        self.show_notes()
        for process in self._processes.values():
            process.stdout.close()  # type: ignore[union-attr]


def track_evaluation(
    names: Sequence[str], checkpoint: str | os.PathLike[str], settings: Mapping[str, Any], values: Mapping[str, float]
) -> None:
    """Send the results of an evaluation to trackers, each as a run of one step; call it on one rank."""
    if names:
        with Tracking(names, Path("runs/eval/trackers")) as tracking:
            given = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
            tracking.start(f"eval {Path(checkpoint).name}", {"checkpoint": str(checkpoint)} | given, values=values)


def _note(tracker: str, text: str) -> None:
    print(f"note   {tracker}: {text}", flush=True)
