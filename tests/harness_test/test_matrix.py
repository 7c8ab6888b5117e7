"""Which cases of a matrix `make test` leaves to `make test-all`."""

from __future__ import annotations

from itertools import combinations, product

import pytest


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(2))
def test_two_parameters_are_a_whole_matrix(first, second, request):
    assert request.node.get_closest_marker("matrix") is None


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


@pytest.mark.ranks(1, 2, 4)
def test_four_ranks_are_for_the_matrix_where_there_are_two(group):
    assert group.size() in (1, 2, 4)


def test_which_numbers_of_ranks_have_the_mark(request):
    test = "test_four_ranks_are_for_the_matrix_where_there_are_two"
    items = [item for item in request.session.items if item.name.startswith(test)]
    assert items
    for item in items:
        assert (item.get_closest_marker("matrix") is not None) == (item.callspec.id == "tp4")
