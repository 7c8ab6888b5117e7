"""The real command, stopped in every way: what it says, and that resuming gives the losses of an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness.program import Program
from harness.watchdog import is_alive
from run.run_processes import run_commands
from run.tiny import tiny_settings

from shardwise.training.trainer import Trainer

# None gets there, however late a test looks: each is ended by the test.
STEPS = 1_000_000
SAVE_EVERY = 4

pytestmark = pytest.mark.slow


def command(folder: Path, out: str, *more: str) -> list[str | Path]:
    tiny_settings(folder)  # writes the text
    return [
        *("train", "--data", folder / "text.txt", "--out", folder / out, "--parallel.tp", "2"),
        *("--model.num-layers", "2", "--model.hidden-size", "32", "--model.vocab-size", "301"),
        *("--model.sequence-length", "24", "--model.dropout", "0.1", "--training.global-batch-size", "4"),
        *("--training.steps", str(STEPS), "--training.save-every", str(SAVE_EVERY), *more),
    ]


def start(folder: Path, out: str, *more: str) -> Program:
    # The picture takes as long as the steps.
    variables = {"SHARDWISE_CACHE": folder / "cache", "TEST_WITHOUT_MODULES": "matplotlib"}
    return Program("-m", "shardwise", *command(folder, out, *more), **variables)


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


def stop_after(num_steps: int) -> None:
    """Stop the run of this process after at least so many steps."""
    train_step = Trainer.train_step

    def train_and_stop(self: Trainer, step: int, *arguments: Any, **options: Any) -> Any:
        if step == num_steps:
            signal.raise_signal(signal.SIGTERM)
        return train_step(self, step, *arguments, **options)

    Trainer.train_step = train_and_stop


def test_killed_and_interrupted_and_resumed(tmp_path):
    """One run that ends early twice: its losses are those of the run that does not."""
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

    resumed_at = reached(out)
    with start(folder, "often", "--resume", "auto") as run:
        wait_for_checkpoint(run, out, at_least=resumed_at + SAVE_EVERY)
        # Launcher and ranks at once.
        run.interrupt()
        said = run.finish(exit_code=130).stdout + run.stderr
    assert f"interrupted; the run stopped at step {reached(out)}; add --resume auto to its command to go on" in said
    assert f"resumed at step {resumed_at}\n" in said
    assert "Traceback" not in said
    found = losses(out)
    assert sorted(found) == list(range(reached(out)))

    ended = run_commands(folder, [command(folder, "whole")] * 2, changed=partial(stop_after, reached(out)))
    assert [code for code, _, _ in ended] == [143, 143], ended
    expected = losses(folder / "whole")
    assert found == {step: expected[step] for step in found}
