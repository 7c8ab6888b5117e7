"""Collectives against what every rank can compute alone, since every rank draws all ranks' inputs.

Values are small integers, so that every dtype holds every sum and equality is of bits.
"""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_unmodified
from hypothesis import given, settings

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.collectives import (
    all_gather,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    all_to_all,
    broadcast_,
    reduce_numbers,
    reduce_scatter,
    reduce_scatter_async,
    split_for_rank,
)
from shardwise.core.communication.context import GlobalMemoryBuffer
from shardwise.core.communication.transports import torch_distributed
from shardwise.core.errors import ShardingError
from shardwise.core.sharding import balanced_sizes
from shardwise.core.topology import Topology

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]
MEMORY = ("contiguous", "transposed", "sliced", "expanded")


def inputs_of_all(shapes, dtype, memory="contiguous"):
    """One tensor for each rank, the same on all ranks, laid out in memory in the given way."""
    return [in_memory(torch.randint(-9, 10, shape).to(dtype), memory) for shape in shapes]


def in_memory(tensor, memory):
    if memory == "transposed":
        return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
    if memory == "sliced" and tensor.numel() > 1:
        return torch.stack([tensor, torch.full_like(tensor, 77)], dim=-1)[..., 0]
    if memory == "expanded" and tensor.size(0) > 0:
        return tensor[:1].expand(tensor.shape)
    return tensor


