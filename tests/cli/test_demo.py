"""The demo with few steps: it checks parity, trains, evaluates and prints where its files are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from harness.program import run
from run.tiny import tiny_settings

from shardwise.cli import main as main_module, trainings
from shardwise.cli.main import run_subcommand
from shardwise.cli.trainings import DemoArguments, demo_settings
from shardwise.core.errors import ConfigError
from shardwise.storage import checkpoint

FILES = ("loss.png", "metrics.jsonl", "sample.txt", "settings.json", "tokenizer.json")


@pytest.mark.slow
def test_demo_end_to_end(tmp_path, monkeypatch):
    out = tmp_path / "demo"
    done = run("-m", "shardwise", "demo", "--out", out, "--steps", "4", SHARDWISE_CACHE=tmp_path / "cache")
    assert "tp=2 equals tp=1 over 3 steps" in done.stdout
    same = "tp=2 has the bits of tp=1 over 10 steps: loss 0 apart, gradient norm 0, updated weights 0"
    assert f"\nexact    {same}\n" in done.stdout
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown, printed = (text.split("\n\nGo on:")[0] for text in (readme, done.stdout))
    shown, printed = shown.split("```text\n")[-1], printed.split("\n\n")[-1]
    # A machine may have a line more for each fast path that it does not take.
    names = [[line.split()[0] for line in text.splitlines() if "       no " not in line] for text in (shown, printed)]
    assert names[0] == names[1]
    measured = re.search(r"held out ([\d.]+) bits per byte on ([\d,]+) bytes", done.stdout)
    assert measured is not None
    # Enough held-out text to mean something, and a model that has learned nothing yet.
    assert int(measured[2].replace(",", "")) >= 200_000
    assert 2.0 < float(measured[1]) < 4.0
    assert re.search(r"zlib -9 [12]\.\d+, lzma [12]\.\d+", done.stdout)
    assert re.search(r"\d+ collectives and [\d.]+ MB per rank and step", done.stdout)
    assert all((out / name).stat().st_size > 0 for name in FILES)
    checkpoint.verify(out / "checkpoints" / "step-00000004")

    # A second demo replaces the first: started the same way, and here on a text and a model that take moments.
    monkeypatch.setattr(main_module, "launch_ranks", lambda *arguments, **options: 0)
    assert run_subcommand("demo", ["--out", str(out)]) == 0
    tiny = tiny_settings(tmp_path)
    monkeypatch.setattr(
        trainings,
        "demo_settings",
        lambda arguments: dataclasses.replace(
            demo_settings(arguments), data=tiny.data, model=tiny.model, corpus=tiny.corpus
        ),
    )
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    for name in FILES:
        (out / name).unlink()
    assert run_subcommand("demo", ["--out", str(out), "--tp", "1", "--steps", "3"]) == 0
    assert all((out / name).stat().st_size > 0 for name in FILES)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000003"]
    checkpoint.verify(out / "checkpoints" / "step-00000003")


def test_demo_does_not_replace_somebodys_run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="not a demo's"):
        run_subcommand("demo", ["--out", str(tmp_path)])


def test_the_demos_own_settings_can_be():
    settings = demo_settings(DemoArguments())
    settings.check_world(2)
    assert settings.parallel.tp == 2
    assert Path(settings.out) == Path("runs/demo")
