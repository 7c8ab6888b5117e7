"""What the body of a test on ranks may count on."""

import os
import random
import warnings

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given, settings


class Colour:
    """A class of the test module, as the value of a parameter."""

    def __init__(self, name):
        self.name = name


def on_every_rank(value, group):
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.ranks(1)), pytest.param(2, marks=pytest.mark.ranks(2))]
)
def test_a_parameter_may_carry_the_mark(group, size):
    assert group.size() == size


@pytest.mark.ranks(2)
@pytest.mark.parametrize("colour", [Colour("red")], ids=["red"])
def test_a_parameter_may_be_of_a_class_of_the_module(group, colour):
    assert isinstance(colour, Colour)
    assert on_every_rank(colour.name, group) == ["red", "red"]


@pytest.mark.ranks(2)
def test_tmp_path_is_one_folder(group, tmp_path):
    (tmp_path / f"rank{group.rank()}").touch()
    dist.barrier(group=group)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("turn", range(2))
def test_random_numbers_start_alike(group, turn):
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    assert on_every_rank(drawn, group) == [drawn] * 2
    first = os.environ.setdefault("HARNESS_TEST_DRAWN", repr(drawn))
    assert repr(drawn) == first


@pytest.mark.ranks(2)
class TestMonkeypatch:
    """Its methods run in order, on the same two processes."""

    def test_a_patch_holds_in_the_ranks(self, group, monkeypatch):
        monkeypatch.setenv("HARNESS_TEST_PATCHED", "1")
        assert on_every_rank(os.environ.get("HARNESS_TEST_PATCHED"), group) == ["1", "1"]

    def test_a_patch_is_undone(self, group):
        assert "HARNESS_TEST_PATCHED" not in os.environ


@pytest.mark.ranks(2)
class TestCleaningUp:
    """Its methods run in order, on the same two processes."""

    def test_leave_much_behind(self, group):
        assert dist.get_backend(dist.new_group()) == "gloo"
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)

    def test_nothing_is_left(self, group):
        assert list(dist.distributed_c10d._world.pg_map) == [group]
        assert torch.get_default_dtype() is torch.float32
        assert torch.is_grad_enabled()
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 1


@pytest.mark.ranks(2)
class TestOwnDefaultGroup:
    """A test may do away with the default group; the next one gets another pool."""

    def test_destroy_it(self, group):
        dist.destroy_process_group()
        assert not dist.is_initialized()

    def test_it_is_there(self, group):
        assert dist.group.WORLD is group
        assert on_every_rank(group.rank(), group) == [0, 1]


@pytest.mark.ranks(1)
def test_warnings_are_errors(group):
    with pytest.raises(UserWarning, match="told"):
        warnings.warn("told", stacklevel=1)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:told:UserWarning")
def test_a_mark_of_the_test_filters_warnings(group):
    warnings.warn("told", stacklevel=1)


@pytest.mark.ranks(2)
@settings(max_examples=20, derandomize=False)
@example(n=0)
@given(n=st.integers(0, 1000))
def test_ranks_draw_the_same_examples(group, n):
    assume(n % 3 != 1)
    assert on_every_rank(n, group) == [n, n]


@pytest.mark.ranks(2)
def test_ranks_that_gloo_did_not_connect_run_again(group, tmp_path):
    seen = tmp_path / f"rank{group.rank()}"
    if not seen.exists():
        seen.touch()
        raise RuntimeError("Gloo connectFullMesh failed, says this test")
