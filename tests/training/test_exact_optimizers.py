"""Exact runs with the optimizer's state split over data-parallel ranks, with Muon, and in each precision."""

from functools import partial

import pytest
from training.test_exact_runs import ZERO_BUBBLE, check

from shardwise.optimizer.loss_scale import DynamicLossScale
from shardwise.training import trainer as trainer_module

ZERO = {"zero": 1}


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [("llama", "adamw", "float32"), ("gpt", "adamw", "pure-bfloat16"), ("gpt", "muon", "bfloat16")],
)
def test_split_state(group, kind, name, dtype):
    layouts = [ZERO, ZERO | {"tp": 2, "sequence_parallel": True}, ZERO | ZERO_BUBBLE]
    check(kind, layouts, optimizer={"name": name}, dtype=dtype)


@pytest.mark.ranks(2)
def test_muon_and_steps_that_are_skipped(group, monkeypatch):
    # So much that the gradients of the first step overflow.
    monkeypatch.setattr(trainer_module, "DynamicLossScale", partial(DynamicLossScale, scale=2.0**20))
    layouts = [{"tp": 2}, ZERO, {"pp": 2}]
    alone = check("gpt", layouts, optimizer={"name": "muon"}, dtype="float16")
    assert 0 < alone.num_skipped < 3
