"""Which positions each rank holds, against dealing them out; and a view in a compiled graph."""

import dataclasses

import pytest
import torch

from shardwise.core.errors import ShardingError
from shardwise.core.sequence_view import SequenceView
from shardwise.nn import ColumnLinear


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("length", [0, 1, 2, 12, 13, 50257])
def test_each_position_is_on_one_rank(group, length):
    t, rank = group.size(), group.rank()
    view = SequenceView(length, group)
    dealt = [len(range(first, length, t)) for first in range(t)]
    assert view.sizes == tuple(dealt)
    assert view.size == dealt[rank]
    assert view.interval == (sum(dealt[:rank]), sum(dealt[: rank + 1]))
    shard = torch.zeros(view.size, 2)
    assert view.sizes_to_gather(shard) == (None if len(set(dealt)) == 1 else tuple(dealt))


def test_without_a_group_every_position_is_here():
    view = SequenceView(13)
    assert (view.sizes, view.size, view.interval) == ((13,), 13, (0, 13))
    assert SequenceView.of(torch.zeros(13, 2), None) == view


@pytest.mark.ranks(1, 3)
def test_of_shards_of_one_size(group):
    assert SequenceView.of(torch.zeros(4, 2), group) == SequenceView(4 * group.size(), group)


def test_a_view_is_a_value():
    view = SequenceView(13)
    assert hash(view) == hash(SequenceView(13))
    assert view != SequenceView(12)
    assert all(field.compare for field in dataclasses.fields(view))
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.length = 12


@pytest.mark.ranks(3)
def test_bad_input_is_told(group):
    with pytest.raises(ShardingError, match="length of a sequence is -1; it must not be negative"):
        SequenceView(-1, group)
    with pytest.raises(ShardingError, match=r"rank . of 3 has 5 positions of a sequence of 12; it should have 4"):
        SequenceView(12, group).sizes_to_gather(torch.zeros(5, 2))
    layer = ColumnLinear(2, 6, group=group, sequence_parallel=True)
    with pytest.raises(ShardingError, match=r"SequenceView\(12\) has no group; give it the group"):
        layer(torch.zeros(4, 1, 2), sequence=SequenceView(12))


# The compiler itself does what this warning of PyTorch's warns of.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.ranks(2)
def test_compiled(group):
    """A view that is given to the graph, and one that is made in it."""
    layer = ColumnLinear(3, 4, group=group, sequence_parallel=True, dtype=torch.float64)
    view = SequenceView(9, group)
    x = torch.randn(view.size, 2, 3, dtype=torch.float64)

    def given(x, sequence):
        return layer(x, sequence=sequence)

    def made(x, sequence):
        return layer(x, sequence=SequenceView(sequence.length, sequence.group))

    for function in (given, made):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, view), layer(x, sequence=view), rtol=1e-13, atol=1e-13)
