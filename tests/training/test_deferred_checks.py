"""A step that reads the device once finds ids out of range with its loss, before any weight changes."""

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal
from training.test_trainer import batches, make_trainer

from shardwise.core.errors import DivergenceError, VocabularyError
from shardwise.core.topology import Topology
from shardwise.data import Batch
from shardwise.training.hooks import StepHooks


def trainer_of(group, folder, **options):
    topology = Topology.create(tp=1 if group.size() == 2 else 2)
    options = {"sequence_parallel": False, "dtype": "float64", "architecture": "llama"} | options
    trainer = make_trainer(folder, topology, topology.group("dp"), **options)
    trainer.defers_checks = True
    return trainer


def my_rows(trainer):
    per_rank = 4 // trainer.dp_group.size()
    return slice(trainer.dp_group.rank() * per_rank, (trainer.dp_group.rank() + 1) * per_rank)


@pytest.mark.ranks(2, 4, slow=(4,))
@pytest.mark.parametrize("what", ["token id", "target"])
def test_an_id_out_of_range_is_an_error_on_every_rank_before_any_weight_changes(group, tmp_path, what):
    trainer = trainer_of(group, tmp_path)
    tokens, labels = (ids[my_rows(trainer)].clone() for ids in next(iter(batches(trainer.settings))))
    if trainer.dp_group.rank() == 1:
        (tokens if what == "token id" else labels)[1, 2] = 7654
    before = [param.detach().clone() for param in trainer.model.parameters()]
    halves = list(map(Batch, tokens.split(1), labels.split(1)))
    with pytest.raises(
        VocabularyError, match=rf"^{what} 7654 at position \[\d, \d\] is outside the vocabulary of 301 "
    ):
        trainer.step(0, halves)
    for param, was in zip(trainer.model.parameters(), before, strict=True):
        assert_bit_equal(param.detach(), was, name="weight")


@pytest.mark.ranks(2)
def test_a_step_is_the_same_where_checks_are_deferred(group, tmp_path):
    results = []
    for defers in (True, False):
        trainer = trainer_of(group, tmp_path)
        trainer.defers_checks = defers
        tokens, labels = next(iter(batches(trainer.settings)))
        result = trainer.step(0, [Batch(tokens[my_rows(trainer)], labels[my_rows(trainer)])])
        results.append((result, [param.detach() for param in trainer.model.parameters()]))
    (own, weights), (other, expected) = results
    assert own == other
    for param, same in zip(weights, expected, strict=True):
        assert_bit_equal(param, same, name="weight")


@pytest.mark.ranks(2)
def test_wishes_travel_with_the_loss_and_a_divergence_comes_first(group, tmp_path):
    trainer = trainer_of(group, tmp_path)
    heard, hooks = [], StepHooks()
    hooks.rank_reports = lambda: [0.0, 15.0 * dist.get_rank()]
    hooks.before_update = lambda step, reports: heard.append((step, list(reports)))
    tokens, labels = (ids[my_rows(trainer)] for ids in next(iter(batches(trainer.settings))))
    trainer.step(3, [Batch(tokens, labels)], hooks=hooks)
    assert heard == [(3, [0.0, 15.0])]
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    with pytest.raises(DivergenceError, match="the loss is nan at step 4"):
        trainer.step(4, [Batch(tokens, labels)], hooks=hooks)
    assert len(heard) == 1
