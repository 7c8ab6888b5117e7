"""Micro-batches in flight, and their bytes, are those of the schedules' tables."""

from __future__ import annotations

import pytest
from run.plan.planned_models import described, workload_of

from shardwise.run.plan.plan import make_plan
from shardwise.run.plan.workload import Mesh
from shardwise.training.pipeline.schedules import make_schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("number", [3, 6, 60])
def test_of_every_schedule(name, number):
    chunks = 2 if name == "interleaved" else 1
    workload = workload_of(described("llama", num_layers=6), global_batch_size=number)
    mesh = Mesh(pp=3, schedule=name, virtual_stages=chunks, micro_batch_size=1)
    schedule = make_schedule(name, 3, number, chunks)
    plan = make_plan(workload, mesh)
    assert [rank.in_flight for rank in plan.stages] == [schedule.in_flight(stage) for stage in range(3)]
    middle = plan.stages[1]
    alone = make_plan(workload_of(described("llama", num_layers=6), global_batch_size=1), Mesh(pp=3)).stages[1]
    if chunks == 1:
        assert middle.activations == middle.in_flight * alone.activations


def test_a_million_micro_batches_take_no_longer():
    workload = workload_of(described("llama", num_layers=4), global_batch_size=10**6)
    assert make_plan(workload, Mesh(pp=4, schedule="gpipe")).stages[0].in_flight == 10**6
    assert make_plan(workload, Mesh(pp=4)).stages[0].in_flight == 4
