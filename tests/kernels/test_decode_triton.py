"""Attention of a token to a cache as Triton kernels, without a GPU: interpreted, and compiled for two."""

import pytest
from triton_programs import run_program

pytest.importorskip("triton", reason="the kernels need Triton")


@pytest.mark.slow
def test_compiled_kernels_read_widely_and_spill_nothing(tmp_path):
    made = run_program("compiled_decode.py", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert len(made) == 2 * 3 * 2
    for case, found in made.items():
        assert found["target"].startswith(".target sm_80" if ", 80, " in case else ".target sm_90a"), (case, found)
        assert found["usage"][1] == 0, (case, found)
        assert max(found["reads"]) == 16, (case, found)
