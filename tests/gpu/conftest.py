"""What the tests on a GPU share: where they run, and at which sizes.

``make gpu`` runs them on a GPU. The suite leaves them out, as a machine without a GPU could only skip them, and
rehearses them instead (``tests/benchmarks/test_gpu_benchmark.py``): the same tests, on a CPU, at sizes that take
moments, with Triton's kernels in its interpreter.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

WHERE = os.environ.get("SHARDWISE_GPU_TESTS", "")
REHEARSED = WHERE == "rehearsal"

# The cases of the kernels, which the suite runs in Triton's interpreter.
sys.path.append(str(Path(__file__).parents[1] / "kernels"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where to compute."""
    return torch.device("cpu") if REHEARSED else torch.device("cuda", 0)


@pytest.fixture(scope="session")
def full() -> bool:
    """Whether sizes are those that a GPU is for; otherwise they are tiny, and mean the same."""
    return not REHEARSED


@pytest.fixture
def kernels_on_the_device():
    """In a rehearsal the CPU stands for the GPU in what chooses the kernels, which are interpreted: slowly."""
    if not REHEARSED:
        yield
        return
    from shardwise.kernels import dispatch

    paths = [path for path in (*dispatch.PATHS, dispatch.REDUCE_NORM) if path.device_type == "cuda"]
    others = [path for path in dispatch.PATHS if path.device_type == "cpu"]
    before = [(path, path.device_type, path.missing) for path in (*paths, *others)]
    for path in paths:
        path.device_type, path.missing = "cpu", lambda call: None
    for path in others:
        path.device_type = "nowhere"
    yield
    for path, device_type, missing in before:
        path.device_type, path.missing = device_type, missing
