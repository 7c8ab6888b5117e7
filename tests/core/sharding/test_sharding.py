"""Which slice is whose, against brute force and numpy."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from harness.parity import assert_bit_equal
from hypothesis import given, settings

from shardwise.core.errors import ShardingError
from shardwise.core.sharding import (
    ParamLayout,
    balanced_range,
    balanced_sizes,
    checked_dim,
    checked_sizes,
    divide,
    ensure_divisibility,
    intervals_of_sizes,
)


def whole_of(shape):
    """A tensor whose elements all differ."""
    return torch.arange(int(np.prod(shape)), dtype=torch.float64).view(shape)


@given(n=st.integers(0, 300), t=st.integers(1, 40))
def test_balanced_rule_against_dealing_one_by_one(n, t):
    dealt = [0] * t
    for element in range(n):
        dealt[element % t] += 1
    assert balanced_sizes(n, t) == tuple(dealt)
    ranges = [balanced_range(n, t, rank) for rank in range(t)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(n))
    assert [stop - start for start, stop in ranges] == dealt


@pytest.mark.parametrize(("n", "t", "rank"), [(10**18 + 7, 3, 2), (50257, 8, 0), (50257, 8, 1), (2, 5, 4)])
def test_balanced_rule_at_sizes_of_any_kind(n, t, rank):
    sizes = balanced_sizes(n, t)
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert balanced_range(n, t, rank) == (sum(sizes[:rank]), sum(sizes[: rank + 1]))


@pytest.mark.parametrize(("n", "t", "rank"), [(-1, 2, 0), (4, 0, 0), (4, -2, 0), (4, 2, 2), (4, 2, -1)])
def test_what_cannot_be_split_names_the_values(n, t, rank):
    with pytest.raises(ShardingError, match=rf"{rank}.*{t} ranks|cannot split {n} elements over {t} ranks"):
        balanced_range(n, t, rank)
    if t < 1 or n < 0:
        with pytest.raises(ShardingError, match=rf"cannot split {n} elements over {t} ranks"):
            balanced_sizes(n, t)


def test_divide():
    assert divide(12, 4) == 3
    ensure_divisibility(0, 7)
    with pytest.raises(ShardingError, match="13 is not divisible by 4") as info:
        divide(13, 4)
    # Megatron's assertions are the door's.
    assert not isinstance(info.value, AssertionError)
    with pytest.raises(ValueError, match="13 is not divisible by 0"):
        ensure_divisibility(13, 0)


def test_intervals_of_sizes():
    assert intervals_of_sizes([2, 0, 3]) == ((0, 2), (2, 2), (2, 5))
    assert intervals_of_sizes([]) == ()


@pytest.mark.parametrize("sizes", [[5, 4], [5, 5, 0], [11, -1], []])
def test_sizes_that_do_not_fit_are_named(sizes):
    with pytest.raises(ShardingError) as info:
        checked_sizes(sizes, 10, 2, "features")
    assert str(info.value) == f"features: sizes {sizes} must be 2 counts, one per rank, that sum to 10"
    assert checked_sizes([10, 0], 10, 2, "features") == (10, 0)


def test_dims_are_counted_from_either_end():
    assert [checked_dim(dim, (4, 5, 6)) for dim in (0, 2, -1, -3)] == [0, 2, 2, 0]
    for dim in (3, -4):
        with pytest.raises(ShardingError, match=rf"shape \[4, 5, 6\] has no dimension {dim}"):
            checked_dim(dim, (4, 5, 6))
    with pytest.raises(ShardingError, match=r"shape \[\] has no dimension 0"):
        checked_dim(0, ())


@st.composite
def splits(draw):
    """Shape, dim, ranks, stride and sizes (or None) of a split."""
    t = draw(st.integers(1, 5))
    stride = draw(st.integers(1, 3))
    section = draw(st.integers(0, 7))
    shape = draw(st.lists(st.integers(1, 3), min_size=0, max_size=2))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, stride * section)
    sizes = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, section), min_size=t - 1, max_size=t - 1)))
        sizes = [int(n) for n in np.diff([0, *cuts, section])]
    return tuple(shape), dim, t, stride, sizes


@settings(max_examples=300)
@given(split=splits(), from_the_end=st.booleans())
def test_split_against_numpy(split, from_the_end):
    shape, dim, t, stride, sizes = split
    layout = ParamLayout.split(shape, dim - len(shape) if from_the_end else dim, t, stride=stride, sizes=sizes)
    whole = whole_of(shape)
    sections = np.split(whole.numpy(), stride, axis=dim)
    cuts = t if sizes is None else np.cumsum(sizes)[:-1]
    shards = []
    for rank in range(t):
        parts = [np.array_split(section, cuts, axis=dim)[rank] for section in sections]
        expected = torch.from_numpy(np.concatenate(parts, axis=dim))
        shard = layout.take(whole, rank)
        assert torch.equal(shard, expected)
        assert layout.local_shape(rank) == tuple(expected.shape)
        assert layout.local_size(rank) == expected.shape[dim]
        shards.append(shard)
    assert_bit_equal(layout.assemble(shards), whole)
    assert layout.dim == dim
    assert layout.stride == stride


def test_replicated():
    layout = ParamLayout.replicated([3, 2], 4)
    whole = whole_of((3, 2))
    assert layout.take(whole, 3) is whole
    assert layout.local_shape(2) == (3, 2)
    back = layout.assemble([whole] * 4)
    assert_bit_equal(back, whole)
    assert back.data_ptr() != whole.data_ptr()


def test_overlapping_runs_in_any_order():
    # Two key-value heads of 2 on four ranks, each held twice; the last rank keeps its queries behind its head.
    layout = ParamLayout((4, 3), 0, (((0, 2),), ((0, 2),), ((2, 4),), ((3, 4), (2, 3))), 4)
    whole = whole_of((4, 3))
    shards = [layout.take(whole, rank) for rank in range(4)]
    assert shards[3].tolist() == [whole[3].tolist(), whole[2].tolist()]
    assert_bit_equal(layout.assemble(shards), whole)


def test_assemble_makes_a_new_tensor_and_take_a_view_of_one_run():
    whole = whole_of((4, 3))
    one = ParamLayout.split((4, 3), 0, 1)
    assert one.take(whole, 0).data_ptr() == whole.data_ptr()
    assert one.assemble([whole]).data_ptr() != whole.data_ptr()
    two = ParamLayout.split((4, 3), 0, 2)
    assert two.take(whole, 1).data_ptr() == whole[2:].data_ptr()


def test_a_layout_stands_for_itself():
    layout = ParamLayout.split((6, 2), 0, 2)
    assert layout == ParamLayout.split([6, 2], 0, 2, sizes=[3, 3])
    assert layout != replace(layout, stride=2)
    assert len({layout, ParamLayout.split((6, 2), 0, 2)}) == 1
    with pytest.raises(AttributeError):
        layout.dim = 1


def test_errors_of_layouts_name_the_values():
    with pytest.raises(ShardingError, match="7 is not divisible by 2"):
        ParamLayout.split((7, 2), 0, 2, stride=2)
    with pytest.raises(ShardingError, match=r"dimension 1 of shape \[3, 8\]: sizes \[3, 3\] must be 2.*sum to 8"):
        ParamLayout.split((3, 8), 1, 2, sizes=[3, 3])
    # One size per rank of one section, not of the whole dimension.
    with pytest.raises(ShardingError, match=r"sizes \[5, 3\] must be 2 counts.*sum to 4"):
        ParamLayout.split((8,), 0, 2, stride=2, sizes=[5, 3])
    with pytest.raises(ShardingError, match=r"shape \[3, 8\] has no dimension 2"):
        ParamLayout.split((3, 8), 2, 2)
    layout = ParamLayout.split((5, 2), 0, 2)
    with pytest.raises(ShardingError, match=r"expected a tensor of shape \[5, 2\], got \[2, 5\]"):
        layout.take(torch.zeros(2, 5), 0)
    with pytest.raises(ShardingError, match="expected 2 shards, one per rank, got 1"):
        layout.assemble([torch.zeros(5, 2)])
    with pytest.raises(ShardingError, match=r"shard of rank 1 has shape \[3, 2\], expected \[2, 2\]"):
        layout.assemble([torch.zeros(3, 2), torch.zeros(3, 2)])
