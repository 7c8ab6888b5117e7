"""Dropout of a sharded tensor: one mask at every number of ranks, or each rank's own."""

import hypothesis.strategies as st
import pytest
import torch
from harness.parity import assert_bit_equal, assert_unmodified, gather_shards
from hypothesis import given, settings

from shardwise.core.errors import ConfigError, ShardingError, TopologyError
from shardwise.core.random import DATA_PARALLEL_STREAM, RandomStreams, seed_streams, streams
from shardwise.core.sharding import ParamLayout, balanced_sizes
from shardwise.nn import dropout
from shardwise.nn.dropout import global_keep_mask, sharded_dropout

SHAPE = (5, 7, 6)
P = 0.3


def whole_mask(shape, p=P, seed=11):
    """The mask that belongs to the whole tensor, drawn here in one piece per block as one rank would."""
    seed_streams(seed, 0, rng="global")
    flat = torch.empty(int(torch.tensor(shape).prod()), dtype=torch.bool)
    with streams().fork("global-rng"):
        for block in flat.split(dropout._BLOCK_ELEMENTS):
            block.bernoulli_(1 - p)
    return flat.view(shape)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("block", [1 << 20, 16])
def test_the_gathered_mask_is_the_same_at_every_number_of_ranks(group, monkeypatch, dim, block):
    monkeypatch.setattr(dropout, "_BLOCK_ELEMENTS", block)
    layout = ParamLayout.split(SHAPE, dim, group.size())
    sizes = balanced_sizes(SHAPE[dim], group.size())
    whole = torch.randn(SHAPE, dtype=torch.float64)
    expected = [torch.where(mask, whole / (1 - P), 0) for mask in (whole_mask(SHAPE), whole_mask(SHAPE, seed=12))]
    assert not torch.equal(*expected)
    shard = layout.take(whole, group.rank()).clone().requires_grad_()
    for seed, output in zip((11, 12), expected, strict=True):
        seed_streams(seed, group.rank(), rng="global")
        with assert_unmodified(shard):
            dropped = sharded_dropout(shard, P, dim=dim, group=group, sizes=sizes)
        torch.testing.assert_close(gather_shards(dropped, layout, group), output)
        dropped.backward(torch.ones_like(dropped))
        assert_bit_equal(gather_shards(shard.grad, layout, group) != 0, output != 0)
        shard.grad = None
        # The next tensor gets other numbers, and the same ones on every rank count.
        again = sharded_dropout(shard, P, dim=dim, group=group, sizes=sizes)
        assert not torch.equal(gather_shards(again, layout, group), gather_shards(dropped, layout, group))
        after = torch.rand(1)
        with streams().fork("global-rng"):
            after = torch.rand(1)
        assert_bit_equal(after, gather_shards(after, ParamLayout.replicated((1,), group.size()), group))


@pytest.mark.ranks(2)
def test_equal_shards_need_no_sizes_and_whole_tensors_no_dimension(group):
    mask = whole_mask((4, 6))
    seed_streams(11, group.rank(), rng="global")
    keep = global_keep_mask((4, 3), P, dim=1, group=group)
    assert_bit_equal(gather_shards(keep, ParamLayout.split((4, 6), 1, 2), group), mask)
    seed_streams(11, group.rank(), rng="global")
    whole = torch.randn(4, 6, dtype=torch.bfloat16)
    dropped = sharded_dropout(whole, P, dim=None, group=group)
    assert dropped.dtype == torch.bfloat16
    assert_bit_equal(dropped != 0, mask)


@settings(max_examples=80)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    data=st.data(),
    t=st.integers(1, 4),
    block=st.integers(1, 40),
)
def test_slices_are_those_of_the_whole_mask(shape, data, t, block):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=t, max_size=t))
    shape[dim] = sum(sizes)

    class Ranks:
        def __init__(self, rank):
            self.rank = lambda: rank
            self.size = lambda: t

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropout, "_BLOCK_ELEMENTS", block)
        expected = whole_mask(shape)
        parts = []
        for rank in range(t):
            seed_streams(11, rank, rng="global")
            local = list(shape)
            local[dim] = sizes[rank]
            parts.append(global_keep_mask(local, P, dim=dim, group=Ranks(rank), sizes=sizes))
    assert_bit_equal(torch.cat(parts, dim), expected)


@pytest.mark.ranks(1)
def test_no_more_memory_than_the_slice_and_a_block(group, monkeypatch):
    monkeypatch.setattr(dropout, "_BLOCK_ELEMENTS", 64)
    largest = 0
    make = torch.empty

    def watched(*args, **kwargs):
        nonlocal largest
        result = make(*args, **kwargs)
        largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(torch, "empty", watched)
    monkeypatch.setattr(group.__class__, "size", lambda self: 100)
    seed_streams(1, 0, rng="global")
    global_keep_mask((20, 2), P, dim=1, group=group)
    assert largest == 64


@pytest.mark.ranks(2)
def test_per_rank_masks_are_each_rank_s_own(group):
    seed_streams(11, group.rank())
    ones = torch.ones(64)
    dropped = sharded_dropout(ones, P, dim=0, group=group)
    seed_streams(11, group.rank())
    with streams().fork():
        assert_bit_equal(dropped, torch.nn.functional.dropout(ones, P))
    both = gather_shards(dropped, ParamLayout.split((128,), 0, 2), group)
    assert not torch.equal(both[:64], both[64:])
    whole = sharded_dropout(ones, P, dim=None, group=group)
    assert_bit_equal(whole, gather_shards(whole, ParamLayout.replicated((64,), 2), group))
    with streams().fork(DATA_PARALLEL_STREAM):
        assert not torch.equal(whole, torch.nn.functional.dropout(ones, P))


@pytest.mark.ranks(1)
def test_the_ends(group):
    x = torch.randn(6, requires_grad=True)
    for rng in ("per_rank", "global"):
        seed_streams(11, 0, rng=rng)
        before = streams().get_states()
        assert sharded_dropout(x, 0.0, dim=0, group=group) is x
        assert sharded_dropout(x, P, dim=0, group=group, training=False) is x
        for name, state in streams().get_states().items():
            assert_bit_equal(state, before[name])
        nothing = sharded_dropout(x, 1.0, dim=0, group=group)
        (gradient,) = torch.autograd.grad(nothing.sum(), x)
        assert not nothing.any()
        assert not gradient.any()
        assert sharded_dropout(torch.empty(0, 3), P, dim=1, group=group).shape == (0, 3)


@pytest.mark.ranks(1)
def test_what_dropout_cannot_be(group):
    seed_streams(11, 0, rng="global")
    x = torch.randn(6, 2)
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="is not from 0 to 1"):
            sharded_dropout(x, p, dim=0, group=group)
    with pytest.raises(ShardingError, match=r"sizes \[5\] do not fit a shard of 6 along dimension 0"):
        sharded_dropout(x, P, dim=0, group=group, sizes=[5])
    with pytest.raises(ShardingError, match=r"shape \[6, 2\] has no dimension 2"):
        sharded_dropout(x, P, dim=2, group=group)
    seed_streams(11, 0)
    with pytest.raises(TopologyError, match="no random stream 'global-rng'"):
        global_keep_mask((3,), P, dim=0, group=group)
    assert RandomStreams().rule == "per_rank"
