"""Tests that go wrong in every way, and those that come after; run by ``test_failures.py``."""

import os
import signal
import sys
import types

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from harness.watchdog import wait_until
from hypothesis import given

pytestmark = pytest.mark.ranks(2)


def test_assertion(group):
    print("printed by", group.rank())
    if group.rank() == 1:
        assert group.size() == 3
    dist.barrier(group=group)


def test_after_assertion(group):
    dist.barrier(group=group)


class TellsWhenReportedError(ValueError):
    """Leaves a file as soon as somebody puts it into words: it has been noted by then when it was raised."""

    def __init__(self, path):
        super().__init__("rank 1")
        self.path = path

    def __str__(self):
        self.path.touch()
        return super().__str__()


def test_both_fail(group, tmp_path):
    path = tmp_path / "reported"
    if group.rank() == 1:
        raise TellsWhenReportedError(path)
    wait_until(path.exists, "rank 1 has failed")
    raise ValueError("rank 0")


def test_killed(group):
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group=group)


def test_after_killed(group):
    dist.barrier(group=group)


def test_exit(group):
    if group.rank() == 0:
        os._exit(3)


def test_system_exit(group):
    sys.exit("out")


@pytest.mark.ranks(2, timeout=2)
def test_waits(group):
    if group.rank() == 0:
        dist.barrier(group=group)


def test_after_waits(group):
    dist.barrier(group=group)


def test_skip_on_one(group):
    if group.rank() == 0:
        pytest.skip("alone")


def test_skip(group):
    pytest.skip("together")


def test_xfail(group):
    pytest.xfail("known")


@pytest.mark.xfail(strict=True)
def test_expected_to_fail(group):
    raise AssertionError


@given(n=st.integers(0, 1000))
def test_example(group, n):
    print(n)
    dist.barrier(group=group)
    assert n < 10 or group.rank() == 0


@pytest.mark.parametrize("value", [lambda: None], ids=["lambda"])
def test_unpicklable(group, value):
    pass


def test_segmentation_fault(group):
    torch.ones(1)
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier(group=group)


def test_set_parallel_state(group):
    state = types.ModuleType("shardwise.megatron.core.parallel_state")
    state.calls = []
    state.model_parallel_is_initialized = lambda: not state.calls
    state.destroy_model_parallel = lambda: state.calls.append("destroyed")
    sys.modules["shardwise.megatron.core.parallel_state"] = state


def test_parallel_state_destroyed(group):
    assert sys.modules["shardwise.megatron.core.parallel_state"].calls == ["destroyed"]


def test_parallel_state_fails(group):
    state = types.ModuleType("shardwise.megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: 1 / 0
    sys.modules["shardwise.megatron.core.parallel_state"] = state
