"""What fails on one rank fails alike on all, and then the ranks go on together."""

import pytest
import torch
import torch.distributed as dist

from shardwise.core.communication.agreement import agree, check_same
from shardwise.core.errors import CheckpointError, ConfigError, DesyncError


def outcomes(group, error):
    """Class and message of every rank's error, in rank order."""
    result = [None] * group.size()
    dist.all_gather_object(result, (type(error), str(error)), group=group)
    return result


@pytest.mark.ranks(1, 3)
def test_each_rank_gets_its_own_result(group):
    assert agree(lambda: group.rank() * 10, group=group) == group.rank() * 10
    assert agree(lambda: None, group=group) is None


@pytest.mark.ranks(3)
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_rank_fails(group, failing):
    def work():
        if group.rank() == failing:
            raise CheckpointError(f"rank {failing} found no file")
        return group.rank()

    with pytest.raises(CheckpointError) as info:
        agree(work, group=group)
    assert outcomes(group, info.value) == [(CheckpointError, f"rank {failing} found no file")] * 3
    # The rank that failed still shows where.
    assert (info.value.__cause__ is not None) == (group.rank() == failing)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    assert ones.item() == 3


@pytest.mark.ranks(3)
def test_the_first_of_several_errors_is_everybody_s(group):
    def work():
        if group.rank() == 1:
            raise ConfigError("first")
        if group.rank() == 2:
            raise CheckpointError("second")

    with pytest.raises(ConfigError) as info:
        agree(work, group=group)
    assert outcomes(group, info.value) == [(ConfigError, "first")] * 3


@pytest.mark.ranks(3)
def test_an_error_of_another_kind_stays_where_it_was(group):
    def work():
        if group.rank() == 1:
            raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError if group.rank() == 1 else DesyncError) as info:
        agree(work, group=group)
    told = (DesyncError, "rank 1 failed with ZeroDivisionError('by zero')")
    assert outcomes(group, info.value) == [told, (ZeroDivisionError, "by zero"), told]


@pytest.mark.ranks(1, 3)
def test_equal_values_pass(group):
    check_same({"shape": [2, 3], "dtype": "float32"}, "the shapes", group=group)
    check_same(None, "nothing", group=group)


@pytest.mark.ranks(3)
def test_values_that_differ_are_told_on_every_rank(group):
    with pytest.raises(DesyncError) as info:
        check_same(7 if group.rank() < 2 else 8, "the number of steps", group=group)
    message = "ranks disagree on the number of steps: rank 0 has 7, rank 2 has 8"
    assert outcomes(group, info.value) == [(DesyncError, message)] * 3
