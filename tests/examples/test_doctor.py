"""The example of ``docs/doctor.md``, and the page for newcomers."""

from __future__ import annotations

import os
import runpy
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist
from doctor.test_report import check_page
from harness.forked import run_forked
from harness.page import DOCS
from run.run_processes import run_command

from shardwise.cli.main import main

EXAMPLE = DOCS.parent / "examples" / "doctor.py"


def example(folder: Path, arguments: list[str], rank: int, size: int) -> None:
    """Run the example as a program does, on one of its ranks."""
    os.chdir(folder)
    sys.argv = [str(EXAMPLE), *arguments]
    if size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        store = dist.FileStore(str(folder / f"{arguments[0]}.store"), size)
        dist.init_process_group = partial(dist.init_process_group, store=store, rank=rank, world_size=size)
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def recorded(folder: Path, *runs: tuple[int, list[str]]) -> None:
    """Record with the example, all runs at once."""
    calls = [(folder, arguments, rank, size) for size, arguments in runs for rank in range(size)]
    ended = run_forked(example, calls, folder)
    assert [code for code, _ in ended] == [0] * len(calls), ended


def test_the_example_is_sound_and_its_fault_is_named(tmp_path, monkeypatch, capsys):
    one, rounding = (1, ["one"]), (1, ["rounding", "--perturb"])
    recorded(tmp_path, one, rounding, (2, ["parallel"]), (2, ["wrong", "--wrong"]))
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "one", "parallel", "--rounding", "rounding", "--html", "page.html"]) == 0
    assert "sound: all differences are rounding" in capsys.readouterr().out
    check_page(tmp_path / "page.html")
    assert main(["doctor", "one", "wrong", "--rounding", "rounding"]) == 1
    (line,) = (line for line in (DOCS / "doctor.md").read_text().splitlines() if line.startswith("first fault"))
    assert line in capsys.readouterr().out
    assert main(["doctor", "one", "nothing"]) == 2


def test_the_page_for_newcomers(tmp_path):
    printed, _ = run_command(tmp_path, 2, "doctor", "--explain", "--out", tmp_path / "explained")
    assert "open it in a browser" in printed
    page = check_page(tmp_path / "explained/explained.html")
    text = " ".join(page.texts)
    assert "linear_fc2" in text
    assert "reduce-scatter" in text
    assert "tp: shards of dimension" in text
