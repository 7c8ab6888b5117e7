"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for two GPUs that need not be here."""

import json
from pathlib import Path

import pytest
from harness.program import run

pytest.importorskip("triton", reason="the kernels need Triton")


def run_program(name, *arguments, **variables):
    done = run("-W", "error", Path(__file__).with_name(name), *arguments, OMP_NUM_THREADS="1", **variables)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_interpreted_kernels_equal_the_reference():
    outcomes = run_program("interpreted_loss.py", TRITON_INTERPRET="1")
    failures = [f"{case}:\n{failure}" for case, failure in outcomes.items() if failure is not None]
    assert not failures, "\n".join(failures)
    # Four dtypes with four sets of options, and the special cases.
    assert len(outcomes) == 20


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("triton"))
    return run_program("compiled_loss.py", TRITON_CACHE_DIR=folder, TRITON_INTERPRET="0")


@pytest.mark.slow
def test_kernels_compile_for_gpus(compiled):
    made = compiled["compiled"]
    assert len(made) == 2 * 2 * 4 * 2
    for case, (target, num_bytes) in made.items():
        assert target.startswith(".target sm_80" if ", 80, " in case else ".target sm_90a"), (case, target)
        assert num_bytes > 1000


@pytest.mark.slow
def test_no_thread_reads_a_logit_that_another_may_have_overwritten(compiled):
    found = compiled["order"]
    assert len(found) == 3 * 4 * 2
    for case, (unordered, without_barriers) in found.items():
        # At least the target's logit is read by one thread and overwritten by another.
        assert without_barriers, case
        assert not unordered, (case, unordered)
