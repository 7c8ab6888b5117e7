"""Runs that end badly, as the command tells of them: what is on the disk is good, and what is said is true."""

from __future__ import annotations

import json
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from harness.program import Program
from run.run_processes import run_command
from run.tiny import tiny_settings

from shardwise.cli.main import main
from shardwise.storage.checkpoint import latest

LONG = 100_000


def command(folder: Path, *flags: object, tp: int = 1) -> list[str]:
    tiny_settings(folder)  # writes the text
    sizes = ["--model.num-layers", 1, "--model.hidden-size", 16, "--model.num-heads", 2, "--model.vocab-size", 301]
    more = ["--model.sequence-length", 16, "--training.global-batch-size", 2, "--parallel.tp", tp, "--device", "cpu"]
    given = ["-m", "shardwise", "train", "--data", folder / "text.txt", "--out", folder / "run", *sizes, *more, *flags]
    return list(map(str, given))


def losses(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def test_a_diverged_run_names_a_checkpoint_from_which_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At a learning rate of 100, saving every step; the update of 1e30 breaks the weights while its loss is good."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    for rate in ("100", "1e30"):
        folder = tmp_path / rate
        folder.mkdir()
        rates = ["--optimizer.warmup-steps", 0, "--optimizer.clip-grad-norm", 0, "--optimizer.learning-rate"]
        steps = ["--training.steps", 30, "--training.save-every", 1]
        assert main(command(folder, *rates, rate, *steps)[2:]) == 1
        said = capfd.readouterr().err
        newest = latest(folder / "run" / "checkpoints")
        if newest is None:
            assert (
                f"no checkpoint was saved before; start anew with a lower optimizer.learning-rate than {float(rate):g}"
                in said
            )
        else:
            assert f"the last good checkpoint is {newest}; go on from it with --resume auto" in said
        reached = 0 if newest is None else int(newest.name[5:])
        assert 0 <= reached < 30
        more = ["1e-4", "--training.steps", reached + 2, "--resume", "auto"]
        assert main(command(folder, *rates, *more)[2:]) == 0
        assert len(losses(folder)) == reached + 2


def test_no_checkpoint_is_claimed_by_a_run_that_is_interrupted_while_it_prepares(tmp_path: Path) -> None:
    with Program(*command(tmp_path, "--training.steps", LONG, tp=2), SHARDWISE_CACHE=tmp_path / "cache") as program:
        program.wait_until(program.children, "ranks are started")
        program.interrupt(signal.SIGTERM)
        program.finish(exit_code=143)
    assert program.stderr.endswith("no checkpoint was saved; run the same command again to start anew\n")
    assert "Traceback" not in program.stderr


def use_broken_matplotlib(folder: Path) -> None:
    assert "matplotlib" not in sys.modules
    sys.path.insert(0, str(folder))


def test_after_the_last_checkpoint_nothing_fails_the_run_and_a_log_is_of_lines(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "matplotlib"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise SystemExit('no display')\n")
    (tmp_path / "run" / "sample.txt").mkdir(parents=True)
    argv = command(tmp_path, "--training.steps", 2)[2:]
    out, error = run_command(tmp_path, 1, *argv, changed=partial(use_broken_matplotlib, broken.parent), pictures=True)
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
    assert "no picture: matplotlib cannot be imported (no display)" in out
    assert "no sample: " in out
    assert "sample.txt': Is a directory" in out
    assert "\r" not in error
    assert error.splitlines()[-1].startswith("step 2/2: loss ")
