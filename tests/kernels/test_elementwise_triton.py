"""Triton's SwiGLU, rotary embedding and norm of a sum without a GPU: interpreted, and compiled for two."""

import ast
from pathlib import Path

import pytest
from triton_programs import run_program

import shardwise.kernels

pytest.importorskip("triton", reason="the kernels need Triton")


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


def test_launches_name_arguments_and_options_that_there_are():
    """The interpreter passes over an option that it does not know, at which a GPU's launch fails."""
    launches = 0
    for path in Path(shardwise.kernels.__file__).parent.glob("*_triton.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        arguments = {node.name: node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Subscript) and isinstance(call.func.value, ast.Name):
                known = {argument.arg for argument in arguments[call.func.value.id].args} | {"num_warps"}
                assert {keyword.arg for keyword in call.keywords} <= known, (path.name, call.func.value.id)
                launches += 1
    assert launches == 11
