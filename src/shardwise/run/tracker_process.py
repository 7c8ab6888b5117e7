"""The process of one tracker, which follows a run's metrics; see ``shardwise.run.tracking``.

It prints lines for the user to its standard output; all output of the tracker's library goes to a log.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import pickle
import select
import signal
import sys
import threading
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from shardwise.core.errors import ShardwiseError
from shardwise.core.processes import call_in_fresh_process

_POLL_SECONDS = 0.5
_LONGEST_REASON = 300
_PROJECT = "shardwise"
# MLflow takes at most this many metrics at once.
_METRICS_AT_ONCE = 1000
_LONGEST_PARAMETER = 500

Row = tuple[int, dict[str, float]]


class Tracker(Protocol):
    """A run of a tracking library.

    Attributes:
        run_id: identity of the run in the library, for a run that continues it.
        place: where the user finds the run.
        replaces_steps: True if a step that is logged again replaces the earlier one; else both would stay.
    """

    run_id: str
    place: str
    replaces_steps: bool

    def __init__(self, request: Mapping[str, Any], run_id: str | None) -> None: ...

    def log(self, rows: Sequence[Row]) -> None:
        """Add metrics of steps."""

    def add_text(self, name: str, text: str) -> None:
        """Add a text, such as the plan."""

    def end(self, status: str) -> None:
        """End the run: it ``"finished"``, or was ``"interrupted"``, or ``"failed"``."""


class Wandb:
    """A run of Weights & Biases. ``step`` is a metric, because rows without metrics count in its own steps too."""

    replaces_steps = False

    def __init__(self, request: Mapping[str, Any], run_id: str | None) -> None:
        import wandb

        self.run_id = run_id or uuid.uuid4().hex[:8]
        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        options = {"project": project, "name": request["name"], "id": self.run_id, "resume": "allow"}
        # Statistics of the machine are those of the training process.
        self._run = wandb.init(**options, settings={"x_stats_pid": os.getppid()})
        self._run.config.update(request["settings"], allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.place = self._run.url or f"offline; send it with: wandb sync {Path(self._run.dir).parent}"

    def log(self, rows: Sequence[Row]) -> None:
        for step, values in rows:
            self._run.log({"step": step, **values})

    def add_text(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def end(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class Trackio:
    """A run of Trackio, which continues a run by its name."""

    replaces_steps = False

    def __init__(self, request: Mapping[str, Any], run_id: str | None) -> None:
        import trackio

        self._trackio = trackio
        self.run_id = run_id or f"{request['name']}-{uuid.uuid4().hex[:6]}"
        trackio.init(_PROJECT, name=self.run_id, config=request["settings"], resume="allow", embed=False)
        self.place = f"run {self.run_id}; see it with: trackio show --project {_PROJECT}"

    def log(self, rows: Sequence[Row]) -> None:
        for step, values in rows:
            self._trackio.log(values, step=step)

    def add_text(self, name: str, text: str) -> None:
        self._trackio.log({name: self._trackio.Markdown(f"```\n{text}\n```")})

    def end(self, status: str) -> None:
        self._trackio.finish()


class Mlflow:
    """A run of MLflow."""

    replaces_steps = False

    def __init__(self, request: Mapping[str, Any], run_id: str | None) -> None:
        import mlflow

        self._mlflow = mlflow
        if run_id is None and "MLFLOW_EXPERIMENT_NAME" not in os.environ and "MLFLOW_EXPERIMENT_ID" not in os.environ:
            mlflow.set_experiment(_PROJECT)
        run = mlflow.start_run(run_id=run_id, run_name=None if run_id else request["name"])
        self.run_id = run.info.run_id
        # A parameter keeps its first value. What a resumed run has changed is in the file.
        if run_id is None:
            flat = dict(_flat(request["settings"]))
            mlflow.log_params({name: str(value)[:_LONGEST_PARAMETER] for name, value in flat.items()})
        mlflow.log_dict(request["settings"], f"settings-{request['first_step']}.json")
        self.place = f"run {self.run_id} at {mlflow.get_tracking_uri()}"

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis()
        metrics = [Metric(name, value, now, step) for step, values in rows for name, value in values.items()]
        for first in range(0, len(metrics), _METRICS_AT_ONCE):
            self._mlflow.MlflowClient().log_batch(self.run_id, metrics[first : first + _METRICS_AT_ONCE])

    def add_text(self, name: str, text: str) -> None:
        self._mlflow.log_text(text, f"{name}.txt")

    def end(self, status: str) -> None:
        self._mlflow.end_run({"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[status])


class Tensorboard:
    """Files for TensorBoard, in ``tensorboard`` next to the metrics."""

    replaces_steps = True

    def __init__(self, request: Mapping[str, Any], run_id: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.place = self.run_id = str(Path(request["folder"]).parent / "tensorboard")
        self._first_step = request["first_step"]
        # TensorBoard drops what was logged at this step and later.
        self._writer = SummaryWriter(self.place, purge_step=self._first_step)
        self.add_text("settings", json.dumps(request["settings"], indent=2))

    def log(self, rows: Sequence[Row]) -> None:
        for step, values in rows:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def add_text(self, name: str, text: str) -> None:
        self._writer.add_text(name, f"```\n{text}\n```", self._first_step)

    def end(self, status: str) -> None:
        self._writer.close()


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow, "tensorboard": Tensorboard}
"""Classes of trackers by name, which is that of the package, and of the extra that installs it."""


def main() -> None:
    """Track a run: read the request from standard input, and follow the metrics until standard input ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        # The end of standard input ends this process, also after a signal to all processes of a job.
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.nice(10)
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", buffering=1)
    request = pickle.load(orders)
    folder, name = Path(request["folder"]), request["tracker"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.log").open("a") as log, open(os.devnull) as nothing:
        for number, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), number)
    with (folder / f"{name}.json").open("a+") as state:
        # The process of an earlier part of the run may not be done yet.
        fcntl.flock(state, fcntl.LOCK_EX)
        _Following(request, orders, answers, state).run()


