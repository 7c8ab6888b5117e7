"""Attention of a token to a cache as Triton kernels, without a GPU: interpreted, and compiled for two."""

import json
from pathlib import Path

import pytest
from harness.program import run

pytest.importorskip("triton", reason="the kernels need Triton")


def run_program(name, **variables):
    done = run("-W", "error", Path(__file__).with_name(name), OMP_NUM_THREADS="1", **variables)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_interpreted_kernels_equal_their_definition():
    outcomes = run_program("interpreted_decode.py", TRITON_INTERPRET="1")
    failures = [f"{case}:\n{failure}" for case, failure in outcomes.items() if failure is not None]
    assert not failures, "\n".join(failures)
    assert len(outcomes) == 3 + 5 + 1


@pytest.mark.slow
def test_compiled_kernels_read_widely_and_spill_nothing(tmp_path):
    made = run_program("compiled_decode.py", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert len(made) == 2 * 3 * 2
    for case, found in made.items():
        assert found["target"].startswith(".target sm_80" if ", 80, " in case else ".target sm_90a"), (case, found)
        assert found["usage"][1] == 0, (case, found)
        assert max(found["reads"]) == 16, (case, found)
