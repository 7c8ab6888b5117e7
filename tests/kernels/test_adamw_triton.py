"""AdamW's Triton kernel without a GPU: interpreted, and compiled for four kinds."""

import pytest
from triton_programs import run_program

pytest.importorskip("triton", reason="the kernel needs Triton")


@pytest.mark.slow
def test_it_is_as_close_to_the_definition_as_pytorchs_and_clears_and_rounds():
    assert len(run_program("interpreted_adamw.py", TRITON_INTERPRET="1")) == 6


@pytest.mark.slow
def test_compiled_it_reads_widely_and_spills_nothing(tmp_path):
    made = run_program("compiled_adamw.py", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert len(made) == 8
    for case, found in made.items():
        assert found["target"].startswith(f".target sm_{case.partition(',')[0]}"), (case, found)
        assert found["usage"][1] == 0, (case, found)
        assert max(found["reads"]) == max(found["writes"]) == 16, (case, found)
        assert found["barriers"] == [0, 0] or sum(found["barriers"]) == 0, (case, found)
