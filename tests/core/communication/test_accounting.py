"""The counter sees what is launched, whoever launches it."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from shardwise.core.communication import accounting, collectives
from shardwise.core.communication.accounting import CollectiveCounter, Launch
from shardwise.tensor_parallel.regions import _CopyToModelParallelRegion, _GatherFromModelParallelRegion


def launched(function):
    with CollectiveCounter() as counter:
        function()
    return [(launch.name, launch.num_bytes) for launch in counter.launches]


@pytest.mark.ranks(2)
def test_primitives(group):
    x = torch.ones(4, 3)
    assert launched(lambda: collectives.all_reduce(x, group=group)) == [("all_reduce", 48)]
    assert launched(lambda: collectives.all_reduce(x.half(), group=group)) == [("all_reduce", 24)]
    assert launched(lambda: collectives.all_reduce_async(x, group=group).wait()) == [("all_reduce", 48)]
    assert launched(lambda: collectives.all_gather(x, group=group)) == [("all_gather", 48)]
    assert launched(lambda: collectives.all_gather(x, group=group, dim=1)) == [("all_gather", 48)]
    assert launched(lambda: collectives.reduce_scatter(x, group=group)) == [("reduce_scatter", 48)]
    assert launched(lambda: collectives.all_to_all(x, group=group)) == [("all_to_all", 48)]
    assert launched(lambda: collectives.broadcast_(x, group=group)) == [("broadcast", 48)]
    assert launched(lambda: collectives.split_for_rank(x, group=group, dim=0)) == []
    # Uneven shards count as they are, however they travel.
    own = torch.ones(2 - group.rank(), 3)
    assert launched(lambda: collectives.all_gather(own, group=group, sizes=[2, 1])) == [
        ("all_gather", 24 - 12 * group.rank())
    ]
    assert launched(lambda: collectives.reduce_scatter(torch.ones(3, 3), group=group)) == [("reduce_scatter", 36)]


@pytest.mark.ranks(1)
def test_nothing_is_launched_on_one_rank(group):
    x = torch.ones(4, 3)
    for function in (
        collectives.all_reduce,
        collectives.all_gather,
        collectives.reduce_scatter,
        collectives.all_to_all,
    ):
        assert launched(lambda function=function: function(x, group=group)) == []
    assert launched(lambda: collectives.broadcast_(x, group=group)) == []


@pytest.mark.ranks(2)
def test_what_others_launch(group):
    x = torch.ones(4, dtype=torch.float64)
    parts = [torch.empty(4, dtype=torch.float64) for _ in range(2)]
    root = group.rank() == 0
    # PyTorch before 2.13 has them under other names.
    all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    cases = [
        ("all_gather", 32, lambda: dist.all_gather(parts, x, group=group)),
        ("reduce", 32, lambda: dist.reduce(x.clone(), 0, group=group)),
        ("reduce_scatter", 64, lambda: dist.reduce_scatter(x.clone(), [x, x], group=group)),
        ("gather", 32, lambda: dist.gather(x, parts if root else None, 0, group=group)),
        ("scatter", 64 if root else 0, lambda: dist.scatter(x.clone(), [x, x] if root else None, 0, group=group)),
        ("all_reduce", 32, lambda: functional.all_reduce(x, "sum", group).clone()),
        ("all_gather", 32, lambda: all_gather(x, 0, group).clone()),
        ("reduce_scatter", 32, lambda: reduce_scatter(x, "sum", 0, group).clone()),
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
            collectives.all_reduce(x, group=group)
        collectives.all_reduce(x, group=group)
    collectives.all_reduce(x, group=group)
    assert (len(inner.launches), len(outer.launches)) == (1, 2)


@pytest.mark.ranks(2)
def test_launches_of_other_threads_are_seen(group):
    x = torch.ones(4)
    # Which thread's collective is whose is for the backend to find, so there is one at a time.
    with CollectiveCounter() as counter:
        for function in (
            lambda: collectives.all_reduce(x, group=group),
            lambda: dist.all_reduce(x.clone(), group=group),
            lambda: collectives.all_gather(torch.ones(2 - group.rank()), group=group, sizes=[2, 1]),
            lambda: functional.all_reduce(x, "sum", group).clone(),
        ):
            thread = threading.Thread(target=function)
            thread.start()
            thread.join()
    gathered = Launch("all_gather", 8 - 4 * group.rank())
    assert counter.launches == [Launch("all_reduce", 16), Launch("all_reduce", 16), gathered, Launch("all_reduce", 16)]


@pytest.fixture
def alone():
    """A group of one rank, on which gloo has nothing to wait for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_counters_come_and_go_while_threads_launch(alone):
    """Each counter has what its own thread launches inside it, and nothing is lost or counted twice."""
    rounds, threads = 200, 4
    with CollectiveCounter() as outer, ThreadPoolExecutor(threads) as pool:

        def count(size):
            x, seen = torch.ones(size), []
            for _ in range(rounds):
                with CollectiveCounter() as counter:
                    dist.all_reduce(x)
                    with CollectiveCounter() as inner:
                        dist.all_reduce(x)
                for each, number in ((counter, 2), (inner, 1)):
                    # The others' may be in between.
                    seen.append(each.launches.count(Launch("all_reduce", 4 * size)) == number)
            return all(seen)

        assert all(pool.map(count, range(1, threads + 1)))
    assert Counter(outer.launches) == {Launch("all_reduce", 4 * size): 2 * rounds for size in range(1, threads + 1)}
    assert accounting._active == ()


def test_a_counter_inside_itself_counts_once(alone):
    counter = CollectiveCounter()
    with counter:
        with counter:
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(3))
    assert counter.launches == [Launch("all_reduce", 4), Launch("all_reduce", 8)]


def test_a_collective_that_fails_is_the_same_error_under_a_counter(alone):
    def attempt():
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(2, dtype=torch.int16))
        return type(caught.value), str(caught.value).splitlines()[0]

    expected = attempt()
    with CollectiveCounter():
        assert attempt() == expected
    with CollectiveCounter() as counter:
        dist.all_reduce(torch.ones(2))
    assert counter.num_bytes == 8


@pytest.mark.slow
def test_compiling_launches_nothing(alone):
    x = torch.ones(4)
    compiled = torch.compile(
        lambda x: functional.all_reduce(x * 2, "sum", alone) + 1, backend="aot_eager", fullgraph=True
    )
    for _ in range(2):
        with CollectiveCounter() as counter:
            compiled(x)
        assert counter.launches == [Launch("all_reduce", 16)]


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
    spaces_counted = ("c10d", "_c10d_functional")
    counted = {name for space in spaces_counted for name in accounting.collective_operators(space)}
    assert known - others == counted
