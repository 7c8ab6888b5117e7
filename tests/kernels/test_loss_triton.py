"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for two GPUs that need not be here."""

import pytest
from triton_programs import run_program

pytest.importorskip("triton", reason="the kernels need Triton")

from shardwise.kernels import loss_triton


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("triton"))
    return run_program("compiled_loss.py", TRITON_CACHE_DIR=folder, TRITON_INTERPRET="0")


@pytest.mark.slow
def test_kernels_compile_for_gpus(compiled):
    made = compiled["compiled"]
    assert len(made) == 4 + 4 + 2 + 3 + 1 + 4 + 2 + 3 + 1
    for case, found in made.items():
        assert found["target"].startswith(".target sm_80" if ", 80, " in case else ".target sm_90a"), (case, found)
        assert found["usage"][1] == 0, (case, found)
        # However many columns there are, if rows begin at multiples of 16 bytes.
        assert (max(found["reads"]) == max(found["writes"]) == 16) == ("any stride" not in case), (case, found)


@pytest.mark.slow
def test_threads_wait_for_each_other_at_the_end_of_a_row_alone(compiled):
    for case, found in compiled["compiled"].items():
        number, in_loops = found["barriers"]
        assert in_loops == 0, (case, found)
        # One before exponentials are written, two or three for each number of a row.
        assert number <= (0 if "gradient" in case else 9 if "all" in case else 6), (case, found)


@pytest.mark.slow
def test_rows_that_are_read_twice_fit_the_cache(compiled):
    """Of an H100: 132 multiprocessors of 65,536 registers, and a second-level cache of 50 MB."""
    for num_columns in (8192, 32768, 131072):
        registers, _ = compiled["compiled"][f"statistics_kernel, 90, bf16, {num_columns}, plain"]["usage"]
        threads = 32 * loss_triton.launch_shape(num_columns)[2]
        at_once = 132 * min(2048 // threads, 65536 // (threads * registers))
        assert 0 < at_once * 2 * num_columns < 50e6, (num_columns, registers)


@pytest.mark.slow
def test_no_thread_reads_a_logit_that_another_may_have_overwritten(compiled):
    found = compiled["order"]
    assert len(found) == 3 * 4
    for case, (unordered, without_barriers) in found.items():
        # At least the target's logit is read by one thread and overwritten by another.
        assert without_barriers, case
        assert not unordered, (case, unordered)
