"""Shared memory between the ranks of one machine: its protocol, its failures, and when it is left alone.

What the collectives compute is tested with both transports in test_collectives.py; here are messages of several chunks,
several in flight, and what only this transport has.
"""

import errno
import os
import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_unmodified
from harness.program import Program
from harness.time_limit import set_time_limit

from shardwise.core.communication import context, transports
from shardwise.core.communication.agreement import gather_objects
from shardwise.core.communication.collectives import (
    all_gather,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    reduce_scatter,
    reduce_scatter_async,
)
from shardwise.core.communication.context import GlobalMemoryBuffer
from shardwise.core.communication.transports.channel import NUM_SLOTS, SLOT_BYTES
from shardwise.core.communication.transports.shared_memory import SWITCH, channel_of, close_channel, why_not_here
from shardwise.core.errors import DesyncError
from shardwise.core.processes import temporary_prefix
from shardwise.core.sharding import balanced_sizes

SLOT = SLOT_BYTES // 4
"""fp32 elements of one slot."""


@pytest.fixture(scope="module", params=["1"], ids=[""], autouse=True)
def transport(request):
    """In place of the folder's: these tests are of one transport."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(SWITCH, request.param)
        yield


def inputs(group, shape):
    """Every rank's tensor, the same on all ranks; small integers, so that sums have one value."""
    return [torch.randint(-9, 10, shape).float() for _ in range(group.size())]


