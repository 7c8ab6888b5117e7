"""A model of the exact mode has the same bits at every number of tensor-parallel ranks."""

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal

from shardwise.core.errors import ConfigError
from shardwise.core.random import seed_streams
from shardwise.core.sharded_state import gather_parameter
from shardwise.core.topology import Groups, Topology
from shardwise.exact.context_terms import whole_losses
from shardwise.models.bert import Bert
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.models.transformer import attention_kernels
from shardwise.models.transformer.heads import GlobalHeads
from shardwise.nn import named_param_layouts
from shardwise.nn.parallel_linear import ParallelLinear
from shardwise.training.gradients.finalize import finalize_gradients_

VOCAB, LENGTH = 264, 16
COMMON = {
    "num_layers": 1,
    "hidden_size": 48,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "kv_channels": 4,
    "use_cpu_initialization": True,
}
LLAMA = {
    "ffn_hidden_size": 136,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
KINDS = {
    "llama": (COMMON | LLAMA, {"position_embedding_type": "rope"}),
    "gpt": (COMMON | {"ffn_hidden_size": 200}, {"share_embeddings_and_output_weights": True}),
    "alibi": (COMMON | {"ffn_hidden_size": 200}, {"position_embedding_type": "alibi"}),
}
# Norms of each head, caps of scores and logits; norms of all heads together, clipped, with weight gradients computed
# apart; windows; keys that are values.
OPTIONS = {
    "llama": [
        {"qk_layernorm": True, "attention_logit_softcap": 2.0, "final_logit_softcap": 3.0, "logits_scaling": 1.7},
        {"qk_layernorm": True, "qk_layernorm_over_heads": True, "clip_qkv": 0.5, "delay_wgrad_compute": True},
        {"window_size": (5, 0)},
        {"qk_layernorm": True, "value_layernorm": True, "layer_scalar": True, "softmax_scale": 1.0}
        | {"global_heads": GlobalHeads(8, 6, keys_are_values=True)},
    ],
    "gpt": [{"qk_layernorm": True, "delay_wgrad_compute": True}],
    "alibi": [{"window_size": (5, 0)}],
}


def one_step(kind, topology, *, batch=3, **options):
    """The loss of each token, and every gradient of the whole model."""
    fields, arguments = KINDS[kind]
    groups = Groups.of(topology)
    torch.manual_seed(1)
    model = GPT(ModelConfig(**(fields | options)), VOCAB, LENGTH, groups=groups, **arguments)
    seed_streams(2, groups.tp.rank(), rng="global")
    ids, labels = torch.randint(VOCAB, (2, batch, LENGTH), generator=torch.Generator().manual_seed(3)).unbind(0)
    loss = model(ids, labels=labels)
    if groups.cp is not None and groups.cp.size() > 1:
        loss = whole_losses(loss, group=groups.cp)
    (loss.sum(-1).sum() / ids.numel()).backward()
    for layer in model.modules():
        if isinstance(layer, ParallelLinear):
            layer.backward_dw()
    finalize_gradients_(model, tp_group=groups.tp, dp_group=groups.cp)
    whole = {
        name: gather_parameter(param.grad, layout, group=groups.tp)
        for name, param, layout in named_param_layouts(model, groups.tp.size())
    }
    return {"loss": loss.detach(), **whole}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("kind", "options"), [(kind, each) for kind in KINDS for each in [{}, *OPTIONS[kind]]])
def test_loss_and_gradients(group, kind, options, monkeypatch):
    # Capped scores in several blocks, whose sizes may not depend on how many heads a rank has.
    monkeypatch.setattr(attention_kernels, "_SCORES_OF_BLOCK", 1 << 12)
    alone, split = Topology.create(tp=1), Topology.create(tp=group.size())
    options = {"exact_parts": 8, "fuse_output_layer_and_loss": True, **options}
    expected = one_step(kind, alone, **options)
    found = [
        one_step(kind, split, sequence_parallel=sequence_parallel, **options) for sequence_parallel in (False, True)
    ]
    for results in found:
        for name, value in expected.items():
            assert_bit_equal(results[name], value, name=name)
    others = Topology.create(tp=1), Topology.create(tp=group.size())
    plain = [one_step(kind, topology) for topology in others]
    assert any(not torch.equal(plain[0][name], plain[1][name]) for name in plain[0]), "without exact bits differ"
    for topology in (alone, split, *others):
        topology.destroy()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("kind", "options"), [(kind, each) for kind in KINDS for each in [{}, *OPTIONS[kind]]])
def test_context_parallelism(group, kind, options, monkeypatch):
    monkeypatch.setattr(attention_kernels, "_SCORES_OF_BLOCK", 1 << 12)
    # 32 tokens on each of 4 ranks.
    options = {"exact_parts": 8, "batch": 8, **options}
    alone = Topology.create(tp=1)
    expected = one_step(kind, alone, **options)
    layouts = [{"cp": group.size()}, *([{"cp": 2, "tp": 2, "sequence_parallel": True}] if group.size() == 4 else [])]
    for axes in layouts:
        sequence_parallel = axes.pop("sequence_parallel", False)
        split = Topology.create(**axes)
        found = one_step(kind, split, sequence_parallel=sequence_parallel, **options)
        for name, value in expected.items():
            assert_bit_equal(found[name], value, name=f"{name} at {axes}")
        split.destroy()
    alone.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("axis", "options", "message"),
    [
        ("tp", {"exact_parts": 6}, "exact_parts is 6; it must be a power of two"),
        ("tp", {"exact_parts": 8, "ffn_hidden_size": 130}, "the largest exact_parts that works is 2$"),
        (
            "tp",
            {"exact_parts": 8, "num_query_groups": 1},
            "num_query_groups is 1, fewer than the 2 tensor-parallel ranks, .*; use tp 1 at most, or no exact mode$",
        ),
        ("tp", {"exact_parts": 8, "attention_sinks": True}, "attention_sinks cannot be used with exact_parts"),
        (
            "tp",
            {"exact_parts": 8, "defer_embedding_wgrad_compute": True},
            "defer_embedding_wgrad_compute has no exact form",
        ),
        ("cp", {"exact_parts": 2}, "need a power of two of context-parallel ranks .* there are tp 1 and cp 2"),
        ("cp", {"exact_parts": 8, "num_query_groups": 1}, "num_query_groups is 1, and tp 1 x cp 2 ranks share"),
    ],
)
def test_what_has_no_exact_form_is_refused(group, axis, options, message):
    topology = Topology.create(**{axis: 2})
    with pytest.raises(ConfigError, match=message):
        one_step("llama", topology, **options)
    topology.destroy()


@pytest.mark.ranks(1)
def test_bert_has_no_exact_form(group):
    with pytest.raises(ConfigError, match="BERT has no exact form"):
        Bert(ModelConfig(**COMMON, exact_parts=8), VOCAB, LENGTH, groups=Groups(tp=group))
