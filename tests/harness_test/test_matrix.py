"""Which cases of a matrix `make test` leaves to `make test-all`."""

from __future__ import annotations

from itertools import combinations, product

import pytest


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(2))
@pytest.mark.parametrize("third", range(2))
@pytest.mark.parametrize("fourth", range(2))
def test_every_pair_of_values_is_in_the_cover(first, second, third, fourth, request):
    cases = [item for item in request.session.items if item.nodeid.split("[")[0] == request.node.nodeid.split("[")[0]]
    covered = [item.callspec.params for item in cases if item.get_closest_marker("matrix") is None]
    names = ("first", "second", "third", "fourth")
    for one, other in combinations(names, 2):
        pairs = {(params[one], params[other]) for params in covered}
        assert pairs == set(product(range(3 if one == "first" else 2), range(2)))
    assert len(covered) < 24


@pytest.fixture
def mark_of_four(request):
    """Runs in pytest's process, before the ranks do: only the case of four ranks has the mark."""
    assert (request.node.get_closest_marker("matrix") is not None) == (request.node.callspec.id == "tp4")


@pytest.mark.ranks(1, 2, 4)
def test_four_ranks_are_for_the_matrix_where_there_are_two(group, mark_of_four):
    assert group.size() in (1, 2, 4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(6))
def test_a_sample_lies_at_equal_distances(number, request):
    assert (request.node.get_closest_marker("matrix") is None) == (number in (1, 4))
