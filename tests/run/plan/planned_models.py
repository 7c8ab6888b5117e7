"""Small models of every kind that a run may train, and how they are planned."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.models.recomputation import Recomputation
from shardwise.run.plan.workload import Workload
from shardwise.storage.huggingface import ModelDescription

LLAMA: dict[str, Any] = {
    "activation": "silu",
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "num_query_groups": 2,
}
BIASES = {"attention_bias": True, "qkv_bias": True, "mlp_bias": True}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": BIASES | {"share_embeddings_and_output_weights": True},
    "llama": LLAMA,
    "mistral": LLAMA | {"window_size": (3, 0)},
    "qwen3": LLAMA | {"qk_layernorm": True, "kv_channels": 10},
    "bloom": BIASES
    | {"embedding_layernorm": True, "position_embedding_type": "alibi", "share_embeddings_and_output_weights": True},
    "gemma": LLAMA
    | {
        "norm_position": "sandwich",
        "attention_logit_softcap": 50.0,
        "final_logit_softcap": 30.0,
        "window_size": (3, 0),
        "windowed_layers": (True, False, True),
        "window_rotary_base": 100.0,
        "embedding_multiplier": 2.0,
    },
    "olmo2": LLAMA | {"norm_position": "branch", "qk_layernorm": True, "qk_layernorm_over_heads": True},
    "smollm3": LLAMA | {"rotary_layers": (True, False, True), "residual_multiplier": 0.5},
    "gpt_neox": BIASES | {"position_embedding_type": "rope", "parallel_residual": True},
    "opt": BIASES | {"position_offset": 2},
    "one key-value head": {"num_query_groups": 1},
}
# What 2, 3 and 4 ranks divide, and what none of them does.
EVEN = {"num_attention_heads": 12, "hidden_size": 36, "ffn_hidden_size": 48, "vocab_size": 312, "kv_channels": 6}
UNEVEN = {"num_attention_heads": 8, "hidden_size": 32, "ffn_hidden_size": 43, "vocab_size": 301, "kv_channels": 4}
S, B = 13, 3


def described(kind: str, *, sizes: dict[str, Any] | None = None, **changes: Any) -> ModelDescription:
    """A model of ``kind``, in sizes of nobody."""
    fields = {"num_layers": 3, "max_sequence_length": 16, "activation": "gelu"} | (EVEN if sizes is None else sizes)
    fields = fields | {"num_query_groups": fields["num_attention_heads"]} | KINDS[kind] | changes
    return ModelDescription(**fields)


def workload_of(model: ModelDescription, dtype: torch.dtype = torch.float32, **changes: Any) -> Workload:
    """``model`` in training, a few samples a step."""
    fields = {"sequence_length": S, "global_batch_size": B, "element_bytes": dtype.itemsize} | changes
    return Workload(model, **fields)


RECOMPUTATIONS = {
    "full": Recomputation("full", "uniform", 2),
    "block": Recomputation("full", "block", 2),
    "core_attn": Recomputation("selective", modules=("core_attn",)),
    "layernorm, mlp_act": Recomputation("selective", modules=("layernorm", "mlp_act")),
    "mlp": Recomputation("selective", modules=("mlp",)),
}