@st.composite
def whole_shapes(draw):
    """A shape, one of its dimensions, and cuts of that dimension between four ranks."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = draw(st.integers(0, 9))
    cuts = draw(st.none() | st.lists(st.integers(0, shape[dim]), min_size=3, max_size=3).map(sorted))
    return tuple(shape), dim, cuts


def sizes_of(cuts, n, t):
    """One size for each of ``t`` ranks, from cuts made for four; None for the balanced rule."""
    if cuts is None:
        return None
    edges = [0, *cuts[: t - 1], n]
    return [stop - start for start, stop in pairwise(edges)]


@pytest.mark.ranks(1, 2, 3, 4)
@settings(max_examples=40)
@given(case=whole_shapes(), dtype=st.sampled_from(DTYPES), memory=st.sampled_from(MEMORY), from_the_end=st.booleans())
def test_every_collective_on_any_shape(group, case, dtype, memory, from_the_end):
    (shape, dim, cuts), t, me = case, group.size(), group.rank()
    n = shape[dim]
    sizes = sizes_of(cuts, n, t)
    full_sizes = list(balanced_sizes(n, t)) if sizes is None else sizes
    axis = dim - len(shape) if from_the_end else dim

    every = inputs_of_all([shape] * t, dtype, memory)
    total = torch.stack(every).sum(dim=0, dtype=dtype)
    with assert_unmodified(*every):
        reduced = all_reduce(every[me], group=group)
        largest = all_reduce(every[me], group=group, op=dist.ReduceOp.MAX)
        scattered = reduce_scatter(every[me], group=group, dim=axis, sizes=sizes)
        own = split_for_rank(every[0], group=group, dim=axis, sizes=sizes)
        gathered = all_gather(own, group=group, dim=axis, sizes=full_sizes)
    expected = {
        "all_reduce": (reduced, total),
        "maximum": (largest, torch.stack(every).amax(dim=0)),
        "reduce_scatter": (scattered, total.split(full_sizes, dim)[me]),
        "split_for_rank": (own, every[0].split(full_sizes, dim)[me]),
        "all_gather": (gathered, every[0]),
    }
    for name, (result, right) in expected.items():
        assert result.dtype == dtype, name
        assert torch.equal(result, right), name


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_new_and_contiguous(group, dtype):
    t, me = group.size(), group.rank()
    for shape in [(t, 2, 3), (2, t, 3), (t + 1, 3)]:
        for memory in MEMORY:
            every = inputs_of_all([shape] * t, dtype, memory)
            with assert_unmodified(*every):
                results = [all_reduce(every[me], group=group)]
                for dim in range(len(shape)):
                    results.append(all_gather(every[me], group=group, dim=dim))
                    assert_bit_equal(results[-1], torch.cat(every, dim))
                    results.append(reduce_scatter(every[me], group=group, dim=dim))
                    pending = [
                        all_reduce_async(every[me], group=group),
                        all_gather_async(every[me], group=group, dim=dim),
                        reduce_scatter_async(every[me], group=group, dim=dim),
                    ]
                    for now, later in zip((results[0], *results[-2:]), pending, strict=True):
                        waited = later.wait()
                        assert_bit_equal(waited, now)
                        results.append(waited)
                for result in results:
                    assert result.is_contiguous()
                    result.fill_(5)


@pytest.mark.ranks(1, 2, 4)
def test_all_to_all(group):
    t, me = group.size(), group.rank()
    for dtype in DTYPES:
        for memory in MEMORY:
            every = inputs_of_all([(2 * t, 3)] * t, dtype, memory)
            with assert_unmodified(*every):
                result = all_to_all(every[me], group=group)
            assert_bit_equal(result, torch.cat([sent.chunk(t)[me] for sent in every]))
            # Rank r sends (r + 2s) % 4 rows to rank s: some send nothing to some, and not what they receive.
            rows = [[(r + 2 * s) % 4 for s in range(t)] for r in range(t)]
            every = inputs_of_all([(sum(rows[r]), 3) for r in range(t)], dtype, memory)
            received = [rows[r][me] for r in range(t)]
            with assert_unmodified(*every):
                result = all_to_all(every[me], group=group, output_sizes=received, input_sizes=rows[me])
            assert_bit_equal(result, torch.cat([every[r].split(rows[r])[me] for r in range(t)]))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("memory", ["contiguous", "transposed", "sliced"])
def test_broadcast(group, memory):
    t, me = group.size(), group.rank()
    for dtype in DTYPES:
        for source in range(t):
            every = [tensor.clone() for tensor in inputs_of_all([(4, 3)] * t, dtype)]
            # Each rank keeps its tensor in memory in its own way.
            tensor = in_memory(every[me].clone(), memory if me % 2 == 0 else "contiguous")
            assert broadcast_(tensor, group=group, group_src=source) is tensor
            assert_bit_equal(tensor, every[source])


@pytest.mark.ranks(2)
def test_the_caller_s_memory_is_taken_where_it_is_given_up(group):
    tensor = torch.ones(3, 4)
    assert all_reduce(tensor, group=group, may_overwrite=True).data_ptr() == tensor.data_ptr()
    assert all_reduce_async(tensor, group=group, may_overwrite=True).wait().data_ptr() == tensor.data_ptr()
    assert tensor.tolist() == [[4.0] * 4] * 3
    # What is not contiguous has no memory that a collective could use.
    transposed = torch.arange(6.0).view(2, 3).t()
    with assert_unmodified(transposed):
        assert_bit_equal(all_reduce(transposed, group=group, may_overwrite=True), 2 * transposed)
        assert_bit_equal(all_reduce_async(transposed, group=group, may_overwrite=True).wait(), 2 * transposed)


@pytest.mark.ranks(1)
def test_on_one_rank_nothing_is_done(group):
    tensor = torch.randn(3, 4)
    for function in (all_reduce, all_gather, reduce_scatter, all_to_all):
        assert function(tensor, group=group) is tensor
    for function in (all_reduce_async, all_gather_async, reduce_scatter_async):
        assert function(tensor, group=group).wait() is tensor
    assert split_for_rank(tensor, group=group, dim=1) is tensor


@pytest.mark.ranks(2)
def test_what_was_sent_stays_alive_until_the_end(group):
    for _ in range(20):
        # The temporary contiguous copies have no other owner.
        pending = [
            all_gather_async(torch.full((300, 50), 3.0).t(), group=group, dim=0),
            reduce_scatter_async(torch.full((301, 50), 3.0), group=group, dim=1),
            all_reduce_async(torch.full((300, 50), 3.0).t(), group=group),
        ]
        junk = [torch.zeros(15_050) for _ in range(8)]
        gathered, scattered, reduced = (each.wait() for each in pending)
        assert bool((gathered == 3).all() and (scattered == 6).all() and (reduced == 6).all())
        del junk


@pytest.mark.ranks(3)
def test_errors_are_local_and_name_the_values(group):
    x = torch.ones(4, 5)
    me = group.rank()
    for function in (reduce_scatter, split_for_rank):
        with pytest.raises(
            ShardingError, match=r"dimension 1 of shape \[4, 5\]: sizes \[2, 2, 2\] must be 3 counts.* sum to 5"
        ):
            function(x, group=group, dim=1, sizes=[2, 2, 2])
        with pytest.raises(ShardingError, match=r"sizes \[2, 3\] must be 3 counts"):
            function(x, group=group, dim=1, sizes=[2, 3])
    message = rf"all_gather on rank {me} of 3: sizes \[1, 2, 3\] do not fit a shard of 4 along dimension 0"
    with pytest.raises(ShardingError, match=message):
        all_gather(x, group=group, sizes=[1, 2, 3])
    with pytest.raises(ShardingError, match=r"sizes \[4, 4\] do not fit a shard of 4 .*pass one size per rank"):
        all_gather(x, group=group, sizes=[4, 4])
    for function in (all_gather, reduce_scatter, split_for_rank):
        for dim in (2, -3):
            with pytest.raises(ShardingError, match=rf"shape \[4, 5\] has no dimension {dim}"):
                function(x, group=group, dim=dim)
        with pytest.raises(ShardingError, match=r"shape \[\] has no dimension 0"):
            function(torch.tensor(1.0), group=group, dim=0)
    # Nobody is left waiting.
    dist.barrier(group=group)


@pytest.mark.ranks(2)
def test_a_scalar_can_be_reduced(group):
    assert all_reduce(torch.tensor(3.0), group=group).item() == 6


@pytest.mark.ranks(4)
def test_numbers_are_reduced_over_a_grid_with_one_collective_for_each_axis(group):
    topology = Topology.create(tp=2)
    tp, dp, rank = topology.group("tp"), topology.group("dp"), group.rank()
    row, column = tp.rank(), dp.rank()
    in_tp = torch.tensor([10.0 + row, 100.0 * column])
    everywhere, largest = torch.tensor([2.0**rank]), torch.tensor([-3.0 - rank, float(rank == 2), 0.5])
    given = [tensor.clone() for tensor in (in_tp, everywhere, largest)]
    with CollectiveCounter() as counter:
        (of_tp, of_all), of_largest = reduce_numbers([(in_tp, [tp]), (everywhere, [dp, tp])], largest, groups=[tp, dp])
    assert [launch.name for launch in counter.launches] == ["all_reduce"] * 2
    assert_bit_equal(of_tp, torch.tensor([21.0, 200.0 * column]))
    assert_bit_equal(of_all, torch.tensor([15.0]))
    assert_bit_equal(of_largest, torch.tensor([-3.0, 1.0, 0.5]))
    for before, after in zip(given, (in_tp, everywhere, largest), strict=True):
        assert_bit_equal(after, before)
    nothing = torch.empty(0)
    with CollectiveCounter() as counter:
        assert reduce_numbers([(in_tp, [])], nothing, groups=[tp, dp])[0][0] is in_tp
    assert not counter.launches


@pytest.mark.ranks(2)
def test_gloo_sends_even_shards_as_they_are(group, monkeypatch):
    sent = []
    gather = torch_distributed._all_gather_into

    def recorded_gather(out, shard, **options):
        sent.append(shard)
        return gather(out, shard, **options)

    monkeypatch.setattr(torch_distributed, "_all_gather_into", recorded_gather)
    shard = torch.ones(3, 2)
    torch_distributed.all_gather(shard, group, 0, [3, 3]).wait()
    assert sent[0].data_ptr() == shard.data_ptr()
    # Uneven ones travel padded to the largest.
    torch_distributed.all_gather(torch.ones(3 - group.rank(), 2), group, 0, [3, 2]).wait()
    assert sent[1].shape == (3, 2)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("wide", [5, 100_000])
def test_gathering_into_a_buffer(group, dim, even, wide):
    buffer = GlobalMemoryBuffer()
    sizes = [2] * group.size() if even else balanced_sizes(4, group.size())
    shape = [wide, wide]
    shape[dim], shape[1 - dim] = sum(sizes), wide
    first, second = torch.randn(shape), torch.randn(shape)
    results = [
        all_gather(whole.split(sizes, dim)[group.rank()], group=group, dim=dim, sizes=sizes, buffer=buffer)
        for whole in (first, second)
    ]
    assert_bit_equal(results[1], second)
    # The second went where the first had been.
    assert results[0].data_ptr() == results[1].data_ptr()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("rows", [1, 40, 9_000, 300_000])
def test_results_in_the_memory_of_the_caller(group, rows):
    """As large as one chunk of shared memory, and as many; and as what gloo sends in messages."""
    t, me = group.size(), group.rank()
    every = inputs_of_all([(rows * t, 2)] * t, torch.float32)
    mine = slice(me * rows, (me + 1) * rows)
    whole = every[me].clone()
    own = reduce_scatter(whole, group=group, may_overwrite=True)
    assert own.data_ptr() == whole[mine].data_ptr()
    assert_bit_equal(own, torch.stack(every).sum(0)[mine])
    pending = all_gather_async(own, group=group, buffer=whole)
    assert pending.wait().data_ptr() == whole.data_ptr()
    assert_bit_equal(whole, torch.stack(every).sum(0))
    # Where a view is no run of memory the result is new.
    columns = every[me].clone().t()
    other = reduce_scatter(columns, group=group, dim=1, may_overwrite=True)
    assert_bit_equal(columns, every[me].t())
    assert_bit_equal(other, torch.stack(every).sum(0).t()[:, mine])


@pytest.mark.ranks(3)
def test_large_shards_of_different_sizes_are_gathered(group):
    sizes = [100_000, 0, 70_001]
    every = inputs_of_all([(size, 3) for size in sizes], torch.float64)
    with assert_unmodified(*every):
        gathered = all_gather(every[group.rank()], group=group, sizes=sizes)
    assert_bit_equal(gathered, torch.cat(every))


@pytest.mark.ranks(2)
def test_a_part_is_a_new_tensor(group):
    whole = torch.arange(6.0).view(3, 2)
    for dim in (0, 1):
        part = split_for_rank(whole, group=group, dim=dim)
        assert part.is_contiguous()
        part.zero_()
    assert torch.equal(whole, torch.arange(6.0).view(3, 2))
