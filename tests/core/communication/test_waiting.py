"""What a rank that waits can say of it: the operation, the layer, and who has not come."""

import threading

import pytest
import torch
import torch.distributed as dist
from harness.time_limit import set_time_limit
from harness.watchdog import wait_until

from shardwise.core.communication import agreement
from shardwise.core.communication.agreement import gather_objects
from shardwise.core.communication.collectives import Transfer, all_reduce, exchange
from shardwise.core.communication.transports.shared_memory import channel_of
from shardwise.core.errors import DesyncError


def the_wait_of(thread):
    """The wait that ``thread`` is in, once it is."""
    wait_until(lambda: thread in agreement.waits(), "the thread waits for somebody")
    return agreement.waits()[thread]


class Doubled(torch.nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        return Summed.apply(x, self.group)


class Summed(torch.autograd.Function):
    """Sums over the ranks, forward and backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_reduce(x, group=group)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, group=ctx.group), None


def watched(group, body, release):
    """On rank 0 what its wait says while it runs ``body``, which rank 1 joins only after that."""
    said = []
    if group.rank() == 0:
        caller = threading.get_ident()

        def watch():
            wait = the_wait_of(caller)
            said.append((wait.describe(caller), wait.ranks, None if wait.missing is None else wait.missing()))
            release.set("go", "1")

        watcher = threading.Thread(target=watch)
        watcher.start()
        body()
        watcher.join()
    else:
        release.wait(["go"])
        body()
    release.delete_key("go")
    dist.barrier(group=group)
    return said[0] if said else None


def store_of_its_own():
    return dist.distributed_c10d._get_default_store().clone()


@pytest.mark.ranks(2)
def test_a_wait_names_operation_layer_and_tensor(group):
    own = dist.new_group([0, 1])
    channel = channel_of(own)
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(Doubled(own)))
    x = torch.ones(2, 3, requires_grad=True)
    outputs = []
    found = watched(group, lambda: outputs.append(model(x)), store_of_its_own())
    if group.rank() == 0:
        missing = None if channel is None else [1]
        assert found == ("all_reduce of layer 1.0 ([2, 3] float32)", [0, 1], missing)
    found = watched(group, lambda: outputs[0].sum().backward(), store_of_its_own())
    if group.rank() == 0:
        assert found[0] == "all_reduce of the backward pass ([2, 3] float32)"
    found = watched(group, lambda: gather_objects(1, "the weather", group=own), store_of_its_own())
    if group.rank() == 0:
        assert found == ("an exchange of the weather", [0, 1], None)
    assert agreement.waits() == {}


@pytest.mark.ranks(3)
def test_a_message_waits_for_its_sender_alone(group):
    own = dist.new_group([0, 2])
    if group.rank() == 1:
        dist.barrier(group=group)
        return
    release = store_of_its_own()
    if group.rank() == 2:
        release.wait(["go"])
        exchange([Transfer(torch.ones(4), 0)], [], group=own)[0][0].wait()
        dist.barrier(group=group)
        return
    said, caller = [], threading.get_ident()

    def watch():
        wait = the_wait_of(caller)
        said.append((wait.describe(caller), wait.missing()))
        release.set("go", "1")

    watcher = threading.Thread(target=watch)
    watcher.start()
    exchange([], [Transfer(torch.empty(4), 1)], group=own)[1][0].wait()
    watcher.join()
    assert said == [("receive ([4] float32)", [2])]
    release.delete_key("go")
    dist.barrier(group=group)


@pytest.mark.ranks(2)
def test_who_has_not_come_has_started_fewer_collectives(group, monkeypatch):
    own = dist.new_group([0, 1])
    before = agreement.num_collectives(own)
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=own)
    # Messages do not count, of which ranks may have different numbers.
    other = 1 - own.rank()
    transfers = [Transfer(torch.ones(1), other)] * (1 + own.rank()), [Transfer(torch.ones(1), other)] * (2 - own.rank())
    sends, receives = exchange(*transfers, group=own)
    for pending in [*sends, *receives]:
        pending.wait()
    assert agreement.num_collectives(own) == before + 3
    if own.rank() == 0:
        work = dist.all_reduce(torch.ones(1), group=own, async_op=True)
    assert gather_objects(agreement.num_collectives(own) - before, "numbers", group=group) == [4, 3]
    if own.rank() == 0:
        dist.barrier(group=group)
        work.wait()
    else:
        dist.barrier(group=group)
        dist.all_reduce(torch.ones(1), group=own)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_the_error_at_the_time_limit_names_the_layer(group):
    own = dist.new_group([0, 1])
    all_reduce(torch.ones(2), group=own)
    model = torch.nn.Sequential(Doubled(own))
    if group.rank() == 0:
        set_time_limit(own, 1)
        with pytest.raises(DesyncError, match=r"all_reduce .*of layer 0\b"):
            model(torch.ones(5))
    dist.barrier(group=group)


def test_a_thread_in_no_layer_says_nothing():
    assert agreement.layer_of(threading.get_ident()) == ""
    assert agreement.layer_of(-1) == ""
