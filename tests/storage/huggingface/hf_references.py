"""Tiny models of each architecture by transformers, with what they compute, on disk: the ranks only read it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.core.topology import Groups, Topology

BATCH, LENGTH = 2, 11
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 300.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 200.0}
BETA = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
LOCAL = {"rope_type": "default", "rope_theta": 50.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 5.0],
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}

_DECODER = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Seven heads, five layers, a width of the MLP and a vocabulary that nothing divides.
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 103, "n_positions": 13, "n_embd": 28, "n_layer": 5, "n_head": 7, "n_inner": 50},
    ),
    # ALiBi's slopes for a number of heads that is no power of two.
    "bloom": ("BloomForCausalLM", {"vocab_size": 1003, "hidden_size": 24, "n_layer": 3, "n_head": 6}),
    "llama": (
        "LlamaForCausalLM",
        _DECODER
        | {"vocab_size": 1003, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2}
        | {"head_dim": 8, "attention_bias": True, "rope_parameters": LLAMA3},
    ),
    # All of it at once, and biases that only the MLP has.
    "llama_tied": (
        "LlamaForCausalLM",
        _DECODER
        | {"vocab_size": 1003, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2}
        | {"mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": (
        "MistralForCausalLM",
        _DECODER | {"vocab_size": 101, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        _DECODER
        | {"vocab_size": 97, "num_attention_heads": 6, "num_key_value_heads": 1, "tie_word_embeddings": True}
        | {"rope_parameters": YARN},
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        _DECODER
        | {"vocab_size": 98, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
        | {"head_dim": 10, "tie_word_embeddings": True},
    ),
    # Windows in the later layers alone.
    "qwen2_windows": (
        "Qwen2ForCausalLM",
        _DECODER
        | {"vocab_size": 97, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    # Three of four elements of a head rotated, and sequences longer than the original context.
    "phi3": (
        "Phi3ForCausalLM",
        _DECODER
        | {"vocab_size": 101, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, "pad_token_id": 0}
        | {"original_max_position_embeddings": 8, "rope_parameters": LONGROPE},
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        _DECODER
        | {"vocab_size": 103, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 4, "pad_token_id": 0},
    ),
    "granite": (
        "GraniteForCausalLM",
        _DECODER
        | {"vocab_size": 107, "num_attention_heads": 6, "num_key_value_heads": 3, "embedding_multiplier": 12.0}
        | {"logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3}
        | {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}},
    ),
    # One norm over six heads on four ranks, and over two keys that four ranks share.
    "olmo2": (
        "Olmo2ForCausalLM",
        _DECODER | {"vocab_size": 109, "num_attention_heads": 6, "num_key_value_heads": 2, "pad_token_id": 0},
    ),
    # Positions are scaled in the second layer alone.
    "olmo3": (
        "Olmo3ForCausalLM",
        _DECODER
        | {"vocab_size": 110, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": LOCAL}, "pad_token_id": 0},
    ),
    "ministral": (
        "MinistralForCausalLM",
        _DECODER
        | {"vocab_size": 101, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 4}
        | {"head_dim": 10},
    ),
    # Eleven tokens in three of the original contexts.
    "ministral3": (
        "Ministral3ForCausalLM",
        _DECODER
        | {"vocab_size": 102, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "pad_token_id": 0}
        | {"rope_parameters": YARN | BETA | {"original_max_position_embeddings": 4, "mscale": 0.7}},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        _DECODER
        | {"vocab_size": 113, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"head_dim": 10, "query_pre_attn_scalar": 13, "sliding_window": 4, "final_logit_softcapping": 3.0}
        | {"attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        _DECODER
        | {"vocab_size": 127, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1}
        | {"head_dim": 10, "query_pre_attn_scalar": 12, "sliding_window": 4, "rope_parameters": GEMMA3_ROPE}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "final_logit_softcapping": 3.0},
    ),
    # Layers without a window have one wider key head, which is the value too, and rotate a quarter of it.
    "gemma4": (
        "Gemma4ForCausalLM",
        _DECODER
        | {"vocab_size": 129, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3}
        | {"head_dim": 10, "global_head_dim": 16, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 4}
        | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {"vocab_size": 131, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 5}
        | {"intermediate_size": 37, "max_position_embeddings": 64},
    ),
    "opt": (
        "OPTForCausalLM",
        {"vocab_size": 137, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "ffn_dim": 37}
        | {"max_position_embeddings": 13, "dropout": 0.0, "word_embed_proj_dim": 24, "pad_token_id": 0},
    ),
    # Experts that two and three ranks divide, and widths of experts that nothing divides.
    "mixtral": (
        "MixtralForCausalLM",
        _DECODER
        | {"vocab_size": 139, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 6}
        | {"num_experts_per_tok": 2, "sliding_window": 4, "experts_implementation": "eager"},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        _DECODER
        | {"vocab_size": 141, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 13}
        | {"shared_expert_intermediate_size": 19, "norm_topk_prob": True, "experts_implementation": "eager"},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        _DECODER
        | {"vocab_size": 143, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"head_dim": 10, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 13}
        | {"mlp_only_layers": [1], "experts_implementation": "eager"},
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        _DECODER
        | {"vocab_size": 145, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 6}
        | {"num_experts_per_tok": 4, "clip_qkv": 0.8, "pad_token_id": 0, "eos_token_id": 2}
        | {"experts_implementation": "eager"},
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        _DECODER
        | {"vocab_size": 147, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"hidden_size": 32, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 13}
        | {"n_shared_experts": 2, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True}
        | {"attention_bias": True, "num_mtp_layers": 0, "experts_implementation": "eager"},
    ),
    # Heads that nothing divides, and queries without a latent. transformers' rotation of V2 takes even widths only.
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        _DECODER
        | {"vocab_size": 149, "num_hidden_layers": 3, "num_attention_heads": 5, "hidden_size": 30, "q_lora_rank": None}
        | {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
        | {"first_k_dense_replace": 1, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 13, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}
        | {"routed_scaling_factor": 1.5, "attention_bias": True, "experts_implementation": "eager"},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        _DECODER
        | {"vocab_size": 151, "num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 5}
        | {"q_lora_rank": 13, "kv_lora_rank": 11, "qk_nope_head_dim": 5, "qk_rope_head_dim": 8, "v_head_dim": 7}
        | {"first_k_dense_replace": 1, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 13}
        | {"n_group": 3, "topk_group": 2, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}
        | {"num_mtp_layers": 0, "experts_implementation": "eager"},
    ),
    # Windows in the first and the last layer, another rotary scaling, and a gate that is clamped.
    "gpt_oss": (
        "GptOssForCausalLM",
        _DECODER
        | {"vocab_size": 149, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
        | {"head_dim": 10, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 13}
        | {"sliding_window": 4, "swiglu_limit": 0.4, "swiglu_alpha": 1.3, "rope_parameters": YARN | {"truncate": False}}
        | {"experts_implementation": "eager"},
    ),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        _DECODER
        | {"vocab_size": 149, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 6}
        | {"num_experts_per_tok": 3, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.3, "tie_word_embeddings": True, "experts_implementation": "eager"},
    ),
    "bert": (
        "BertForPreTraining",
        {"vocab_size": 67, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
        | {"intermediate_size": 50, "max_position_embeddings": 17},
    ),
    "bert_masked_lm": (
        "BertForMaskedLM",
        {"vocab_size": 66, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
        | {"intermediate_size": 41, "max_position_embeddings": 17},
    ),
}
STORED_NAMES = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""By model, parameters that have another name in files."""
MODEL_PARAMS = [
    name if name in ("gpt2", "llama", "bert") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS
]
"""The names, for ``parametrize``."""

