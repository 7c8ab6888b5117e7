"""Key-value heads that several ranks hold: one parameter in initialisation, gradients, steps, norms and checkpoints."""

from __future__ import annotations

import pytest
import torch
from harness.groups import alone
from harness.parity import assert_bit_equal, assert_close_to, gather_shards
from layer_cases import LLAMA, Case, config_of, layer_of

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.heads import split_heads
from shardwise.storage.checkpoint import load, save
from shardwise.tensor_parallel.layers import named_param_layouts
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.clipping import clip_grad_norm_
from shardwise.training.optimizer.grad_norm import global_grad_norm

S, B, H = 5, 3, 10
SHAPES = {
    "a copy on two of four ranks": Case(8, 2, LLAMA),
    "runs that begin and end anywhere": Case(6, 2, LLAMA | {"qk_layernorm": True, "add_qkv_bias": True}),
    # Without a key's bias, whose gradient is 0 in truth: its rounding errors would be what Adam makes steps of.
    "one on all ranks": Case(7, 1, {"add_bias_linear": False}),
}


def whole_parameters(layer, group):
    return {
        name: gather_shards(param, layout, group) for name, param, layout in named_param_layouts(layer, group.size())
    }


def test_which_heads_are_where():
    assert split_heads(7, 7, 3).groups == ((0, 3), (3, 5), (5, 7))
    split = split_heads(6, 2, 4)
    assert split.queries == ((0, 2), (2, 4), (4, 5), (5, 6))
    assert split.groups == ((0, 1), (0, 2), (1, 2), (1, 2))
    assert [split.queries_of_groups(rank) for rank in range(4)] == [(2,), (1, 1), (1,), (1,)]
    # A block is three queries, a key and a value, here of one row each.
    assert split.qkv_layout((), 1).intervals == (((0, 2), (3, 5)), ((2, 6), (8, 10)), ((6, 7), (8, 10)), ((7, 10),))


@pytest.mark.ranks(2)
def test_heads_that_cannot_be_split_are_refused_on_every_rank(group):
    with pytest.raises(ConfigError, match="1 attention heads cannot be split over 2 tensor-parallel ranks"):
        SelfAttention(config_of(Case(1, 1), group), 1, group)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "sp"])
def test_training_is_that_of_one_rank_and_copies_stay_bit_equal(group, sequence_parallel, tmp_path):
    own = alone(group)
    t, rank = group.size(), group.rank()
    for step, (name, case) in enumerate(SHAPES.items()):
        models = [
            layer_of(case, ranks, params_dtype=torch.float32, sequence_parallel=sequence_parallel and ranks is group)[1]
            for ranks in (group, own)
        ]
        split, dense = models
        expected = dict(dense.named_parameters())
        for key, whole in whole_parameters(split, group).items():
            assert_bit_equal(whole, expected[key].detach(), name=f"{name}: {key} at first")

        optimizers = [
            AdamW(model, learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95), epsilon=1e-8) for model in models
        ]
        size = S * t
        mine = slice(S * rank, S * (rank + 1)) if sequence_parallel else slice(None)
        for _ in range(10):
            x, target = torch.randn(2, size, B, H)
            norms = []
            for model, ranks, part in ((split, group, mine), (dense, own, slice(None))):
                (model(x[part]) - target[part]).square().sum().backward()
                finalize_gradients_(model, tp_group=ranks, dp_group=own)
                norms.append(global_grad_norm(model, tp_group=ranks))
                clip_grad_norm_(model, 1.0, tp_group=ranks)
            assert_close_to(*norms, rtol_of_norm=1e-5, name=f"{name}: norm")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        # Gathering asserts that what several ranks hold is bit-equal on them.
        trained = whole_parameters(split, group)
        for key, whole in trained.items():
            assert_close_to(whole, expected[key].detach(), rtol_of_norm=1e-3, name=f"{name}: {key} after ten steps")

        path = save(tmp_path, step, sharded_state_dict(split, group=group), group=group)
        load(path, sharded_state_dict(dense, group=own), group=own)
        for key, whole in trained.items():
            assert_bit_equal(expected[key].detach(), whole, name=f"{name}: {key} loaded")


@pytest.mark.ranks(2)
def test_copies_travel_together_and_alone(group):
    """One all-reduce of all that several ranks hold, and of nothing else."""
    _, layer = layer_of(Case(7, 1), group)
    layer(torch.randn(S, B, H, dtype=torch.float64)).sum().backward()
    with CollectiveCounter() as counter:
        finalize_gradients_(layer, tp_group=group, dp_group=alone(group))
    # A key and a value head of width 4, with their biases, in fp64.
    assert [(launch.name, launch.num_bytes) for launch in counter.launches] == [("all_reduce", 2 * 4 * (H + 1) * 8)]
