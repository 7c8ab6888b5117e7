"""Layouts under the checker of ``spmd_types``, in which a tensor without a type is an error.

``make typed`` runs the tests of layers, losses and models under it as well.
"""

from __future__ import annotations

from typing import Any

import pytest
import spmd_types as spmd
import spmd_types.checker
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.core.communication import moves
from shardwise.core.topology import Groups, Topology
from shardwise.models import GPT, LatentAttention, ModelConfig
from shardwise.models.recomputation import Recomputation
from shardwise.nn.replicated import annotate_

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "fuse_output_layer_and_loss": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "recomputed": {"recompute": Recomputation(granularity="full")},
    "copied heads": {"num_query_groups": 1},
    "norms of queries and keys": LLAMA | {"qk_layernorm": True},
    "latent": LLAMA | {"num_query_groups": None, "latent": LatentAttention(12, 6, 4, 5, query_rank=10)},
}


def build(groups: Groups, kind: str, *, sequence_parallel: bool) -> GPT:
    options = {"position_embedding_type": "rope"} if "gated_linear_unit" in KINDS[kind] else {}
    config = ModelConfig(**SIZES, **KINDS[kind], sequence_parallel=sequence_parallel)
    return GPT(config, vocab_size=100, max_sequence_length=16, groups=groups, **options)


def ids(groups: Groups) -> Tensor:
    tensor = torch.randint(0, 100, (2, 16))
    return spmd.assert_type(tensor, {groups.tp: spmd.I, groups.dp: spmd.V})


def loss_of(model: GPT, groups: Groups) -> Tensor:
    loss = model(ids(groups), labels=ids(groups)).mean()
    # The gradient is summed over data-parallel ranks.
    return spmd.reinterpret(loss, groups.dp, src=spmd.V, dst=spmd.P)


@pytest.mark.sample(6)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_have_right_layouts(kind, sequence_parallel, group):
    groups = Groups.of(Topology.create(tp=2))
    model = build(groups, kind, sequence_parallel=sequence_parallel)
    with spmd_types.checker.typecheck():
        annotate_(model, groups)
        loss = loss_of(model, groups)
        assert spmd.get_axis_local_type(loss, groups.tp) is spmd.I
        loss.backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.ranks(4)
def test_a_wrong_layout_is_found(group):
    groups = Groups.of(Topology.create(tp=2))
    tp, dp = groups.tp, groups.dp
    with spmd_types.checker.typecheck():
        model = build(groups, "gpt", sequence_parallel=True)
        annotate_(model, groups)
        # Gradients of a norm on parts of the sequence are partial sums.
        spmd.mutate_type(model.decoder.final_layernorm.weight, tp, src=spmd.R, dst=spmd.I)
        with pytest.raises(spmd.SpmdTypeError, match=r"Invariant|do not go together"):
            loss_of(model, groups)

        whole = spmd.assert_type(torch.ones(4, 4, requires_grad=True), {tp: spmd.I, dp: spmd.V})
        shard = moves.scatter(whole, dim=0, group=tp)
        assert spmd.get_axis_local_type(shard, tp) is spmd.V
        for wrong in (
            lambda: moves.reduce(whole, group=tp),  # Summed twice.
            lambda: moves.copy(shard, group=tp),
            lambda: moves.gather(moves.copy(whole, group=tp), dim=0, group=tp),
            lambda: shard + whole[:2],
        ):
            with pytest.raises(spmd.SpmdTypeError):
                wrong()
        assert spmd.get_axis_local_type(moves.gather_for_parts(shard, dim=0, group=tp), tp) is spmd.R
        assert spmd.get_axis_local_type(moves.reduce_scatter(2 * shard, dim=0, group=tp), tp) is spmd.V
