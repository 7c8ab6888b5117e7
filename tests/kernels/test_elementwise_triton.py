"""Triton's SwiGLU, rotary embedding and norm of a sum without a GPU: interpreted, and compiled for two."""

import json
from pathlib import Path

import pytest
from harness.program import run

pytest.importorskip("triton", reason="the kernels need Triton")


def run_program(name, **variables):
    done = run("-W", "error", Path(__file__).with_name(name), OMP_NUM_THREADS="1", **variables)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_interpreted_kernels_equal_their_definitions():
    outcomes = run_program("interpreted_elementwise.py", TRITON_INTERPRET="1")
    failures = [f"{case}:\n{failure}" for case, failure in outcomes.items() if failure is not None]
    assert not failures, "\n".join(failures)
    # Four dtypes with six cases each, and the special ones.
    assert len(outcomes) == 4 * 6 + 5


@pytest.mark.slow
def test_compiled_kernels_read_widely_and_spill_nothing(tmp_path):
    made = run_program("compiled_elementwise.py", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert len(made) == 4 * 10
    for case, found in made.items():
        assert found["target"].startswith(".target sm_80" if ", 80, " in case else ".target sm_90a"), (case, found)
        assert found["usage"][1] == 0, (case, found)
        # Narrower are one number of a row, and the angles where a thread has four pairs side by side.
        assert max(found["reads"]) == max(found["writes"]) == 16, (case, found)
        assert "norm" in case or found["writes"] == [16], (case, found)
        assert "norm" in case or found["reads"] == [16] or (found["reads"] == [8, 16] and "interleaved=True" in case)
        # Threads wait for each other where a row is summed.
        assert found["barriers"][0] <= (5 if "norm" in case else 0), (case, found)