WITH_EXPERTS = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
)
GPT_LIKE = tuple(name for name in MODELS if not name.startswith("bert"))


@dataclass(frozen=True)
class Reference:
    """A model that transformers saved, and what it computes."""

    name: str
    folder: Path

    @property
    def is_bert(self) -> bool:
        return self.name.startswith("bert")

    def values(self) -> dict[str, Tensor]:
        """``input_ids``, ``labels``, ``logits``, ``loss``, and ``gradient.NAME`` for each stored tensor."""
        return load_file(self.folder.parent / "values.safetensors")

    def padded_values(self) -> dict[str, Tensor]:
        """What ``add_padded_values`` saved."""
        return load_file(self.folder.parent / "padded.safetensors")

    def weights(self) -> dict[str, Tensor]:
        """The stored tensors."""
        return load_file(self.folder / "model.safetensors")


def transformers_model(name: str, **changes: Any) -> Any:
    """A model of ``MODELS`` in which every parameter is random, in evaluation mode."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    class_name, fields = MODELS[name.removesuffix("_tokens")]
    class_name = changes.pop("class_name", class_name)
    model_class = getattr(transformers, class_name)
    torch.manual_seed(len(name))
    model = model_class(model_class.config_class(**(fields | changes), attn_implementation="eager"))
    with torch.no_grad():
        for key, param in model.named_parameters():
            centre = 1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0
            param.copy_(centre + 0.2 * torch.randn_like(param))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.rand_like(buffer))
            if key.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand_like(buffer))
    return model.eval()


PADDED = torch.tensor([[0] * 3 + [1] * 8, [1] * 9 + [0] * 2, [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]])
"""A mask with padding on the left, on the right, and in the middle."""


def make_reference(name: str, root: Path) -> Reference:
    """Save a model and what it computes below ``root``."""
    model = transformers_model(name)
    reference = Reference(name, root / name / "model")
    model.save_pretrained(reference.folder)
    mask = None
    if name.startswith("bert"):
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[1, 9:] = 0
    _save_values(reference, model, "values", mask, seed=1)
    return reference


def add_padded_values(reference: Reference) -> None:
    """Save what the model computes of a batch padded as ``PADDED``."""
    _save_values(reference, transformers_model(reference.name), "padded", PADDED, seed=2)


def make_balanced(name: str, root: Path) -> Reference:
    """Save a model in fp64 whose config asks for a balance loss, and what it computes of four padded rows."""
    model = transformers_model(name, output_router_logits=True, router_aux_loss_coef=0.3).double()
    reference = Reference(name, root / "model")
    model.save_pretrained(reference.folder)
    # In fp64 transformers gives NaN for tokens that see none: no padding is on the left, or longer than a window.
    mask = torch.tensor([[1] * 9 + [0] * 2, [1] * 11, [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0], [1] * 8 + [0] * 3])
    _save_values(reference, model, "values", mask, seed=4)
    return reference


def _save_values(reference: Reference, model: Any, file: str, mask: Tensor | None, *, seed: int) -> None:
    name, generator = reference.name, torch.Generator().manual_seed(seed)
    shape = (BATCH, LENGTH) if mask is None else mask.shape
    # Without BERT's padding, 0, which transformers gives no gradient from the lookup.
    input_ids, labels = (torch.randint(1, model.config.vocab_size, shape, generator=generator) for _ in range(2))
    labels[:, 3] = -100
    values = {"input_ids": input_ids, "labels": labels}
    if mask is not None:
        values["mask"] = mask
        # What stands where padding is must not matter.
        labels[mask == 0] = -100
    if name.startswith("bert"):
        values["token_types"] = (torch.arange(LENGTH) >= 5).long().expand(shape[0], -1).contiguous()
        output = model(input_ids=input_ids, token_type_ids=values["token_types"], attention_mask=mask)
        logits = output.prediction_logits if name == "bert" else output.logits
        if name == "bert":
            values["sentence_logits"] = output.seq_relationship_logits
    else:
        output = model(input_ids=input_ids, attention_mask=mask)
        logits = output.logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    total = loss + values["sentence_logits"].logsumexp(-1).sum() if "sentence_logits" in values else loss
    if getattr(output, "aux_loss", None) is not None:
        values["balance"] = model.config.router_aux_loss_coef * output.aux_loss
        total = total + values["balance"]
    total.backward()
    values |= {"logits": logits, "loss": loss}
    names = STORED_NAMES.get(name, {})
    gradients = {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
    gradients = _as_stored(name, gradients)
    values |= {f"gradient.{names.get(key, key)}": gradient for key, gradient in gradients.items()}
    save_file(
        {key: value.detach().contiguous() for key, value in values.items()},
        reference.folder.parent / f"{file}.safetensors",
    )


def _as_stored(name: str, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name and cut gradients of experts and routers as transformers stores these parameters."""
    kind = name.removesuffix("_tokens")
    if kind == "granitemoe":
        stored = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
        stored["router.weight"] = "router.layer.weight"
        for theirs, own in stored.items():
            gradients = {key.replace(theirs, own): each for key, each in gradients.items()}
    elif kind in WITH_EXPERTS and kind != "gpt_oss":
        gradients = _by_expert(gradients, is_mixtral=kind == "mixtral")
    return gradients


def _by_expert(gradients: dict[str, Tensor], *, is_mixtral: bool) -> dict[str, Tensor]:
    """Split the joint tensors of experts, which transformers has in memory, into those that are stored."""
    stored: dict[str, Tensor] = {}
    for key, gradient in gradients.items():
        prefix, _, kind = key.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if parts is None:
            stored[key] = gradient
            continue
        for expert, own in enumerate(gradient):
            for part, value in zip(parts, own.chunk(len(parts)), strict=True):
                stored[f"{prefix}.experts.{expert}.{part}.weight"] = value
    if is_mixtral:
        others = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        stored = {".".join(others.get(word, word) for word in key.split(".")): each for key, each in stored.items()}
    return stored


def layouts(world_size: int) -> list[tuple[int, int]]:
    """``(tp, pp)`` for so many ranks."""
    return {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1)], 4: [(4, 1), (2, 2)]}[world_size]


def groups_of(tp: int, pp: int, ep: int = 1) -> Groups:
    """The groups of a topology with these sizes; without data parallelism."""
    return Groups.of(Topology.create(tp=tp, pp=pp, ep=ep, etp=tp // ep))
