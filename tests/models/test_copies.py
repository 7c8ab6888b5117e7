"""A deep copy of a model computes and trains as the model does, by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.parity import assert_bit_equal
from torch import nn
from training.pipeline.pipelines import random_batch, staged_gpt

from shardwise.models.transformer.layer import TransformerLayer
from shardwise.tensor_parallel import ColumnParallelLinear
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.gradients.gradient_buffers import GradientBuffers
from shardwise.training.gradients.gradient_trees import GradientTrees
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.pipeline import make_schedule


def steps(staged, schedule):
    """Three steps of AdamW; the losses."""
    topology = staged.topology
    optimizer = AdamW(staged.chunks, learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95), epsilon=1e-8)
    losses = []
    for seed in range(3):
        losses += staged.run(schedule, random_batch(4, seed=seed))
        finalize_gradients_(
            staged.chunks,
            tp_group=topology.group("tp"),
            dp_group=topology.group("dp"),
            embd_group=topology.group("embd") if "embd" in topology else None,
        )
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_a_copy_trains_as_the_model(group, name):
    """With replicated key-value heads, norms whose gradients are summed, and a tied weight on two stages."""
    sizes = {2: [(2, 1), (1, 2)], 4: [(2, 2), (4, 1)]}[group.size()]
    for tp, pp in sizes:
        delay = name == "zero-bubble"
        if delay and pp == 1:
            continue
        staged = staged_gpt(tp=tp, pp=pp, sequence_parallel=tp > 1, delay_wgrad_compute=delay)
        start = {key: shard.data.detach().clone() for key, shard in staged.parameters_by_key().items()}
        copied = copy.copy(staged)
        copied.chunks = copy.deepcopy(staged.chunks)
        schedule = make_schedule(name, pp, 4)
        losses = steps(staged, schedule)
        for key, shard in copied.parameters_by_key().items():
            assert_bit_equal(shard.data.detach(), start[key], name=f"the copy's {key} before its training")
        for other, loss in zip(steps(copied, schedule), losses, strict=True):
            assert_bit_equal(other, loss, name="loss")
        trained = staged.parameters_by_key()
        for key, shard in copied.parameters_by_key().items():
            assert_bit_equal(shard.data.detach(), trained[key].data.detach(), name=key)
            assert shard.data.data_ptr() != trained[key].data.data_ptr()


@pytest.mark.ranks(2)
def test_parts_of_a_model_can_be_copied_alone(group):
    staged = staged_gpt(tp=2, sequence_parallel=True)
    model = staged.chunks[0]
    parts = [part for part in model.modules() if isinstance(part, TransformerLayer | ColumnParallelLinear)]
    assert len(parts) > 5
    for part in (*parts, model.embedding, model.decoder):
        copied = copy.deepcopy(part)
        for (name, own), (_, other) in zip(part.named_parameters(), copied.named_parameters(), strict=True):
            assert_bit_equal(other, own, name=name)
            assert isinstance(other, nn.Parameter)
            assert vars(other) == vars(own), name
            assert other is not own
        assert [module.training for module in copied.modules()] == [module.training for module in part.modules()]
    assert torch.equal(copied.layers[0].mlp.linear_fc1.weight, model.decoder.layers[0].mlp.linear_fc1.weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_a_copy_has_no_sums_of_gradients(group, trees, delay):
    """Neither memory for them nor hooks, which belong to the gradients of the model."""
    staged = staged_gpt(tp=2, pp=1, delay_wgrad_compute=delay)
    (model,) = staged.chunks
    dp = staged.topology.group("dp")
    own = GradientTrees(model, group=dp) if trees else GradientBuffers(model, group=dp)
    copied = copy.deepcopy(model)
    names = {name for param in copied.parameters() for name in vars(param)}
    assert not names & {"main_grad", "grad_added_to_main_grad", "take_output_gradient"}
    assert any(vars(param) for param in model.parameters())
    assert own.group is dp
    assert not any(getattr(layer, "_weight_gradient_hooks", None) for layer in copied.modules())
