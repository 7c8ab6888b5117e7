"""Sums by one tree over parts have the same bits however the parts are dealt out to ranks."""

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal

from shardwise.core.communication.collectives import all_reduce, reduce_scatter
from shardwise.core.communication.transports import choose_transport
from shardwise.core.communication.trees import (
    TreeCounter,
    TreeTransport,
    exact_parts,
    sum_in_parts,
    tree_sum,
    tree_sum_stacked_,
)
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamLayout, local_parts
from shardwise.core.topology import Topology

PARTS = 8


def terms(*shape, dtype=torch.float32):
    """As many as there are parts; their sum depends on the order."""
    return list((torch.randn(PARTS, *shape).exp() * torch.randn(PARTS, *shape)).to(dtype).unbind(0))


def written_out(parts):
    a, b, c, d, e, f, g, h = parts
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


def roots(parts, per_rank):
    return [tree_sum(parts[first : first + per_rank]) for first in range(0, PARTS, per_rank)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tree_within_a_rank(dtype):
    parts = terms(1000, dtype=dtype)
    before = [part.clone() for part in parts]
    assert_bit_equal(tree_sum(parts), written_out(before))
    assert all(torch.equal(part, copy) for part, copy in zip(parts, before, strict=True))
    assert not torch.equal(tree_sum(parts), sum(parts[1:], parts[0])), "the order of the sum is seen"
    counter = TreeCounter()
    for part in parts:
        counter.add(part)
    assert_bit_equal(counter.total(), written_out(before))
    assert_bit_equal(tree_sum_stacked_(torch.stack(parts)), written_out(before))
    overwritten = TreeCounter(may_overwrite=True)
    for part in parts:
        overwritten.add(part)
    assert_bit_equal(overwritten.total(), written_out(before))
    assert overwritten.total() is parts[0]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((7, 9), torch.float32), ((33, 301), torch.float32), ((33, 301), torch.bfloat16)]
)
def test_the_tree_between_ranks(group, shape, dtype):
    parts, topology = terms(*shape, dtype=dtype), Topology.create(tp=group.size())
    exact = topology.group("tp")
    plain = all_reduce(tree_sum(parts[group.rank() :: group.size()]), group=exact)
    sum_in_parts(exact, PARTS)
    per_rank = PARTS // group.size()
    own, expected = roots(parts, per_rank)[group.rank()], written_out(parts)
    assert not torch.equal(plain, expected), "the order of the sum is seen"
    assert_bit_equal(all_reduce(own, group=exact), expected)
    compiled = torch.compile(lambda part: all_reduce(part, group=exact), backend="eager", fullgraph=True)
    assert_bit_equal(compiled(own), expected)
    assert torch.equal(all_reduce(own, group=exact, op=dist.ReduceOp.MAX), torch.stack(roots(parts, per_rank)).amax(0))
    assert choose_transport("reduce_scatter", own, exact) is TreeTransport
    assert choose_transport("all_gather", own, exact) is not TreeTransport
    for dim in (0, 1):
        shard = reduce_scatter(own, group=exact, dim=dim)
        assert_bit_equal(shard, torch.tensor_split(expected, group.size(), dim)[group.rank()].contiguous())
    topology.destroy()


@pytest.mark.ranks(2)
def test_a_group_sums_in_one_way(group):
    topology = Topology.create(tp=2)
    exact = topology.group("tp")
    assert exact_parts(exact) is None
    for parts, message in ((3, "a power of two"), (1, "at most 1, and a group has 2")):
        with pytest.raises(ConfigError, match=message):
            sum_in_parts(exact, parts)
    sum_in_parts(exact, 4)
    with pytest.raises(ConfigError, match="over 4 parts already"):
        sum_in_parts(exact, 8)
    assert (exact_parts(exact), exact_parts(group), exact_parts(None)) == (4, None, None)
    topology.destroy()


def test_parts_of_a_shard():
    split = ParamLayout.split((48,), 0, 2, stride=2)
    assert local_parts(split, 1, 4, what="x") == (((0, 6), (12, 18)), ((6, 12), (18, 24)))
    # 4099 ids on 2 ranks begin at 2050, and of 8 parts the fifth at 2051.
    for size, parts, fitting in ((4099, 8, 4), (6, 8, 2), (4097, 8, 8)):
        layout = ParamLayout.split((size,), 0, 2)
        if fitting == parts:
            assert sum(stop - start for ((start, stop),) in local_parts(layout, 0, parts, what="x")) == 2049
            continue
        with pytest.raises(
            ConfigError, match=f"the vocabulary, of {size} .*the largest exact_parts that works is {fitting}$"
        ):
            local_parts(layout, 0, parts, what="the vocabulary")