def test_this_machine_shares_memory():
    assert why_not_here() is None


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("numel", [1, SLOT - 1, SLOT, SLOT + 1, NUM_SLOTS * SLOT, (NUM_SLOTS + 2) * SLOT + 5])
def test_messages_of_several_chunks(group, numel):
    assert channel_of(group) is not None
    every = inputs(group, (numel,))
    total = sum(every)
    own = every[group.rank()]
    with assert_unmodified(own):
        assert_bit_equal(all_reduce(own, group=group), total)
        assert_bit_equal(all_reduce(own, group=group, op=dist.ReduceOp.MAX), torch.stack(every).amax(0))
        assert_bit_equal(all_gather(own, group=group), torch.cat(every))
        sizes = balanced_sizes(numel, group.size())
        assert_bit_equal(reduce_scatter(own, group=group), total.split(sizes)[group.rank()])
    given_up = own.clone()
    result = all_reduce(given_up, group=group, may_overwrite=True)
    assert_bit_equal(result, total)
    assert result.data_ptr() == given_up.data_ptr()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_large_tensors_along_every_dimension(group, dim):
    shape = [7, 11, SLOT // 11]
    every = inputs(group, shape)
    own = every[group.rank()].mT.contiguous().mT
    assert not own.is_contiguous()
    sizes = balanced_sizes(shape[dim], group.size())
    assert_bit_equal(all_gather(own, group=group, dim=dim), torch.cat(every, dim))
    assert_bit_equal(reduce_scatter(own, group=group, dim=dim), sum(every).split(sizes, dim)[group.rank()])
    part = every[0].split(sizes, dim)[group.rank()]
    assert_bit_equal(all_gather(part, group=group, dim=dim, sizes=sizes), every[0])


@pytest.mark.ranks(2, 4)
def test_many_in_flight_waited_for_in_any_order(group):
    every = inputs(group, (3, 5))
    own, t, rank = every[group.rank()], group.size(), group.rank()
    launched = []
    for k in range(3 * NUM_SLOTS):
        launch = (all_reduce_async, all_gather_async, reduce_scatter_async)[k % 3]
        launched.append((k, launch(own + k, group=group)))
    # Each rank in an order of its own.
    random.Random(rank).shuffle(launched)
    for k, pending in launched:
        shifted = [each + k for each in every]
        expected = (sum(shifted), torch.cat(shifted), sum(shifted).split(balanced_sizes(3, t))[rank])[k % 3]
        assert_bit_equal(pending.wait(), expected)
    # What nobody waits for does no harm.
    for _ in range(2 * NUM_SLOTS + 1):
        all_reduce_async(own, group=group)
    assert_bit_equal(all_reduce(own, group=group), sum(every))


@pytest.mark.ranks(2, 4)
def test_a_thousand_calls_with_ranks_now_and_then_late(group):
    alike, own = random.Random(5), random.Random(group.rank())
    t, rank = group.size(), group.rank()
    for step in range(1000):
        numel = alike.choice([1, 7, 1000, SLOT, 2 * SLOT + 3]) if step % 50 == 0 else alike.choice([1, 7, 300])
        parts = [torch.full((numel,), float(step + other)) for other in range(t)]
        if own.random() < 0.02:
            time.sleep(own.random() * 4e-3)
        kind = alike.randrange(3)
        if kind == 0:
            assert_bit_equal(all_reduce(parts[rank], group=group), sum(parts))
        elif kind == 1:
            assert_bit_equal(all_gather(parts[rank], group=group), torch.cat(parts))
        else:
            expected = sum(parts).split(balanced_sizes(numel, t))[rank]
            assert_bit_equal(reduce_scatter(parts[rank], group=group), expected)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_fp32_and_rounded_once(group, dtype):
    every = [torch.randn(1000).to(dtype) for _ in range(3)]
    expected = torch.stack(every).float().sum(0).to(dtype)
    assert_bit_equal(all_reduce(every[group.rank()], group=group), expected)


@pytest.mark.ranks(2)
def test_results_do_not_require_gradients(group):
    x = torch.ones(4, requires_grad=True)
    assert not all_reduce(x, group=group).requires_grad
    assert not all_gather(x * 2, group=group).requires_grad
    assert not reduce_scatter(x * 2, group=group).requires_grad


@pytest.mark.ranks(2)
def test_opened_in_inference_mode_and_used_in_training(group):
    other = dist.new_group([0, 1])
    buffer = GlobalMemoryBuffer()
    with torch.inference_mode():
        for size in (3, 4):
            all_reduce(torch.ones(size), group=other)
            all_gather(torch.ones(size), group=other, buffer=buffer)
    for _ in range(2 * NUM_SLOTS):
        # The views that were made in inference mode, of every slot.
        all_reduce(torch.ones(3), group=other)
    assert all_gather(torch.ones(4), group=other, buffer=buffer).tolist() == [1] * 8
    weight = torch.nn.Parameter(torch.ones(3))
    total = all_reduce(weight, group=other)
    (total * weight).sum().backward()
    assert_bit_equal(weight.grad, torch.full((3,), 2.0))


CALLS = {
    "another shape": (
        lambda group: all_reduce(torch.ones(3, 4), group=group),
        lambda group: all_reduce(torch.ones(4, 3), group=group),
        r"rank 0 is in all_reduce of \[3, 4\] float32, rank 1 is in all_reduce of \[4, 3\] float32",
    ),
    "another dtype": (
        lambda group: all_reduce(torch.ones(3), group=group),
        lambda group: all_reduce(torch.ones(3).double(), group=group),
        r"rank 0 is in all_reduce of \[3\] float32, rank 1 is in all_reduce of \[3\] float64",
    ),
    "another operation": (
        lambda group: all_reduce(torch.ones(6), group=group),
        lambda group: reduce_scatter(torch.ones(6), group=group),
        r"rank 0 is in all_reduce of \[6\] float32, rank 1 is in reduce_scatter of \[6\] float32 along dimension 0",
    ),
    "shards that do not fit": (
        lambda group: all_gather(torch.ones(3, 2), group=group),
        lambda group: all_gather(torch.ones(3, 4), group=group),
        r"rank 0 is in all_gather of \[3, 2\] .*rank 1 is in all_gather of \[3, 4\]",
    ),
    "more chunks": (
        lambda group: all_reduce(torch.ones(9 * SLOT), group=group),
        lambda group: all_reduce(torch.ones(3), group=group),
        r"rank 0 is in all_reduce of \[1179648\] float32, rank 1 is in all_reduce of \[3\] float32",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CALLS)
def test_ranks_that_disagree_hear_the_same(group, case):
    own = dist.new_group([0, 1])
    *calls, message = CALLS[case]
    with pytest.raises(DesyncError, match=message):
        calls[group.rank()](own)
    # Nothing after it can be right.
    with pytest.raises(DesyncError, match=message):
        all_reduce(torch.ones(1), group=own)
    # Other groups are as before.
    assert all_reduce(torch.ones(1), group=group).item() == 2


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_is_named(group):
    own = dist.new_group([0, 1])
    all_reduce(torch.ones(2), group=own)
    if group.rank() == 0:
        set_time_limit(own, 1)
        with pytest.raises(
            DesyncError, match=r"rank 1 of 2 .* did not join rank 0 in all_reduce of \[5\] float32 within 1 s"
        ):
            all_reduce(torch.ones(5), group=own)
    dist.barrier(group=group)


PROGRAM = """
import sys, time
import torch
import torch.distributed as dist
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.transports.shared_memory import channel_of
from shardwise.core.errors import LaunchError
from shardwise.run.processes.watch import Watch

rank, path, shares = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"
dist.init_process_group("gloo", store=dist.FileStore(path, 3), rank=rank, world_size=3)
watch = Watch(dist.FileStore(path + "-beats", 3), rank, 3, limit=60.0)
watch.start()
group = dist.new_group([1, 2])
if rank > 0:
    assert (channel_of(group) is not None) == shares
    all_reduce(torch.ones(3), group=group)
while len(watch._heard) < 2:
    time.sleep(0.1)
print("ready", flush=True)
if rank != 1:
    time.sleep(1000)
try:
    all_reduce(torch.ones(3), group=group)
except LaunchError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shares", ["1", "0"])
def test_a_rank_that_is_killed_is_named_at_once(tmp_path, shares):
    """By its number in the run, whatever its number in the group is."""
    with ExitStack() as stack:
        command = ("-W", "ignore", "-c", PROGRAM)
        ranks = [
            stack.enter_context(
                Program(*command, str(rank), tmp_path / "store", shares, SHARDWISE_SHARED_MEMORY=shares)
            )
            for rank in range(3)
        ]
        for rank in ranks:
            rank.wait_for_line("^ready$")
        # Dead, and not yet collected by its parent: a zombie does not live.
        ranks[2].kill()
        what = (
            rf"rank 2 of 3 \(process {ranks[2].pid}\) (died; rank 1 was|ended; rank 1 was) waiting for it in all_reduce"
        )
        ranks[1].wait_for_line("^" + what)
        ranks[0].kill()


def left_in_memory():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "shardwise-" in line]


def files_of_ranks(group):
    """Names of the group's files. Other tests, which run at the same time, have files in this folder, too."""
    prefixes = tuple(gather_objects(temporary_prefix("memory"), "prefixes", group=group))
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefixes)]


