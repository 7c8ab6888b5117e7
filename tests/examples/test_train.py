"""The training script on the Python API gives one rank's losses at every layout, and goes on at another."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"
# The loss of each step on one rank, as printed.
LOSSES = [5.575432, 4.960886, 4.396099, 3.971421, 3.713423]
# How many tensor-parallel ranks train the first steps, and how many go on; the others are data parallel.
LAYOUTS = {1: (1, 1), 2: (2, 1), 4: (2, 4)}


@pytest.mark.ranks(1, 2, 4, slow=(4,))
def test_losses_are_those_of_one_rank_and_a_run_goes_on_at_another_layout(group, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("train", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    # In fp32 AdamW's first updates, which hardly depend on a gradient's size, make 1e-5 of rounding.
    monkeypatch.setattr(script, "ModelConfig", partial(script.ModelConfig, params_dtype=torch.float64))
    # The ranks of a test have joined already, and leave later.
    monkeypatch.setattr(dist, "init_process_group", lambda **_: None)
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda group=None: None if group is None else destroy(group))
    text = tmp_path / f"text-{group.rank()}.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    printed = ""
    for tp, steps in zip(LAYOUTS[group.size()], (3, 5), strict=True):
        out = str(tmp_path / "checkpoints")
        monkeypatch.setattr("sys.argv", ["train.py", str(text), "--tp", str(tp), "--out", out, "--steps", str(steps)])
        with contextlib.redirect_stdout(io.StringIO()) as part:
            script.main()
        printed += part.getvalue()
    losses = [float(line.split()[3]) for line in printed.splitlines()]
    assert losses == (pytest.approx(LOSSES, abs=1e-9) if group.rank() == 0 else [])


def test_the_script_is_short():
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 120
