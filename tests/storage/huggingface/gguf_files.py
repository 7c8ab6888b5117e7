"""GGUF files of tiny models by transformers, written with llama.cpp's own library and names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.data.tokenizer import Tokenizer

_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
_HEADS = {"vocab_size": 288, "num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rope_theta": 300.0}),
    "qwen2": ("Qwen2ForCausalLM", _TIED),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 128}),
    "qwen2moe": ("Qwen2MoeForCausalLM", _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3moe": ("Qwen3MoeForCausalLM", _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "gemma2": ("Gemma2ForCausalLM", _TIED | {"head_dim": 256, "sliding_window": 8}),
    "gemma3": ("Gemma3ForCausalLM", _TIED | {"head_dim": 256, "sliding_window": 8}),
}
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}
_SOME_KEYS = {
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}


def tiny_model(architecture: str) -> Any:
    """A random model, with norms that are not 1."""
    import transformers

    name, others = MODELS[architecture]
    cls = getattr(transformers, name)
    torch.manual_seed(5)
    model = cls(cls.config_class(**_SIZES, **_HEADS, **others))
    with torch.no_grad():
        for key, each in model.named_parameters():
            if "norm" in key:
                each.add_(0.1 * torch.randn_like(each))
    return model


def write_gguf(path: Path, architecture: str, *, kind: str, tokenizer: Tokenizer | None = None) -> Path:
    """Write a tiny model; matrices are of the type ``kind``, vectors in fp32."""
    import gguf

    model = tiny_model(architecture)
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    for field, key in (
        _KEYS | {name: key for name, key in _SOME_KEYS.items() if name in MODELS[architecture][1]}
    ).items():
        value = getattr(config, field)
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", MODELS[architecture][1].get("rope_theta", 10000.0))
    if tokenizer is not None:
        _add_tokenizer(writer, json.loads(tokenizer._backend.to_str()), tokenizer.eos_id)
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    types = gguf.GGMLQuantizationType
    for name, value in stored_tensors(model, names).items():
        array = value.numpy()
        chosen = types[kind] if array.ndim > 1 and "ffn_gate_inp" not in name else types.F32
        writer.add_tensor(name, gguf.quantize(array, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_tensors(model: Any, names: Any) -> dict[str, torch.Tensor]:
    """The weights as llama.cpp stores them, by its names."""
    config, stored = model.config, {}
    for key, value in model.state_dict().items():
        value = value.detach().float().contiguous()
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, ending = key.rpartition(".")
        if ending in ("gate_up_proj", "down_proj"):
            layer = stem.split(".")[2]
            halves = (
                dict(zip(("gate", "up"), value.chunk(2, dim=1), strict=True)) if "gate" in ending else {"down": value}
            )
            stored |= {f"blk.{layer}.ffn_{each}_exps.weight": half.contiguous() for each, half in halves.items()}
            continue
        if config.model_type == "llama" and (".q_proj" in key or ".k_proj" in key):
            heads = config.num_attention_heads if ".q_proj" in key else config.num_key_value_heads
            value = value.view(heads, 2, -1, value.shape[1]).transpose(1, 2).reshape(value.shape)
        if config.model_type.startswith("gemma") and stem.endswith("norm"):
            value = value + 1
        if stem.endswith("shared_expert_gate"):
            value = value[0]
        found = names.get_name(stem)
        assert found is not None, key
        stored[f"{found}.{ending}"] = value
    return stored


def _add_tokenizer(writer: Any, backend: Mapping[str, Any], eos_id: int) -> None:
    vocabulary = backend["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == tokens[eos_id] else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_eos_token_id(eos_id)
    writer.add_bos_token_id(eos_id)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}")
