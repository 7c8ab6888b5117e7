"""The exchange of inference layers: its kernel without a GPU, and who is told that it runs."""

import pytest
import torch
from triton_programs import run_program

from shardwise.kernels import dispatch, norms
from shardwise.kernels.dispatch import Call


@pytest.mark.slow
def test_the_kernel_compiles_for_gpus(tmp_path):
    made = run_program("compiled_reduce_norm.py", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert len(made) == 4
    for case, (target, num_bytes, reads_one_by_one) in made.items():
        assert target.startswith(".target sm_80" if case.startswith("(80,") else ".target sm_90a"), (case, target)
        assert num_bytes > 1000
        # Other ranks' buffers too are read 16 bytes at a time.
        assert not reads_one_by_one, case


def test_on_a_cpu_it_does_not_run_and_says_so():
    assert not norms.runs_fused(torch.empty(2, 3, 8))
    choice = dispatch.REDUCE_NORM.report(Call("cpu"))
    assert choice == ("Triton exchange of inference layers on cpu", False, "there is a kernel for cuda, none for cpu")


def test_rows_that_a_program_cannot_hold_are_left_to_collectives(monkeypatch):
    """The CPU here stands for a GPU."""
    monkeypatch.setattr(dispatch.REDUCE_NORM, "device_type", "cpu")
    monkeypatch.setattr(dispatch.REDUCE_NORM, "missing", lambda call: None)
    assert norms.runs_fused(torch.empty(3, norms.MAX_WIDTH))
    for buffer in (torch.empty(3, norms.MAX_WIDTH + 1), torch.empty(0, 8), torch.empty(3, 8, dtype=torch.int32)):
        assert not norms.runs_fused(buffer)
    with torch.autocast("cpu"):
        assert not norms.runs_fused(torch.empty(3, 8))
