"""The planned peak of each rank is the most bytes of its living tensors in a real step, in runs of every kind."""

from __future__ import annotations

import gc

import pytest
from harness.peaks import LivePeak
from plan.measured_layouts import CASES, Run, groups_of

from shardwise.plan.plan import make_plan

# PyTorch's messages and single numbers are small tensors of their own. With FSDP, a rank that has fewer rows of a
# weight than others has one gathered weight too much in its plan.
TOLERANCES = {"dp 2, fsdp": 0.05, "experts, ep 2, fsdp": 0.05, "cp 2, fsdp": 0.05}
TOLERANCE = 0.01


@pytest.fixture
def planned(request):
    """Name of the case, and for each rank the bytes that the plan states."""
    case = CASES[request.param]
    workload = case.workload()
    return request.param, [make_plan(workload, case.mesh, rank=rank).stages[0].total for rank in range(case.ranks)]


def measured(name):
    """The most bytes of living tensors in a step of this rank."""
    case = CASES[name]
    groups = groups_of(case)
    # What the first step of a process leaves is none of the second's.
    Run(case, groups, small=True).steps()
    gc.collect()
    with LivePeak() as counter:
        run = Run(case, groups)
        counter.peak = counter.live
        run.steps()
    return counter.peak


def check(group, planned):
    name, totals = planned
    assert measured(name) == pytest.approx(totals[group.rank()], rel=TOLERANCES.get(name, TOLERANCE))


def of_ranks(number):
    names = [name for name, case in CASES.items() if case.ranks == number]
    return pytest.mark.parametrize("planned", names, indirect=True)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.ranks(1)
@of_ranks(1)
def test_one_rank(group, planned):
    check(group, planned)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.ranks(2)
@of_ranks(2)
def test_two_ranks(group, planned):
    check(group, planned)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.ranks(3)
@of_ranks(3)
def test_three_ranks(group, planned):
    check(group, planned)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.ranks(4)
@of_ranks(4)
def test_four_ranks(group, planned):
    check(group, planned)
