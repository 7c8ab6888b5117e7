"""Programs that run or compile Triton kernels without a GPU."""

import json
from pathlib import Path

import pytest
from harness.program import run


def run_program(name, *arguments, **variables):
    """What the program of this folder prints as JSON."""
    pytest.importorskip("triton", reason="the kernels need Triton")
    done = run("-W", "error", Path(__file__).with_name(name), *arguments, OMP_NUM_THREADS="1", **variables)
    return json.loads(done.stdout)
