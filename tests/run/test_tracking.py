"""Trackers get what a run writes, and do nothing to it: fakes of their packages record, raise and hang."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness.program import Program
from run.run_processes import run_command
from run.tiny import tiny_settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.run import tracking
from shardwise.run.build import describe
from shardwise.run.commands.harness_tasks import _numbers
from shardwise.run.metrics import MetricsWriter, read_metrics
from shardwise.run.tracking import Tracking

# A package whose functions record their calls, and fail as the environment says: FAULT=name:place:kind.
FAKE = """
import json, os, signal, sys, time
def _do(place, *args, **options):
    with open(os.environ["RECORDED"], "a") as file:
        print(json.dumps([NAME, place, args, options], default=str), file=file)
    print("noise of a library")
    fault = os.environ.get("FAULT", "::").split(":")
    if fault[0] == NAME and fault[1] == place:
        if fault[2] == "raise": raise RuntimeError(f"no network\\nat {place}")
        if fault[2] == "exit": sys.exit(3)
        if fault[2] == "die": os.kill(os.getpid(), signal.SIGKILL)
        if fault[2] == "hang": time.sleep(1000)
class _Thing:
    url, dir, id = None, "/somewhere/files", "id"
    summary = config = None
    def __init__(self, prefix=""): self._prefix = prefix
    def __getattr__(self, name): return lambda *args, **options: _do(self._prefix + name, *args, **options)
    def __setitem__(self, name, value): _do("summary", name, value)
_do("import")
"""
WANDB = """
NAME = "wandb"
{fake}
def init(**options):
    _do("init", **options)
    run = _Thing()
    run.summary, run.config = _Thing(), _Thing("config.")
    return run
"""
TRACKIO = """
NAME = "trackio"
{fake}
from functools import partial
init, log, finish, Markdown = partial(_do, "init"), partial(_do, "log"), partial(_do, "finish"), str
"""
MLFLOW = """
NAME = "mlflow"
{fake}
import types
entities, utils, clock = (types.ModuleType(f"mlflow.{{name}}") for name in ("entities", "utils", "utils.time"))
sys.modules |= {{"mlflow.entities": entities, "mlflow.utils": utils, "mlflow.utils.time": clock}}
entities.Metric, clock.get_current_time_millis = (lambda name, value, at, step: [step, name, value]), lambda: 0
class MlflowClient:
    def log_batch(self, run_id, metrics): _do("log", run_id, metrics)
def start_run(**options):
    _do("init", **options)
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=options["run_id"] or "new"))
def end_run(status): _do("finish", status)
def __getattr__(name): return lambda *args: _do(name, *args)
"""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the fakes for this process and its children; return the file of their calls."""
    for name, text in {"wandb": WANDB, "trackio": TRACKIO, "mlflow": MLFLOW}.items():
        (tmp_path / "fakes" / name).mkdir(parents=True)
        (tmp_path / "fakes" / name / "__init__.py").write_text(text.format(fake=FAKE))
    monkeypatch.syspath_prepend(tmp_path / "fakes")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"))
    monkeypatch.setenv("RECORDED", str(tmp_path / "recorded"))
    return tmp_path / "recorded"


def find_fakes() -> None:
    """Let a rank that was forked find the fakes, as PYTHONPATH lets a new process."""
    sys.path.insert(0, os.environ["PYTHONPATH"])


def calls(recorded: Path, name: str, *places: str) -> list[Any]:
    """Return the arguments of a fake's calls at some places, positional ones and those by name."""
    lines = map(json.loads, recorded.read_text().splitlines())
    return [[args, options] for of, place, args, options in lines if of == name and place in places]


def track(folder: Path, names: list[str], steps: range, *, before_end: float = 0.0, tp: int | None = None) -> None:
    """Write metrics of ``steps``, with trackers, as a run does; with the plan of a run if ``tp`` is given."""
    settings = tiny_settings(folder, tp=tp or 1)
    plan = None if tp is None else pickle.dumps((settings, describe(settings.model, 300), "cpu", tp))
    with Tracking(names, folder / "trackers") as tracked, MetricsWriter(folder, steps.start) as metrics:
        given = {"training": {"steps": 5}}
        tracked.start("mine", given, metrics=folder / "metrics.jsonl", first_step=steps.start, plan=plan)
        for step in steps:
            metrics.write(step, {"loss": float(steps.stop)})
            tracked.show_notes()
        time.sleep(before_end)
        tracked.report = "it is done"


def steps_of(recorded: Path, name: str) -> list[int]:
    if name == "mlflow":
        return [step for (_, metrics), _ in calls(recorded, name, "log") for step, _, _ in metrics]
    logged = [(args[0], options) for args, options in calls(recorded, name, "log")]
    return [options.get("step", values.get("step")) for values, options in logged if "loss" in values]


