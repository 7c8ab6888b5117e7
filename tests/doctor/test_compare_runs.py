"""Whether two runs differ by rounding or by a fault: ``shardwise compare``."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from doctor.planted import OUR_FAULTS
from harness.faults import Fault, plant
from run.compared_runs import TEXT
from run.run_processes import run_command, run_commands

from shardwise.doctor.compare_runs import OneRun, _metrics
from shardwise.doctor.comparison import compare
from shardwise.doctor.repeating import Repetition

STEPS = 6
SIZES = (
    *("--model.num-layers", "2", "--model.hidden-size", "32", "--model.num-heads", "4", "--device", "cpu"),
    *("--model.sequence-length", "24", "--model.vocab-size", "301", "--training.global-batch-size", "4"),
    *("--training.steps", str(STEPS), "--training.save-every", "2", "--training.keep-checkpoints", "9"),
)
BACKWARD = "the loss of step 0 is right, and its gradient norm is wrong: the backward, or a sum of it"
TP = ("--tp", "2", "--sequence-parallel")


def train(folder: Path, name: str, *arguments: str, fault: Fault | None = None) -> Path:
    text = folder / "text.txt"
    text.write_bytes(TEXT.read_bytes()[:20_000])
    command = ("train", "--data", text, "--out", folder / name, *SIZES, *arguments)
    changed = None if fault is None else partial(plant, fault)
    run_command(folder, 2 if "--tp" in arguments else 1, *command, changed=changed)
    return folder / name


def compared(folder: Path, one: Path, other: Path, *, exit_code: int) -> list[str]:
    ((code, printed, error),) = run_commands(folder, [("compare", one, other)])
    assert code == exit_code, error
    return printed.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder):
    return train(folder, "one")


@pytest.fixture(scope="module")
def parallel(folder):
    return train(folder, "parallel", *TP)


@pytest.mark.slow
def test_rounding(folder, one, parallel):
    first, *lines = compared(folder, one, parallel, exit_code=0)
    assert first == (
        "each result is followed by its distance from one rank's, which repeated steps 0 to 5 in float32 and float64"
    )
    assert lines[0].startswith("metrics differ from step 0 on: ")
    assert lines[1].split(", ")[-1].startswith("0.0 and "), "the first run is itself one of one rank"
    assert lines[-1].startswith("only rounding: no result of steps 0 to 5 is more than ")


@pytest.mark.slow
def test_from_the_last_checkpoint_that_both_share(folder, one, parallel):
    shutil.copytree(one, folder / "resumed")
    for step in (4, 6):
        shutil.rmtree(folder / "resumed" / "checkpoints" / f"step-{step:08d}")
    train(folder, "resumed", *TP, "--resume", "auto")
    lines = compared(folder, folder / "resumed", one, exit_code=0)
    assert "which repeated steps 2 to 5 " in lines[0]
    assert "checkpoints of step 2: the same bits" in lines


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "layout", "part"),
    [
        ("gradients of norms of one rank under sequence parallelism", TP, BACKWARD),
        ("outputs of row layers times tp", TP, "the loss of step 0 is wrong: the forward, or the data"),
        ("gradient of a row layer's output times tp", ("--tp", "2"), BACKWARD),
    ],
)
def test_a_fault(folder, one, tmp_path, name, layout, part):
    fault = next(each for each in OUR_FAULTS if each.name == name)
    wrong = train(tmp_path, "wrong", *layout, fault=Fault(fault.name, fault.function, fault.old, fault.new, ""))
    lines = compared(folder, one, wrong, exit_code=1)
    (at,) = (number for number, line in enumerate(lines) if line.startswith("a fault is suspected in "))
    assert lines[at] == f"a fault is suspected in {wrong}, by the same steps on one rank"
    assert lines[at + 1] == f"  {part}"
    assert lines[-1] == f"  shardwise doctor train, with the flags of {wrong}, names the first wrong module"
    if "of norms" in name:
        assert "layernorm.weight" in lines[-2], "the parameters whose gradients were not summed"


def test_a_share_of_samples_is_not_judged():
    """In the first step of DPO all rewards are 0 but for rounding."""
    rows = [{"loss": 1.0, "rewards/accuracies": share} for share in (0.25, 0.5, 0.5, 0.75)]
    own, other = (Repetition("float32", {0: row}) for row in rows[:2])
    runs = [OneRun(Path(name), {0: row}, {}) for name, row in zip("ab", rows[2:], strict=True)]
    found = _metrics((runs[0], runs[1]), [(0, "rewards/accuracies"), (0, "loss")], own, other)
    assert [(each.name, each.is_wrong) for each in found] == [("loss", False)]


def why(*runs: Path) -> str:
    """Why two runs are not judged."""
    comparison = compare(*runs)
    assert comparison.verdict == "different"
    assert not comparison.is_sound
    return comparison.lines[-1].removeprefix("different, not judged: ")


def test_what_is_not_judged(one, tmp_path):
    def left(name: str, section: str = "", changed_step: int = -1, **changes: object) -> Path:
        """What a run of 40 steps left without checkpoints."""
        (tmp_path / name).mkdir()
        rows = [{"step": step, "loss": 3.5 if step == changed_step else 3.0} for step in range(40)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = json.loads((one / "settings.json").read_text())
        if section:
            settings[section] |= changes
        (tmp_path / name / "settings.json").write_text(json.dumps(settings))
        return tmp_path / name

    plain = left("plain")
    other = left("other", "optimizer", 0, learning_rate=0.002)
    assert why(plain, other) == "the settings of the runs differ: optimizer.learning_rate is 0.003 and 0.002"
    exact = left("exact", "parallel", 0, exact=True)
    assert why(exact, plain) == f"{exact} is exact"
    late = "the first difference is 31 steps after the start, and at most 20 steps are repeated"
    assert why(plain, left("late", changed_step=30)) == late
    (other / "settings.json").write_text("{")
    assert why(plain, other).startswith(f"{other / 'settings.json'} cannot be read: ")
    (other / "settings.json").unlink()
    assert why(plain, other) == f"{other} has no settings of a run"


def test_other_data(one, parallel):
    text = one.parent / "text.txt"
    content = text.read_bytes()
    try:
        text.write_bytes(content[:-100])
        assert "corpus_sha256 was " in why(one, parallel)
        text.unlink()
        assert "text.txt" in why(one, parallel)
    finally:
        text.write_bytes(content)
