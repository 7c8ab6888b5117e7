"""The language model under Megatron's names: its config, and its whole weights, made of the protocol's and back."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.conformance.dense import Sizes

_LAYER = {
    "norm1.weight": "input_layernorm.weight",
    "o.weight": "self_attention.linear_proj.weight",
    "sinks": "self_attention.sinks.logits",
    "norm2.weight": "pre_mlp_layernorm.weight",
    "down.weight": "mlp.linear_fc2.weight",
}
_QUERY_AND_KEY_NORMS = {
    "q_norm.weight": "self_attention.q_layernorm.weight",
    "k_norm.weight": "self_attention.k_layernorm.weight",
}
_LATENT = {
    "latent.q.weight": "self_attention.linear_q_proj.weight",
    "latent.q_down.weight": "self_attention.linear_q_down_proj.weight",
    "latent.q_norm.weight": "self_attention.q_layernorm.weight",
    "latent.q_up.weight": "self_attention.linear_q_up_proj.weight",
    "latent.kv_down.weight": "self_attention.linear_kv_down_proj.weight",
    "latent.kv_norm.weight": "self_attention.kv_layernorm.weight",
    "latent.kv_up.weight": "self_attention.linear_kv_up_proj.weight",
}
_MODEL = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "head.weight": "output_layer.weight",
}


def config_fields(sizes: Sizes) -> dict[str, Any]:
    """Return the fields of the model's config that Megatron's has too."""
    return {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.kv_heads,
        "kv_channels": sizes.head_dim,
        "ffn_hidden_size": sizes.ffn,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layernorm_epsilon": sizes.epsilon,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "qk_layernorm": sizes.qk_norm,
        "params_dtype": torch.float64,
    }


def make_layer(layers: Any, kind: str, shape: Sequence[int], **options: Any) -> Any:
    """Return a layer with a weight of this shape; a linear one has no bias unless ``options`` say so."""
    o, i = shape
    if kind == "embedding":
        return layers.VocabParallelEmbedding(o, i, **options)
    options = {"bias": False, "skip_bias_add": False} | options
    if kind == "column":
        return layers.ColumnParallelLinear(i, o, **options)
    return layers.RowParallelLinear(i, o, **({"input_is_parallel": True} | options))


def _layer_names(sizes: Sizes) -> dict[str, str]:
    """Return Megatron's names of a layer's tensors that are the same in both."""
    return _LAYER | (_QUERY_AND_KEY_NORMS if sizes.latent is None else _LATENT)


def to_megatron(weights: dict[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Return the weights under Megatron's names; queries, keys and values are fused, and gate and up projections."""
    result = {_MODEL[name]: value for name, value in weights.items() if name in _MODEL}
    per, d = sizes.heads // sizes.kv_heads, sizes.head_dim
    for layer in range(sizes.layers):
        ours, theirs = f"layers.{layer}.", f"decoder.layers.{layer}."
        names = _layer_names(sizes)
        result |= {theirs + other: weights[ours + name] for name, other in names.items() if ours + name in weights}
        if sizes.latent is None:
            q, k, v = (weights[f"{ours}{name}.weight"].view(sizes.kv_heads, -1, d, sizes.hidden) for name in "qkv")
            assert q.size(1) == per
            result[theirs + "self_attention.linear_qkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, sizes.hidden)
        gated = [weights[f"{ours}{name}.weight"] for name in ("gate", "up")]
        result[theirs + "mlp.linear_fc1.weight"] = torch.cat(gated)
    return result


def from_megatron(tensors: dict[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Return tensors with Megatron's names, of a whole model or of a stage, under the protocol's."""
    back = {other: name for name, other in _MODEL.items()}
    per, d = sizes.heads // sizes.kv_heads, sizes.head_dim
    result = {}
    for name, value in tensors.items():
        if name in back:
            result[back[name]] = value
            continue
        _, _, layer, rest = name.split(".", 3)
        ours = f"layers.{layer}."
        if rest == "self_attention.linear_qkv.weight":
            parts = value.view(sizes.kv_heads, per + 2, d, sizes.hidden).split([per, 1, 1], 1)
            result |= {
                f"{ours}{key}.weight": part.reshape(-1, sizes.hidden) for key, part in zip("qkv", parts, strict=True)
            }
        elif rest == "mlp.linear_fc1.weight":
            result |= {f"{ours}{key}.weight": part for key, part in zip(("gate", "up"), value.chunk(2), strict=True)}
        else:
            names = _layer_names(sizes).items()
            result[ours + next(key for key, other in names if other == rest)] = value
    return result