@pytest.mark.parametrize("kind", ["raise", "exit", "die"])
@pytest.mark.parametrize("place", ["import", "init", "log", "finish"])
def test_a_tracker_that_fails_is_mentioned_once(
    tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    place: str, kind: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAULT", f"trackio:{place}:{kind}")
    track(tmp_path, ["trackio"], range(4), before_end=1.2)
    notes = [line for line in capsys.readouterr().out.splitlines() if "see it with" not in line]
    assert len(notes) == 1
    reason = {"raise": f"RuntimeError: no network at {place}", "exit": "SystemExit: 3", "die": "was ended by SIGKILL"}[
        kind
    ]
    assert reason in notes[0]
    assert str(tmp_path / "trackers" / "trackio.log") in notes[0]


@pytest.mark.parametrize("dies", [True, False])
def test_a_tracker_that_lost_metrics_gets_them_when_the_run_resumes(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    monkeypatch.setenv("FAULT", "wandb:init:die" if dies else "")
    track(tmp_path, ["wandb"], range(3))
    assert steps_of(recorded, "wandb") == ([] if dies else [0, 1, 2])
    monkeypatch.delenv("FAULT")
    track(tmp_path, ["wandb"], range(3, 5))
    assert steps_of(recorded, "wandb") == [0, 1, 2, 3, 4]
    if not dies:
        # Another run in the same folder is another one for the tracker.
        track(tmp_path, ["wandb"], range(1))
        first, resumed, other = [options["id"] for _, options in calls(recorded, "wandb", "init")]
        assert first == resumed != other
        assert steps_of(recorded, "wandb") == [0, 1, 2, 3, 4, 0]


def test_a_resumed_run_repeats_no_steps(tmp_path: Path, recorded: Path) -> None:
    names = ["wandb", "trackio", "mlflow"]
    for steps in (range(5), range(3, 7)):
        track(tmp_path, names, steps)
    assert {name: steps_of(recorded, name) for name in names} == {name: [*range(7)] for name in names}
    # What a library needs to go on with a run, and what it does not take twice.
    for name in ("wandb", "trackio"):
        assert [options["resume"] for _, options in calls(recorded, name, "init")] == ["allow", "allow"]
    update = [[{"training": {"steps": 5}}], {"allow_val_change": True}]
    assert calls(recorded, "wandb", "config.update") == [update, update]
    assert calls(recorded, "wandb", "define_metric") == [[["step"], {}], [["*"], {"step_metric": "step"}]] * 2
    assert calls(recorded, "mlflow", "set_experiment") == [[["shardwise"], {}]]
    assert calls(recorded, "mlflow", "log_params") == [[[{"training.steps": "5"}], {}]]
    assert [args for args, _ in calls(recorded, "mlflow", "log_text")] == [["it is done", "report.txt"]] * 2


@pytest.mark.slow
def test_tensorboard_has_the_last_values_of_repeated_steps_and_one_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_END_SECONDS", 1000)
    monkeypatch.setattr(tracking, "_PLAN_SECONDS", 1000)
    for steps in (range(5), range(3, 7)):
        track(tmp_path, ["tensorboard"], steps, tp=1)
    shown = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    shown.Reload()
    losses = [(event.step, event.value) for event in shown.Scalars("loss")]
    assert losses == [(step, 5.0 if step < 3 else 7.0) for step in range(7)]
    steps_of_texts = {
        name: [event.step for event in shown.Tensors(f"{name}/text_summary")] for name in ("settings", "plan", "report")
    }
    assert steps_of_texts == {"settings": [0, 3], "plan": [0], "report": [0, 3]}


def wait_for_step(recorded: Path, name: str, step: int) -> None:
    while not recorded.exists() or step not in steps_of(recorded, name):
        time.sleep(0.02)


def test_what_is_written_last_is_tracked_and_how_a_run_ends(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More metrics than MLflow takes at once, after those that the tracker has read, and then an interruption."""
    monkeypatch.setattr(tracking, "_INTERRUPTED_SECONDS", None)
    many = {f"metric {number}": float(number) for number in range(1500)}

    def interrupted() -> None:
        with Tracking(["mlflow"], tmp_path / "trackers") as tracked, MetricsWriter(tmp_path, 0) as metrics:
            tracked.start("mine", {}, metrics=tmp_path / "metrics.jsonl")
            metrics.write(0, {"loss": 1.0})
            wait_for_step(recorded, "mlflow", 0)
            metrics.write(1, many)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert steps_of(recorded, "mlflow") == [0] + [1] * len(many)
    assert calls(recorded, "mlflow", "finish") == [[["KILLED"], {}]]


def test_a_run_that_fails_is_tracked_as_one(tmp_path: Path, recorded: Path) -> None:
    tracked = Tracking(["wandb", "mlflow"], tmp_path / "trackers")

    def failing() -> None:
        with tracked:
            tracked.start("mine", {}, values={"loss": 1.0})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    for process in tracked._processes.values():
        process.wait()
    assert calls(recorded, "wandb", "finish") == [[[], {"exit_code": 1}]]
    assert calls(recorded, "mlflow", "finish") == [[["FAILED"], {}]]


def test_a_run_that_is_killed_is_tracked_to_its_end(tmp_path: Path, recorded: Path) -> None:
    """A line may be read when half of it is written, and signals to all processes of a job do not end the tracker."""
    metrics, tracked = tmp_path / "metrics.jsonl", Tracking(["mlflow"], tmp_path / "trackers")
    metrics.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    tracked.start("mine", {}, metrics=metrics)
    process = tracked._processes["mlflow"]
    wait_for_step(recorded, "mlflow", 0)
    assert os.getsid(process.pid) == process.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    with metrics.open("a") as file:
        file.write('ss": 2.0}\n')
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.close()
        assert process.wait() == 0
    assert steps_of(recorded, "mlflow") == [0, 1]
    assert calls(recorded, "mlflow", "finish") == [[["FAILED"], {}]]


@pytest.mark.parametrize("place", ["import", "init", "log", "finish"])
def test_a_tracker_that_hangs_is_left(
    tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(tracking, "_END_SECONDS", 1)
    monkeypatch.setenv("FAULT", f"trackio:{place}:hang")
    track(tmp_path, ["trackio"], range(4))
    assert "trackio: was not done 1 s after the run" in capsys.readouterr().out


def test_a_tracker_that_is_not_installed_is_mentioned_with_its_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder of the name, such as wandb makes, is no installation.
    (tmp_path / "here" / "wandb").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "here")
    track(tmp_path, ["wandb"], range(1))
    assert capsys.readouterr().out == (
        "note   wandb: not tracked, because it is not installed: pip install 'shardwise[wandb]'\n"
    )


def test_an_evaluation_is_a_run_of_one_step(tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracking.track_evaluation((), "model", {}, {})
    assert not (tmp_path / "runs").exists()
    numbers = _numbers({"results": {"easy": {"acc,none": 0.5, "alias": "easy"}, "hard": {"acc,none": 0}}})
    assert numbers == {"easy/acc.none": 0.5, "hard/acc.none": 0.0}
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    tracking.track_evaluation(["mlflow"], "some/model", {"data": ("a", "b"), "long": "x" * 501}, numbers)
    assert calls(recorded, "mlflow", "set_experiment") == []
    assert steps_of(recorded, "mlflow") == [0, 0]
    assert [options["run_name"] for _, options in calls(recorded, "mlflow", "init")] == ["eval model"]
    assert calls(recorded, "mlflow", "log_params")[0][0] == [
        {"checkpoint": "some/model", "data": "['a', 'b']", "long": "x" * 500}
    ]


@pytest.mark.slow
def test_a_run_with_trackers_is_the_run_without(tmp_path: Path, recorded: Path) -> None:
    """One of two ranks tracks; a tracker hangs, and SIGTERM ends the run as ever; the resumed run is the run."""
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a short text\n" for number in range(400)))
    sizes = "--model.num-layers 1 --model.hidden-size 16 --model.vocab-size 300 --model.sequence-length 16 --tp 2"
    command = ["train", "--data", str(tmp_path / "text.txt"), "--device", "cpu", *sizes.split()]
    command += ["--training.steps", "30"]
    tracked = [*command, "--out", str(tmp_path / "tracked"), "--track", "wandb"]
    variables = {"SHARDWISE_CACHE": tmp_path / "cache", "FAULT": "trackio:log:hang"}
    with Program("-m", "shardwise", *tracked, "trackio", **variables) as program:
        program.wait_for_line("note   wandb: ")
        program.interrupt(signal.SIGTERM)
        done = program.finish(exit_code=143)
    assert "interrupted; the run stopped at step" in done.stderr
    fakes = {name: os.environ[name] for name in ("PYTHONPATH", "RECORDED")}
    run_command(tmp_path, 2, *tracked, "--resume", "auto", changed=find_fakes, **fakes)
    run_command(tmp_path, 2, *command, "--out", tmp_path / "plain")
    losses = [[row["loss"] for row in read_metrics(tmp_path / out / "metrics.jsonl")] for out in ("tracked", "plain")]
    assert losses[0] == losses[1]
    assert len(calls(recorded, "trackio", "log")) == 1, "it hung"
    first, *others = [options["id"] for _, options in calls(recorded, "wandb", "init")]
    assert others == [first], "one rank tracks, and the resumed run goes on in the same one"
    assert set(steps_of(recorded, "wandb")) == set(range(30))
