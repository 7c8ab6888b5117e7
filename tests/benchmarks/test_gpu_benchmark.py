"""``make gpu`` where there is no GPU: what it says, and all that it would do, rehearsed on a CPU at tiny sizes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import gpu
import pytest
from gpus.measuring import Row, share_covered
from harness.program import Program
from harness.watchdog import WATCHDOG_SECONDS

ROOT = Path(gpu.__file__).parents[1]


def test_without_a_gpu_one_line_says_what_is_needed():
    make = shutil.which("make")
    assert make is not None
    told = ["-s", "gpu", f"GPU_PYTHON={sys.executable}"]
    # Another make may run the tests, whose jobs are none of this one's.
    with Program(make, *told, folder=ROOT, CUDA_VISIBLE_DEVICES="", MAKEFLAGS="") as made:
        made.finish(exit_code=2)
    line = made.stderr.splitlines()[0]
    assert line.startswith("make gpu: PyTorch ")
    assert "has no CUDA" in line or "sees no GPU" in line
    assert "make gpu needs one NVIDIA GPU of compute capability 8.0 or newer, and a Python with a CUDA build" in line
    assert "GPU_PYTHON=/path/to/python" in line
    assert line.endswith("docs/first-gpu.md")
    assert (ROOT / "docs/first-gpu.md").exists()
    assert "Traceback" not in made.stderr


def test_packages_that_are_missing_are_named_in_the_same_line(monkeypatch):
    monkeypatch.setitem(gpu.PACKAGES, "no_such_module", "no-such-package")
    assert "packages are missing: no-such-package (Python: " in str(gpu.why_not(rehearsal=True))
    monkeypatch.delitem(gpu.PACKAGES, "no_such_module")
    assert gpu.why_not(rehearsal=True) is None


@pytest.mark.matrix
@pytest.mark.slow
def test_the_tests_of_a_gpu_pass_in_a_rehearsal(tmp_path):
    rows, passed = gpu.run_tests(tmp_path, rehearsal=True, limit=WATCHDOG_SECONDS)
    assert passed, rows
    (row,) = rows
    assert int(row.value.split()[0]) > 40


@pytest.mark.slow
def test_all_that_is_measured_and_a_whole_table(tmp_path):
    with Program("-W", "error", gpu.__file__, "--rehearsal", "--no-tests", "--out", tmp_path) as measured:
        measured.finish()
    (table,) = tmp_path.glob("gpu-????-??-??.md")
    report = json.loads(table.with_suffix(".json").read_text())
    text = table.read_text()
    rows = [Row(**row) for row in report["rows"]]
    assert {row.section.partition(",")[0] for row in rows} >= {"limits", "training", "decoding", "saving"}
    for section in ("loss of [8, 40] bf16", "loss with output layer, hidden 16"):
        ours = [row for row in rows if row.section == section and row.name.startswith("shardwise")]
        assert ours
        assert all(row.value.endswith(" ms") for row in ours)
        # On a CPU a goal is neither met nor missed.
        assert all(row.met is None for row in ours)
    assert text.count("\n| ") == len(rows) + 1
    assert "at sizes that say nothing of a GPU" in text


def test_what_fails_is_a_row_and_the_rest_is_measured(monkeypatch):
    def broken():
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(
        gpu, "measurements", lambda rehearsal: [("one", broken), ("two", lambda: [Row("two", "x", "1 ms")])]
    )
    rows, succeeded = gpu.measure_all(rehearsal=True, until=float("inf"))
    assert not succeeded
    assert [(row.section, row.value, row.note) for row in rows] == [
        ("one", "failed: RuntimeError", "out of memory"),
        ("two", "1 ms", ""),
    ]
    rows, succeeded = gpu.measure_all(rehearsal=True, until=-float("inf"))
    assert succeeded
    assert {row.value for row in rows} == {"not run: the time was used up"}


def test_share_of_the_time_in_which_something_runs():
    assert share_covered([(0.0, 1.0), (0.5, 2.0), (3.0, 4.0)]) == 0.75
    assert share_covered([(5.0, 9.0), (6.0, 7.0)]) == 1.0
    assert share_covered([]) is None
