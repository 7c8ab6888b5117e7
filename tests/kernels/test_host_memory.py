"""Freed memory is kept when asked for, and the user's own settings stand."""

from __future__ import annotations

import os
import sys

import pytest
from harness.program import run

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is the GNU C library's")

_PROGRAM = """
import resource
import sys

import torch

from shardwise.kernels.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        # More than the C library ever keeps by itself.
        torch.ones(10 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# With huge pages for every program there are few faults to begin with.
torch.ones(10 << 20)
fresh = faults()
assert keep_freed_memory()
# An aligned block may not fit where the last one lay, until the heap has grown.
faults()
faults()
print(fresh, faults())
"""


def _faults(**environment: str) -> tuple[int, int]:
    unset = dict.fromkeys(name for name in os.environ if name.startswith("MALLOC_"))
    fresh, kept = run("-c", _PROGRAM, **unset | environment).stdout.split()
    return int(fresh), int(kept)


@pytest.mark.slow
def test_freed_memory_is_kept() -> None:
    fresh, kept = _faults()
    assert fresh >= 200
    assert kept < fresh / 20


@pytest.mark.slow
def test_the_users_settings_stand() -> None:
    fresh, kept = _faults(MALLOC_TRIM_THRESHOLD_="65536", MALLOC_MMAP_THRESHOLD_="65536")
    assert kept > fresh / 2
