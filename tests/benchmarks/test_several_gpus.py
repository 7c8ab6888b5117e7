"""``make gpus`` where there are no GPUs: rehearsed on two CPU ranks, and what the table says of runs that fail."""

from __future__ import annotations

import json
import math
import re

import gpu
import pytest
import several_gpus
from harness.program import Program
from several_gpus import LAYOUTS, Place, RunError


def rehearsed(folder, *layouts):
    with Program("-W", "error", several_gpus.__file__, "--rehearsal", "--only", *layouts, "--out", folder) as program:
        # A limit for each part, because a slow machine takes long for all.
        for name in layouts:
            program.wait_for_line(f"running: {re.escape(name)}")
        program.finish()
    (table,) = folder.glob("gpus-????-??-??.md")
    return json.loads(table.with_suffix(".json").read_text())["rows"], table.read_text()


@pytest.mark.matrix
def test_a_rehearsal_of_one_layout(tmp_path):
    rows, text = rehearsed(tmp_path, "fsdp", "bandwidth")
    assert text.startswith("# On several GPUs, ")
    assert (rows[0]["section"], rows[0]["name"], rows[0]["met"]) == ("losses of one rank", "fsdp", True)
    assert {row["section"] for row in rows[1:]} == {"bandwidth, 2 ranks"}
    assert {row["name"].partition(",")[0] for row in rows[1:]} == set(several_gpus.COLLECTIVES)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_rehearsal_of_all(tmp_path):
    rows, text = rehearsed(tmp_path, *LAYOUTS, "fast paths", "kill")
    assert {row["name"] for row in rows if row["section"] == "losses of one rank"} == set(LAYOUTS)
    assert len(rows) == len(LAYOUTS) + len(several_gpus.PATHS) + 1
    assert all(row["met"] for row in rows), rows
    assert "| killed and resumed | tp 2 |" in text


def test_a_run_that_fails_or_differs_is_a_row_that_misses_its_goal(monkeypatch, tmp_path):
    def run(place, name, num_ranks, *flags, **options):
        if name == "fsdp":
            raise RunError("exit code 1: ValueError: of this test")
        return {0: 2.0, 1: 1.0 if name != "zero 1" else 1.001}

    monkeypatch.setattr(several_gpus, "run", run)
    layouts = {name: LAYOUTS[name] for name in ("tp 2", "zero 1", "fsdp")}
    rows = several_gpus.compare_layouts(Place(tmp_path, 2, True), layouts)
    assert [(row.name, row.met) for row in rows] == [("tp 2", True), ("zero 1", False), ("fsdp", False)]
    assert rows[1].value == "1.0e-03 apart"
    assert rows[2].note == "exit code 1: ValueError: of this test"


def test_a_real_run_that_fails_says_why(tmp_path):
    place = Place(tmp_path, 2, True)
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(RunError, match=r"exit code 2: .*parallel\.tp|exit code 2: .* tp 5"):
        several_gpus.run(place, "impossible", 2, "--tp", "5")


def test_curves_of_other_steps_or_without_a_number_differ():
    assert several_gpus.difference({0: 1.0}, {0: 1.0, 1: 2.0}) == math.inf
    assert several_gpus.difference({0: 1.0, 1: math.nan}, {0: 1.0, 1: 1.0}) == math.inf


def test_one_gpu_is_too_few(monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda *, rehearsal: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert several_gpus.why_not(rehearsal=False) == (
        "make gpus needs at least two GPUs; PyTorch sees 1; one is for make gpu"
    )
    assert several_gpus.why_not(rehearsal=True) is None
