"""Groups and hosts of a planned rank, memory besides its tensors, and the estimate of a step's time."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from shardwise.core.rank_grid import ParallelSizes, default_embedding_ranks, default_position_embedding_ranks
from shardwise.plan.machine import (
    CONTEXT_BYTES,
    PROCESS_BYTES,
    SLACK,
    Rates,
    StepTime,
    Surroundings,
    beyond_tensors,
    room_for_tensors,
)
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Mesh
from shardwise.run import plan_run

SIZES = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 300, "sequence_length": 16}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp2-pp2-dp2": (8, 4, {"tp": 2, "pp": 2}),
    "pp4": (4, 4, {"pp": 4}),
    "interleaved": (4, 4, {"pp": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2}),
    "zero": (4, 4, {"tp": 2, "zero": 1}),
    "dp4": (4, 4, {}),
}


@cache
def planned(layout: str, rank: int | None = None, device: str = "cpu") -> Plan:
    ranks, samples, parallel = LAYOUTS[layout]
    training = {"global_batch_size": samples, "micro_batch_size": 1}
    return plan_run(ranks=ranks, rank=rank, device=device, model=SIZES, training=training, parallel=parallel)


@pytest.mark.parametrize(
    "sizes", [(2, 4, 3, 1, 2, 1), (1, 1, 5, 1, 1, 5), (3, 2, 1, 1, 1, 1), (4, 1, 2, 4, 1, 1), (2, 2, 6, 3, 2, 3)]
)
def test_groups_are_those_of_the_topology(sizes):
    tp, pp, dp, ep, etp, cp = sizes
    mesh = Mesh(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp, cp=cp)
    lists = ParallelSizes(tp=tp, pp=pp, ep=ep, etp=etp, cp=cp).rank_lists(
        mesh.world_size, default_embedding_ranks, default_position_embedding_ranks
    )
    names = {"tp": "tp", "pp": "pp", "cp": "cp", "dp": "dp_cp", "ep": "tp_ep", "expert_dp": "expt_dp"}
    for axis, name in names.items():
        for ranks in lists[name]:
            assert all(mesh.group(rank, axis) == tuple(ranks) for rank in ranks)
    for ranks in lists["embd"] if pp > 1 else ():
        assert all(mesh.group(rank, "embd") == tuple(ranks) for rank in ranks)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_message_has_a_receiver(layout):
    """As many messages as the schedule has for each micro-batch, to the stages before and after."""
    plan = planned(layout)
    width, number = plan.mesh.tp * plan.mesh.dp, plan.mesh.num_micro_batches(plan.workload)
    received: dict[int, int] = {}
    for rank in plan.stages:
        sent = sum(count for call, count in rank.calls.items() if call.name == "send")
        assert sent == number * sum(rank._receivers.values())
        for receiver, count in rank._receivers.items():
            stage = receiver // width
            received[stage] = received.get(stage, 0) + count
    # Each stage gets as many as it sends: a hidden state for each gradient.
    assert received == {rank.stage: sum(rank._receivers.values()) for rank in plan.stages if rank._receivers}


@pytest.mark.slow
def test_what_leaves_a_host():
    plan = planned("tp2-pp2-dp2")
    for rank, hosts, wanted in (
        # All of stage 0 on one host: only messages leave it.
        (0, 4, {"tp": 0, "dp": 0, "pp": 1}),
        # A host for each pair of tensor-parallel ranks.
        (3, 2, {"tp": 0, "dp": 1, "pp": 1}),
        (5, 1, {"tp": 1, "dp": 1, "pp": 1}),
        (6, 8, {"tp": 0, "dp": 0, "pp": 0}),
    ):
        (one,) = planned("tp2-pp2-dp2", rank).stages
        for axis, share in wanted.items():
            assert one.sent(axis, between_hosts=hosts) == share * one.sent(axis) > -1
        assert one.sent() == sum(one.sent(axis) for axis in ("tp", "pp", "dp"))
    # A middle stage whose next stage alone is on another host sends half of its messages there.
    (middle,) = planned("pp4", 1).stages
    (send,) = [call for call in middle.calls if call.name == "send"]
    assert (middle.leaving(send, 2), middle.leaving(send, 4), middle.leaving(send, 1)) == (0.5, 0.0, 1.0)
    assert plan.worst.group(send) == (4,)


def test_the_time_of_a_step():
    """Each term by hand: two hosts of four ranks, of which each has one stage."""
    plan = planned("tp2-pp2-dp2")
    rank = plan.stages[0]
    rates = Rates(flops=2e9, within_host=1e6, between_hosts=1e5, ranks_per_host=4)
    time = StepTime.of(rank, plan.idle_share, rates)
    assert time is not None
    assert time.compute == rank.flops / 2e9
    # One stage waits for the other during one of two micro-batches.
    assert time.idle == time.compute / 2
    assert time.communication["tp"] == pytest.approx(rank.sent("tp") / 1e6)
    assert time.communication["dp"] == pytest.approx(rank.sent("dp") / 1e6)
    assert time.communication["pp"] == pytest.approx(rank.sent("pp") / 1e5)
    assert time.least == time.compute + time.idle
    assert time.most == pytest.approx(time.least + sum(time.communication.values()))
    # A ring over hosts is as slow as its slowest link, although this rank sends to its own host.
    (first,) = planned("dp4", 0).stages
    apart = StepTime.of(first, 0.0, Rates(1e9, 1e6, 1e5, ranks_per_host=2))
    assert apart is not None
    assert first.sent("dp", between_hosts=2) == 0 < first.sent("dp")
    assert apart.communication == {"dp": pytest.approx(first.sent("dp") / 1e5)}


def test_no_time_without_rates():
    plan = planned("tp2-pp2-dp2")
    assert StepTime.of(plan.worst, plan.idle_share, Rates(within_host=1e6, between_hosts=1e5)) is None
    time = StepTime.of(plan.worst, plan.idle_share, Rates(flops=1e9, within_host=1e6, ranks_per_host=4))
    assert time is not None
    assert time.communication["pp"] is None
    assert time.communication["tp"] is not None
    assert time.most is None


def test_the_memory_of_a_host():
    plan = planned("tp2-pp2-dp2")
    whole, half = Surroundings.of(plan, 8), Surroundings.of(plan, 4)
    assert {(each.axis, each.ranks, each.groups) for each in whole.channels} == {
        ("tp", 2, 4),
        ("dp", 2, 4),
        ("pp", 2, 4),
        ("all", 8, 1),
    }
    # Groups over hosts share no memory.
    assert {(each.axis, each.ranks, each.groups) for each in half.channels} == {("tp", 2, 2), ("dp", 2, 2)}
    assert whole.tensors == 4 * sum(rank.total for rank in plan.stages)
    assert half.tensors == 4 * plan.worst.total
    assert whole.snapshot == 4 * sum(rank.step.saved for rank in plan.stages)
    # Two micro-batches of 16 tokens and labels in 64 bits, and the length of each.
    assert whole.batches == 2 * (2 * 16 * 8 + 8)
    assert whole.processes == 8 * PROCESS_BYTES["cpu"]
    shared = sum(each.groups * each.num_bytes for each in whole.channels)
    assert whole.host == whole.tensors + shared + 8 * whole.batches + whole.snapshot + whole.processes
    assert whole.beyond == 0


def test_the_memory_of_a_gpu():
    plan = planned("tp2-pp2-dp2", None, "cuda")
    around = Surroundings.of(plan, 8)
    assert (around.channels, around.tensors, around.processes) == ((), 0, 8 * PROCESS_BYTES["cuda"])
    assert around.beyond == CONTEXT_BYTES + round(SLACK * plan.worst.total) + around.batches
    for memory in (80 << 30, 3 << 30, CONTEXT_BYTES):
        room = room_for_tensors(memory, "cuda")
        assert memory - 2 <= room + beyond_tensors(room, "cuda") <= memory + 1
        assert room_for_tensors(memory, "cpu") == memory
    assert room_for_tensors(1, "cuda") == 0


def test_saves_at_once_need_no_copy():
    training = {"global_batch_size": 4, "asynchronous_saves": False}
    plan = plan_run(device="cpu", model=SIZES, training=training)
    assert Surroundings.of(plan, 8).snapshot == 0
    assert plan.worst.step.saved == 12 * plan.num_parameters
