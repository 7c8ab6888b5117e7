"""Micro-batches in flight, and their bytes, are those of the schedules' tables."""

from __future__ import annotations

import pytest
from plan.planned_models import EVEN, S, described, workload_of

from shardwise.plan.plan import make_plan
from shardwise.plan.rehearsal import Rehearsals
from shardwise.plan.workload import Mesh
from shardwise.training.pipeline.schedules import make_schedule

MODEL = described("opt", num_layers=6)
# A sample's hidden states.
MESSAGE = 4 * S * EVEN["hidden_size"]


def samples(number):
    return {"global_batch_size": number, "micro_batch_size": 1}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_of_every_schedule(name):
    chunks = 2 if name == "interleaved" else 1
    mesh = Mesh(pp=3, schedule=name, virtual_stages=chunks)
    alone = make_plan(workload_of(MODEL, training=samples(1)), Mesh(pp=3), rank=1).stages[0].step
    for number in (3, 60):
        rehearsals = Rehearsals(workload_of(MODEL, training=samples(number)))
        steps = [rank.step for rank in make_plan(rehearsals.workload, mesh, rehearsals=rehearsals).stages]
        schedule = make_schedule(name, 3, number, chunks)
        assert [step.in_flight for step in steps] == [schedule.in_flight(stage) for stage in range(3)], number
        if chunks == 1:
            # Messages come and go meanwhile.
            assert abs(steps[1].kept - steps[1].in_flight * alone.kept) <= 3 * MESSAGE, number


def test_a_million_micro_batches_take_no_longer():
    workload = workload_of(described("llama", num_layers=4), training=samples(10**6))
    assert make_plan(workload, Mesh(pp=4, schedule="gpipe")).stages[0].step.in_flight == 10**6
    assert make_plan(workload, Mesh(pp=4)).stages[0].step.in_flight == 4
