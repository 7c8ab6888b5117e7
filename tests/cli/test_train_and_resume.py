"""The real command, killed in the middle: what it says, and that resuming gives the losses of one uninterrupted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from harness.program import Program
from harness.watchdog import is_alive
from run.tiny import tiny_settings

# None gets there, however late a test looks: each is ended by the test.
STEPS = 1_000_000
SAVE_EVERY = 10

pytestmark = pytest.mark.slow


def start(folder: Path, out: str, *more: str) -> Program:
    tiny_settings(folder)  # writes the text
    return Program(
        *("-m", "shardwise", "train", "--data", folder / "text.txt", "--out", folder / out, "--parallel.tp", "2"),
        *("--model.num-layers", "2", "--model.hidden-size", "32", "--model.vocab-size", "301"),
        *("--model.sequence-length", "24", "--model.dropout", "0.1", "--training.global-batch-size", "4"),
        *("--training.steps", str(STEPS), "--training.save-every", str(SAVE_EVERY), *more),
        SHARDWISE_CACHE=folder / "cache",
    )


def losses(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["step"]: row["loss"] for row in rows}


def wait_for_checkpoint(run: Program, out: Path, *, at_least: int) -> None:
    """Until a checkpoint of that many steps is there, and the run still goes on."""
    folder = out / "checkpoints"
    run.wait_until(
        lambda: any(int(path.name[5:]) >= at_least for path in folder.glob("step-*")), f"step {at_least} is saved"
    )


def reached(out: Path) -> int:
    """The steps of the newest checkpoint."""
    return max(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


def test_killed_and_interrupted_and_resumed(tmp_path):
    """One run that ends early three times: its losses are those of the run that does not."""
    folder, out = tmp_path, tmp_path / "often"
    with start(folder, "often") as run:
        wait_for_checkpoint(run, out, at_least=SAVE_EVERY)
        ranks = run.children()
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        run.finish(exit_code=1)
        assert not any(map(is_alive, ranks))
    assert "was killed by SIGKILL" in run.stderr
    assert "--resume auto" in run.stderr
    assert "Traceback" not in run.stderr

    with start(folder, "often", "--resume", "auto") as run:
        wait_for_checkpoint(run, out, at_least=reached(out) + SAVE_EVERY)
        # Launcher and ranks at once.
        run.interrupt(signal.SIGKILL)
        run.finish(exit_code=-signal.SIGKILL)

    with start(folder, "often", "--resume", "auto") as run:
        wait_for_checkpoint(run, out, at_least=reached(out) + SAVE_EVERY)
        run.interrupt()
        said = run.finish(exit_code=130).stdout + run.stderr
    assert f"interrupted; the last checkpoint is {out}/checkpoints/step-{reached(out):08d}; run the same" in said
    assert "resumed at step " in said
    assert "Traceback" not in said
    found = losses(out)
    assert sorted(found) == list(range(reached(out)))

    with start(folder, "whole") as run:
        wait_for_checkpoint(run, folder / "whole", at_least=reached(out))
        run.interrupt(signal.SIGTERM)
        run.finish(exit_code=143)
    expected = losses(folder / "whole")
    assert found == {step: expected[step] for step in found}
