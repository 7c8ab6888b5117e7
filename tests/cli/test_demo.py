"""The demo with few steps: it checks parity, trains, evaluates and prints where its files are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from harness.program import run
from run.run_processes import run_command
from run.tiny import tiny_settings

from shardwise.cli import main as main_module, training
from shardwise.cli.main import run_subcommand
from shardwise.cli.training import DemoArguments, demo_settings
from shardwise.core.errors import ConfigError
from shardwise.data import stdlib_corpus
from shardwise.run.settings import Settings
from shardwise.storage import checkpoint

FILES = ("loss.png", "metrics.jsonl", "sample.txt", "settings.json", "tokenizer.json")


def small_demo_settings(arguments: DemoArguments) -> Settings:
    """Settings of the demo on a text and with a model that take moments; exact mode supports the model."""
    tiny = tiny_settings(Path(arguments.out).parent)
    model = dataclasses.replace(tiny.model, hidden_size=64, num_heads=8, ffn_hidden_size=128, vocab_size=304)
    return dataclasses.replace(demo_settings(arguments), data=tiny.data, model=model, corpus=tiny.corpus)


def make_demos_small() -> None:
    training.demo_settings = small_demo_settings


def check_demo(printed: str, out: Path, steps: int) -> re.Match[str]:
    """Check the files and the printed lines; return the line of the measurement on held-out text."""
    assert "tp=2 equals tp=1 over 3 steps" in printed
    same = "tp=2 has the bits of tp=1 over 10 steps: loss 0 apart, gradient norm 0, updated weights 0"
    assert f"\nexact    {same}\n" in printed
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown, said = (text.split("\n\nGo on:")[0] for text in (readme, printed))
    shown, said = shown.split("```text\n")[-1], said.split("\n\n")[-1]
    # A machine may have a line more for each fast path that it does not take, and a short demo one about its warm-up.
    more = re.compile("       no |note   the warm-up")
    names = [[line.split()[0] for line in text.splitlines() if not more.match(line)] for text in (shown, said)]
    assert names[0] == names[1]
    assert re.search(r"zlib -9 [12]\.\d+, lzma [12]\.\d+", printed)
    assert re.search(r"\d+ collectives and [\d.]+ MB per rank and step", printed)
    assert all((out / name).stat().st_size > 0 for name in FILES)
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{steps:08d}"]
    checkpoint.verify(out / "checkpoints" / f"step-{steps:08d}")
    measured = re.search(r"held out ([\d.]+) bits per byte on ([\d,]+) bytes", printed)
    assert measured is not None
    return measured


@pytest.mark.slow
def test_the_demo_on_a_small_text(tmp_path, monkeypatch):
    out = tmp_path / "demo"
    printed, _ = run_command(tmp_path, 2, "demo", "--out", out, "--steps", "4", changed=make_demos_small, pictures=True)
    measured = check_demo(printed, out, 4)
    # A model that has learned nothing yet.
    assert 2.0 < float(measured[1]) < 6.0

    # A second demo replaces the first.
    monkeypatch.setattr(main_module, "launch_ranks", lambda *arguments, **options: 0)
    assert run_subcommand("demo", ["--out", str(out)]) == 0
    monkeypatch.setattr(training, "demo_settings", small_demo_settings)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    for name in FILES:
        (out / name).unlink()
    assert run_subcommand("demo", ["--out", str(out), "--tp", "1", "--steps", "3"]) == 0
    assert all((out / name).stat().st_size > 0 for name in FILES)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000003"]
    checkpoint.verify(out / "checkpoints" / "step-00000003")


@pytest.mark.matrix
@pytest.mark.slow
def test_the_demo_as_a_program(tmp_path):
    out = tmp_path / "demo"
    done = run("-m", "shardwise", "demo", "--out", out, "--steps", "4", SHARDWISE_CACHE=tmp_path / "cache")
    measured = check_demo(done.stdout, out, 4)
    assert int(measured[2].replace(",", "")) >= 200_000
    assert 2.0 < float(measured[1]) < 4.0


@pytest.mark.slow
def test_the_demos_held_out_text_is_long_enough_to_mean_something():
    _, held_out = stdlib_corpus().split(held_out_fraction=demo_settings(DemoArguments()).corpus.held_out_fraction)
    assert held_out.num_bytes >= 200_000


def test_demo_does_not_replace_somebodys_run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="not a demo's"):
        run_subcommand("demo", ["--out", str(tmp_path)])


def test_the_demos_own_settings_can_be():
    settings = demo_settings(DemoArguments())
    settings.check_world(2)
    assert settings.parallel.tp == 2
    assert Path(settings.out) == Path("runs/demo")