@dataclass
class _Following:
    request: Mapping[str, Any]
    orders: IO[bytes]
    answers: IO[str]
    state: IO[str]
    _is_over: threading.Event = field(default_factory=threading.Event)
    _has_failed: bool = False
    _plan: str = ""

    def run(self) -> None:
        """Follow the run to its end."""
        name, first_step = self.request["tracker"], self.request["first_step"]
        threading.Thread(target=self._wait_for_end, daemon=True).start()
        spec = importlib.util.find_spec(name)
        # A folder of that name is a package too, without a file.
        if spec is None or spec.origin is None:
            self._say(f"not tracked, because it is not installed: pip install 'shardwise[{name}]'")
            return
        known = self._read_state() if first_step else {}
        tracker: Tracker | None = None
        with self._failures("not tracked"):
            tracker = TRACKERS[name](self.request, known.get("run_id"))
            self._say(tracker.place)
        if tracker is None:
            return
        planning = threading.Thread(target=self._make_plan, daemon=True)
        planning.start()
        sent: dict[str, Any] = {"plan": "", "next": 0} | known | {"run_id": tracker.run_id}
        for rows in self._rows(min(first_step, sent["next"]) if tracker.replaces_steps else sent["next"]):
            with self._failures("some metrics are not tracked"):
                tracker.log(rows)
            sent["next"] = rows[-1][0] + 1
            self._add_plan(tracker, sent)
        end = pickle.loads(self.orders.read() or pickle.dumps({"status": "failed", "report": ""}))
        planning.join(self.request["plan_seconds"])
        self._add_plan(tracker, sent)
        self._add_text(tracker, "report", end["report"])
        with self._failures("its run is not ended"):
            tracker.end(end["status"])

    def _add_plan(self, tracker: Tracker, sent: dict[str, Any]) -> None:
        """Add the plan if it is another than that in ``sent``, and write ``sent``, for a run that resumes."""
        if self._plan and self._plan != sent["plan"]:
            self._add_text(tracker, "plan", self._plan)
            sent["plan"] = self._plan
        self._write_state(sent)

    def _add_text(self, tracker: Tracker, name: str, text: str) -> None:
        with self._failures("plan and report are not tracked"):
            if text:
                tracker.add_text(name, text)

    def _rows(self, first: int) -> Iterator[list[Row]]:
        """Yield rows from step ``first`` on, several at a time, until the input ends."""
        if self.request["metrics"] is None:
            yield [(0, self.request["values"])]
            return
        with open(self.request["metrics"], encoding="utf-8") as file:
            rest, is_over = "", False
            while True:
                *lines, rest = (rest + file.read()).split("\n")
                rows = [(row.pop("step"), row) for row in map(json.loads, lines)]
                if rows := [row for row in rows if row[0] >= first]:
                    yield rows
                if is_over:
                    return
                is_over = self._is_over.wait(_POLL_SECONDS)

    def _wait_for_end(self) -> None:
        """Wait until the input ends, and then limit the time of this process, in which the library may hang."""
        select.select([self.orders], [], [])
        signal.alarm(self.request["end_seconds"])
        self._is_over.set()

    def _make_plan(self) -> None:
        if (plan := self.request["plan"]) is not None:
            try:
                self._plan = call_in_fresh_process("shardwise.plan.advice:plan_table", plan)
            except (ShardwiseError, RuntimeError) as error:
                print(f"no plan: {error}", file=sys.stderr, flush=True)

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """Report the first failure in such a block."""
        try:
            yield
        except (Exception, SystemExit) as error:  # another's library can fail in any way
            traceback.print_exc()
            if not self._has_failed:
                self._has_failed = True
                reason = " ".join(str(error).split())[:_LONGEST_REASON]
                log = f"{self.request['folder']}/{self.request['tracker']}.log"
                self._say(f"{what}: {type(error).__name__}: {reason}; see {log}")

    def _say(self, text: str) -> None:
        # The run may have ended.
        with suppress(OSError):
            print(text, file=self.answers, flush=True)

    def _read_state(self) -> dict[str, Any]:
        self.state.seek(0)
        try:
            return dict(json.loads(self.state.read()))
        except ValueError:
            return {}

    def _write_state(self, value: Mapping[str, Any]) -> None:
        self.state.truncate(0)
        self.state.write(json.dumps(value))
        self.state.flush()
