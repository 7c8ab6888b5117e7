"""A run of an earlier version resumes at its layout, and its losses are those of that version (tests/data/old_runs)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from data.old_runs.make import RUNS
from run.run_processes import run_command, run_commands

from shardwise.core.errors import ConfigError
from shardwise.doctor.comparison import results
from shardwise.run.metrics import SAMPLES, read_metrics
from shardwise.run.settings import FinetuneSettings

OLD = Path(__file__).parents[1] / "data/old_runs"


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_an_old_run_resumes(tmp_path, monkeypatch, kind):
    folder = shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(folder)
    # As of that version, which evaluated at the end alone.
    usual = "--training.eval-every", "0"
    arguments = 2, *RUNS[kind], "--out", kind, "--device", "cpu", "--resume", "auto", *usual
    if kind == "exact":
        # Since then a query's bits no longer depend on the number of keys after it.
        for code, _, error in run_commands(tmp_path, [arguments[1:]] * 2):
            assert code != 0
            assert "is of an exact run of an earlier version of Shardwise, whose attention and loss round" in error
        return
    run_command(tmp_path, *arguments)
    before, after = (list(map(results, read_metrics(each / kind / "metrics.jsonl"))) for each in (OLD, folder))
    assert len(before) == len(after) == 4
    for row, expected in zip(after, before, strict=True):
        row.pop(SAMPLES, None)
        # Rewards of the first steps are differences of log-probabilities that are a million times larger.
        assert row == {
            name: pytest.approx(value, rel=1e-5, abs=1e-7 if "rewards" in name else None)
            for name, value in expected.items()
        }


@pytest.mark.parametrize(
    ("table", "name", "value"),
    [
        ("labels", "task", "text-classification"),
        ("labels", "label_names", ["a", "b"]),
        ("distillation", "teacher", "large"),
    ],
)
def test_a_removed_feature_is_ignored_unless_the_run_used_it(table, name, value):
    stored = json.loads((OLD / "finetune/settings.json").read_text())
    assert FinetuneSettings.from_json(stored).lora.lora_rank == 2
    stored.setdefault(table, {})[name] = value
    with pytest.raises(ConfigError, match=rf"the run has {table}\.{name} .*; resume it with that one"):
        FinetuneSettings.from_json(stored)
