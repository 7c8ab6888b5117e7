"""Exact runs with the optimizer's state split over data-parallel ranks, with Muon, and in each precision."""

from functools import partial

import pytest
import torch
from harness.parity import assert_bit_equal
from run.test_exact_runs import STEPS, VOCAB, ZERO_BUBBLE, alone_of, check, settings_of, state_of, train
from run.tiny_layouts import state_of as run_state_of

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups, Topology
from shardwise.run.build import build_model
from shardwise.run.exact import trials
from shardwise.run.exact.trials import check_updates
from shardwise.storage import checkpoint
from shardwise.training import trainer as trainer_module
from shardwise.training.optimizer.mixed_precision import DynamicLossScale

ZERO = {"zero": 1}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [("llama", "adamw", "float32"), ("gpt", "adamw", "pure-bfloat16"), ("gpt", "muon", "bfloat16")],
)
def test_split_state(group, kind, name, dtype):
    layouts = [ZERO, ZERO | {"tp": 2, "sequence_parallel": True}, ZERO | ZERO_BUBBLE]
    check(kind, layouts, optimizer={"name": name}, dtype=dtype)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_muon_and_steps_that_are_skipped(group, monkeypatch):
    # So much that the gradients of the first step overflow.
    monkeypatch.setattr(trainer_module, "DynamicLossScale", partial(DynamicLossScale, scale=2.0**20))
    layouts = [{"tp": 2}, ZERO, {"pp": 2}]
    assert 0 < check("gpt", layouts, steps=STEPS, optimizer={"name": "muon"}, dtype="float16") < STEPS


@pytest.mark.ranks(4)
def test_saved_with_split_state_and_resumed_without(group, tmp_path):
    options = {"optimizer": {"name": "muon"}, "dtype": "bfloat16"}
    alone, split, tensors = Topology.create(tp=1), Topology.create(), Topology.create(tp=2)
    reference, expected = train(settings_of("gpt", **options), alone_of(alone))
    source, _ = train(settings_of("gpt", parallel=ZERO, **options), Groups.of(split), range(2))
    path = checkpoint.save(tmp_path, 2, run_state_of(source), {}, group=group)

    def begin(trainer):
        checkpoint.load(path, run_state_of(trainer), group=group)
        trainer.optimizer.set_step_(2)

    settings = settings_of("gpt", parallel={"tp": 2}, **options)
    resumed, numbers = train(settings, Groups.of(tensors), range(2, STEPS), begin)
    assert numbers == expected[2:]
    expected_state = state_of(reference)
    for name, tensor in state_of(resumed).items():
        assert_bit_equal(tensor, expected_state[name], name=name)


@pytest.mark.ranks(1)
def test_updates_are_tried_first(group, monkeypatch):
    settings = settings_of("llama", optimizer={"name": "muon"}, dtype="bfloat16")
    model = build_model(settings, VOCAB, groups=alone_of(Topology.create(tp=1)), device=torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_updates(model, settings)
        for name, wrong, message in (
            ("update_", lambda param, *_, **__: param.add_(param.numel()), "an update of Muon of a piece of 1308 elem"),
            (
                "orthogonalized",
                lambda x, _: x * torch.get_num_threads(),
                r"product of a matrix \[64, 64\] on one thread",
            ),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(trials, name, wrong)
                with pytest.raises(ConfigError, match=message):
                    check_updates(model, settings)
    finally:
        torch.set_num_threads(threads)