@pytest.mark.ranks(2)
def test_nothing_is_left(group):
    close_channel(group)
    mapped, open_files = left_in_memory(), len(os.listdir("/proc/self/fd"))
    all_reduce(torch.ones(3), group=group)
    # The file has no name any more, so that not even a crash leaves it.
    assert all("(deleted)" in line for line in left_in_memory())
    assert len(left_in_memory()) == len(mapped) + 1
    assert len(os.listdir("/proc/self/fd")) == open_files
    close_channel(group)
    assert left_in_memory() == mapped
    assert files_of_ranks(group) == []


@pytest.mark.ranks(2)
def test_a_destroyed_group_gives_its_memory_back(group):
    mapped = left_in_memory()
    own = dist.new_group([0, 1])
    all_reduce(torch.ones(3), group=own)
    assert len(left_in_memory()) == len(mapped) + 1
    dist.destroy_process_group(own)
    del own
    assert left_in_memory() == mapped


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def not_there(*_):
    raise FileNotFoundError


def elsewhere():
    return ("another machine", 1), None


def switched_off():
    return "switched off"


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("rank", "name", "value"),
    [
        (0, "os.posix_fallocate", no_space),
        (1, "_where_and_who", not_there),
        (2, "_where_and_who", elsewhere),
        (2, "_map", not_there),
        (1, "why_not_here", switched_off),
    ],
    ids=["no space", "no boot id", "another machine", "another file system", "switched off"],
)
def test_one_rank_that_cannot_leaves_all_to_gloo(group, monkeypatch, rank, name, value):
    own = dist.new_group([0, 1, 2])
    if group.rank() == rank:
        monkeypatch.setattr(f"{transports.shared_memory.__name__}.{name}", value)
    assert channel_of(own) is None
    assert all_reduce(torch.ones(3), group=own).tolist() == [3, 3, 3]
    assert files_of_ranks(own) == []


@pytest.mark.ranks(2)
def test_what_it_cannot_carry_goes_by_gloo(group):
    assert all_reduce(torch.ones(3, dtype=torch.complex64), group=group).tolist() == [2, 2, 2]
    assert all_reduce(torch.full((2,), 3.0), group=group, op=dist.ReduceOp.PRODUCT).tolist() == [9, 9]
    assert all_gather(torch.tensor([True]), group=group).tolist() == [True, True]


@pytest.mark.ranks(2)
def test_validated_calls_by_gloo(group, monkeypatch):
    monkeypatch.setattr(transports, "channel_of", lambda _: None)
    own = dist.new_group([0, 1])
    context.validate_calls(own)
    assert all_reduce(torch.ones(2), group=own).tolist() == [2, 2]
    assert all_gather(torch.ones(2 - group.rank()), group=own, sizes=[2, 1]).tolist() == [1, 1, 1]
    for first, second in (
        (lambda: all_reduce(torch.ones(3), group=own), lambda: all_reduce(torch.ones(4), group=own)),
        (lambda: all_reduce(torch.ones(3), group=own), lambda: all_reduce(torch.ones(3).int(), group=own)),
        (lambda: all_reduce(torch.ones(4), group=own), lambda: reduce_scatter(torch.ones(4), group=own)),
    ):
        with pytest.raises(
            DesyncError, match=r"ranks disagree on the collective to be made: rank 0 has 'all_reduce \["
        ):
            (first if group.rank() == 0 else second)()
    # Nobody is ahead of anybody.
    assert all_reduce(torch.ones(2), group=own).tolist() == [2, 2]
