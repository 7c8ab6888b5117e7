"""Layers of every kind, that the tests of the options share."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.megatron.config import TransformerConfig
from shardwise.models.transformer.distance_bias import local_alibi_slopes
from shardwise.models.transformer.heads import LatentAttention
from shardwise.models.transformer.layer import TransformerLayer, TransformerLayerSpec, attention_of
from shardwise.models.transformer.masks import AttentionMask, AttnMaskType
from shardwise.models.transformer.mlp import ACTIVATIONS
from shardwise.models.transformer.rotary import RotaryEmbedding
from shardwise.tensor_parallel.layers import named_param_layouts

# Divides nothing, with sequence parallelism neither.
S, B, H = 9, 2, 10
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
# Two texts in the first row, three in the second, the last one of a single token.
DOCUMENTS = torch.tensor([[4] * 4 + [7] * 5, [0] * 3 + [1] * 5 + [0]])
PADDING = torch.tensor([[0] * 9, [0] * 6 + [1] * 3], dtype=torch.bool)[:, None, None, :]
LEFT_PADDING = PADDING.flip(-1)
# Of Press et al., written down.
SLOPES = {6: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]}


@dataclass(frozen=True)
class Case:
    heads: int = 6
    groups: int = 6
    options: dict[str, Any] = field(default_factory=dict)
    activation: str = "gelu"
    mask_type: AttnMaskType = AttnMaskType.causal
    forbidden: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    share: float = 0.0
    alibi: bool = False


POST_NORM = {"norm_position": "post"}
CASES = {
    "seven heads": Case(7, 7),
    "llama": Case(8, 4, LLAMA, activation="silu", share=1.0),
    "two key-value heads": Case(8, 2, LLAMA, activation="silu", share=1.0),
    "two key-value heads across ranks": Case(6, 2, {"add_qkv_bias": True}),
    "three key-value heads": Case(12, 3),
    "one key-value head": Case(7, 1, {"add_bias_linear": False}),
    "qwen3": Case(6, 2, LLAMA | {"qk_layernorm": True}, activation="silu", share=1.0),
    # Without rotation the gradient of the key norm's bias is 0 in truth.
    "qk norm with biases": Case(7, 7, {"qk_layernorm": True}, share=1.0),
    "geglu, zero-centred": Case(options={"gated_linear_unit": True, "layernorm_zero_centered_gamma": True}),
    "zero-centred rms": Case(options=LLAMA | {"layernorm_zero_centered_gamma": True, "qk_layernorm": True}),
    "bloom": Case(
        options={"apply_residual_connection_post_layernorm": True}, activation="gelu_tanh", alibi=True
    ),
    "alibi on shared keys": Case(6, 2, alibi=True, activation="quick_gelu"),
    "bert": Case(options=POST_NORM, mask_type=AttnMaskType.padding, forbidden=PADDING),
    "post-norm rms": Case(options=POST_NORM | LLAMA, activation="squared_relu"),
    "mistral": Case(6, 2, LLAMA | {"window_size": (2, 0)}, activation="silu", share=1.0),
    "window on both sides": Case(options={"window_size": (1, 3)}, mask_type=AttnMaskType.no_mask, activation="relu"),
    "scale": Case(options={"softmax_scale": 0.9}),
    "interleaved": Case(6, 3, {"rotary_interleaved": True}, share=0.5),
    "left padding": Case(forbidden=LEFT_PADDING),
    "packed": Case(6, 2, LLAMA, activation="silu", documents=DOCUMENTS, share=1.0),
    "sinks": Case(12, 4, {"attention_sinks": True}, share=1.0),
    "sinks across ranks": Case(6, 2, LLAMA | {"attention_sinks": True, "window_size": (2, 0)}, activation="silu"),
    "sinks, left padding": Case(7, 7, {"attention_sinks": True}, forbidden=LEFT_PADDING),
    "unfused": Case(6, 2, {"attention_backend": "unfused", "window_size": (3, 0)}),
    "written out": Case(6, 2, {"attention_backend": "local", "softmax_scale": 0.7}),
    "written out, all at once": Case(
        6, 2, {"attention_backend": "local", "window_size": (4, 0)},
        forbidden=LEFT_PADDING, documents=DOCUMENTS, alibi=True,
    ),
    "latent": Case(
        7, 7, LLAMA | {"latent": LatentAttention(5, 3, 4, 6, query_rank=8), "rotary_interleaved": True},
        activation="silu", share=1.0,
    ),
    "latent, with biases and wide values": Case(
        5, 5, {"latent": LatentAttention(6, 1, 4, 7), "window_size": (3, 0)}, forbidden=LEFT_PADDING, share=1.0,
    ),
    "latent, packed and written out": Case(
        6, 6, {"latent": LatentAttention(6, 5, 4, 3, query_rank=7), "attention_backend": "local"},
        documents=DOCUMENTS, share=1.0,
    ),
}  # fmt: skip


def config_of(case, group, *, sequence_parallel=False, **options):
    return TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        kv_channels=None if "latent" in case.options else 4,
        ffn_hidden_size=13,
        activation_func=ACTIVATIONS[case.activation],
        tensor_model_parallel_size=group.size(),
        sequence_parallel=sequence_parallel,
        init_method_std=0.5,
        **{"params_dtype": torch.float64, "hidden_dropout": 0.0, "attention_dropout": 0.0} | case.options | options,
    )


def layer_of(case, group, **options):
    """With parameters that are the same whole ones at every number of ranks, none of them 0 or 1."""
    torch.manual_seed(3)
    config = config_of(case, group, **options)
    spec = TransformerLayerSpec(attention=functools.partial(attention_of(config), attn_mask_type=case.mask_type))
    layer = TransformerLayer(config, spec, 1, group)
    with torch.no_grad():
        for _, param, layout in named_param_layouts(layer, group.size()):
            if param.dim() == 1:
                param += layout.take(torch.randn(layout.global_shape, dtype=torch.float64) * 0.3, group.rank())
    return config, layer


def mask_of(case, config, group):
    slopes = local_alibi_slopes(config, group) if case.alibi else None
    return AttentionMask(case.forbidden, document_ids=case.documents, alibi_slopes=slopes)


def rotary_of(case, config, positions=None):
    positions = torch.arange(S) if positions is None else positions
    return RotaryEmbedding(config.rotary_width, case.share)(positions, torch.float64) if case.share else None
