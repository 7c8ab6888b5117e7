"""The counter sees what is launched, whoever launches it."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from shardwise.collectives import accounting, primitives
from shardwise.collectives.accounting import CollectiveCounter, Launch
from shardwise.tensor_parallel.regions import _CopyToModelParallelRegion, _GatherFromModelParallelRegion


def launched(function):
    with CollectiveCounter() as counter:
        function()
    return [(launch.name, launch.num_bytes) for launch in counter.launches]


@pytest.mark.ranks(2)
def test_primitives(group):
    x = torch.ones(4, 3)
    assert launched(lambda: primitives.all_reduce(x, group=group)) == [("all_reduce", 48)]
    assert launched(lambda: primitives.all_reduce(x.half(), group=group)) == [("all_reduce", 24)]
    assert launched(lambda: primitives.all_reduce_async(x, group=group).wait()) == [("all_reduce", 48)]
    assert launched(lambda: primitives.all_gather(x, group=group)) == [("all_gather", 48)]
    assert launched(lambda: primitives.all_gather(x, group=group, dim=1)) == [("all_gather", 48)]
    assert launched(lambda: primitives.reduce_scatter(x, group=group)) == [("reduce_scatter", 48)]
    assert launched(lambda: primitives.all_to_all(x, group=group)) == [("all_to_all", 48)]
    assert launched(lambda: primitives.broadcast_(x, group=group)) == [("broadcast", 48)]
    assert launched(lambda: primitives.split_for_rank(x, group=group, dim=0)) == []
    # Uneven shards count as they are, however they travel.
    own = torch.ones(2 - group.rank(), 3)
    assert launched(lambda: primitives.all_gather(own, group=group, sizes=[2, 1])) == [
        ("all_gather", 24 - 12 * group.rank())
    ]
    assert launched(lambda: primitives.reduce_scatter(torch.ones(3, 3), group=group)) == [("reduce_scatter", 36)]


@pytest.mark.ranks(1)
def test_nothing_is_launched_on_one_rank(group):
    x = torch.ones(4, 3)
    for function in (primitives.all_reduce, primitives.all_gather, primitives.reduce_scatter, primitives.all_to_all):
        assert launched(lambda function=function: function(x, group=group)) == []
    assert launched(lambda: primitives.broadcast_(x, group=group)) == []


@pytest.mark.ranks(2)
def test_what_others_launch(group):
    x = torch.ones(4, dtype=torch.float64)
    parts = [torch.empty(4, dtype=torch.float64) for _ in range(2)]
    root = group.rank() == 0
    cases = [
        ("all_gather", 32, lambda: dist.all_gather(parts, x, group=group)),
        ("reduce", 32, lambda: dist.reduce(x.clone(), 0, group=group)),
        ("reduce_scatter", 64, lambda: dist.reduce_scatter(x.clone(), [x, x], group=group)),
        ("gather", 32, lambda: dist.gather(x, parts if root else None, 0, group=group)),
        ("scatter", 64 if root else 0, lambda: dist.scatter(x.clone(), [x, x] if root else None, 0, group=group)),
        ("all_reduce", 32, lambda: functional.all_reduce(x, "sum", group).clone()),
        ("all_gather", 32, lambda: functional.all_gather_single(x, 0, group).clone()),
        ("reduce_scatter", 32, lambda: functional.reduce_scatter_single(x, "sum", 0, group).clone()),
        ("broadcast", 32, lambda: functional.broadcast(x, 0, group).clone()),
    ]
    for name, num_bytes, function in cases:
        assert launched(function) == [(name, num_bytes)]


@pytest.mark.ranks(2)
def test_backward_is_seen_too(group):
    x = torch.ones(4, 2, requires_grad=True)
    with CollectiveCounter() as counter:
        y = _GatherFromModelParallelRegion.apply(_CopyToModelParallelRegion.apply(x, group), group)
        assert counter.launches == [Launch("all_gather", 32)]
        y.sum().backward()
    assert counter.launches == [Launch("all_gather", 32), Launch("all_reduce", 32)]
    assert counter.num_bytes == 64


@pytest.mark.ranks(2)
def test_only_the_block_is_seen(group):
    x = torch.ones(4)
    with CollectiveCounter() as outer:
        with CollectiveCounter() as inner:
            primitives.all_reduce(x, group=group)
        primitives.all_reduce(x, group=group)
    primitives.all_reduce(x, group=group)
    assert (len(inner.launches), len(outer.launches)) == (1, 2)


def test_every_collective_of_this_pytorch_is_known():
    """A collective under a name that the counter does not know would count as none."""
    others = {
        "barrier",
        "monitored_barrier_",
        "check_for_nan",
        "wait_tensor",
        "_wrap_tensor_autograd",
        # Between two ranks.
        "send",
        "recv_",
        "recv_any_source_",
        "isend",
        "irecv",
        "batch_p2p_ops",
    }
    spaces = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    known = {name for space, name in spaces if space in ("c10d", "_c10d_functional")}
    assert len(known) > 20
    assert known - others == set(accounting._OPERATORS)
