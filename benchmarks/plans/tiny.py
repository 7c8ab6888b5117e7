"""Tiny models of all configuration classes of transformers that have a tensor-parallel plan."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

HEAD_DIM, VOCAB = 8, 96
_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "adapter_in_dim")
_HEADS = ("num_attention_heads", "num_heads", "n_head")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_global_key_value_heads")
# Fields that models of any class may have; a field that is None keeps its class's default if a rule above fills it.
_SIZES: dict[str, int | float | bool] = {
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("mlp_intermediate_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim"), HEAD_DIM),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "n_layer"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts"),
        2,
    ),
    **dict.fromkeys(("n_group", "topk_group", "num_group", "num_expert_group", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("index_head_dim", "mamba_d_state", "ssm_state_size", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 12),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "residual_dropout"), 0.0),
    **dict.fromkeys(("embedding_dropout", "classifier_dropout"), 0.0),
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), 0.0),
    "max_position_embeddings": 128,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "sliding_window": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "index_n_heads": 2,
    "index_topk": 4,
    "index_kpool": 2,
    "image_size": 16,
    "patch_size": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_qk_norm": True,
    "num_kv_shared_layers": 0,
    "first_k_dense_replace": 1,
    "laurel_rank": 8,
    "zero_expert_num": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# At most three fields for a class that the rule does not fit.
OVERRIDES: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "Glm5NextTextConfig": {"qk_rope_head_dim": 0},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "MiMoV2FlashConfig": {"num_key_value_heads": 3},
    "NeoMMEConfig": {"head_dim": 16},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 24},
    "Qwen4ExpTextConfig": {"indexer_compress_ratio": 2, "indexer_budget": 4},
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
}


@dataclass(frozen=True)
class Heads:
    """Heads of a tiny model.

    Attributes:
        queries: number of query heads.
        groups: number of key-value heads; None for 12, 6, 4 or 1, the nearest to the class's own ratio.
        is_odd: whether the widths of MLP, experts and vocabulary divide by no number of ranks.
    """

    queries: int = 12
    groups: int | None = None
    is_odd: bool = False


def classes(only: list[str] | None = None) -> list[tuple[str, type[Any]]]:
    """Return each class with a plan, after the name of its package, in order; ``only`` those of the given names."""
    found = []
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/configuration_*.py")):
        text = path.read_text(encoding="utf-8")
        if "tp_plan" not in text or not (only is None or any(f"class {name}(" in text for name in only)):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for name, kind in vars(module).items():
            is_own = inspect.isclass(kind) and kind.__module__ == module.__name__ and kind.__name__ == name
            is_own &= only is None or name in only
            if is_own and issubclass(kind, transformers.PretrainedConfig) and kind.base_model_tp_plan:
                found.append((path.parent.name, kind))
    return found


def model_class(kind: type[Any], package: str) -> type[Any]:
    """Return the causal model of a configuration class, or else its first model."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for mapping in (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING):
        with contextlib.suppress(KeyError, ValueError, AttributeError):
            model = mapping[kind]
            return model[0] if isinstance(model, tuple) else model
    for path in sorted(Path(transformers.__file__).parent.glob(f"models/{package}/modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{package}.{path.stem}")
        own = [
            model
            for model in vars(module).values()
            if inspect.isclass(model)
            and model.__module__ == module.__name__
            and issubclass(model, transformers.PreTrainedModel)
            and model.config_class is kind
            and not model.__name__.endswith("PreTrainedModel")
        ]
        if own:
            return min(own, key=lambda model: ("ForCausalLM" not in model.__name__, len(model.__name__)))
    raise LookupError("no model has this configuration")


def tiny_config(kind: type[Any], heads: Heads) -> Any:
    """Return a configuration of a class with tiny sizes, by one rule and ``OVERRIDES``."""
    default = kind()
    fields = default.to_dict()
    # Latent attention has as many keys as queries.
    groups = heads.queries if "kv_lora_rank" in fields else heads.groups or _groups_of(fields)
    new: dict[str, Any] = {}
    for name, value in fields.items():
        size: Any = _SIZES.get(name)
        if name in _HIDDEN:
            size = heads.queries * HEAD_DIM
        elif name in _HEADS:
            size = heads.queries
        elif name in _KEY_VALUE_HEADS and (value is not None or name == "num_key_value_heads"):
            size = groups
        if size is None or (value is None and name in ("pad_token_id", "sliding_window", "q_lora_rank")):
            continue
        if heads.is_odd:
            size = {"vocab_size": 97, "intermediate_size": 50, "moe_intermediate_size": 27}.get(name, size)
        new[name] = [size] * 2 if isinstance(value, list | tuple) else size
    _cycle_layers(fields, new)
    for name in getattr(kind, "sub_configs", None) or {}:
        inner = getattr(default, name, None)
        if inner is not None and name in fields and type(inner) is not kind:
            new[name] = tiny_config(type(inner), heads)
    if "qk_rope_head_dim" in fields and "head_dim" in new:
        new["head_dim"] = new["qk_rope_head_dim"]
    _fit_rotary(kind, fields, new)
    return kind(**new | OVERRIDES.get(kind.__name__, {}))


def _groups_of(fields: dict[str, Any]) -> int:
    def largest(value: Any) -> int:
        return max(value) if isinstance(value, list | tuple) else value

    queries = largest(fields.get("num_attention_heads") or fields.get("num_heads") or 1)
    groups = largest(fields.get("num_key_value_heads") or queries)
    sizes = (12, 6, 4, 1) if groups == 1 else (12, 6, 4)
    return min(sizes, key=lambda size: abs(12 / size - queries / groups))


def _cycle_layers(fields: dict[str, Any], new: dict[str, Any]) -> None:
    """Take each kind of layer of the default once, and at least two layers."""
    kinds = {name: list(dict.fromkeys(fields[name])) for name in ("layer_types", "mlp_layer_types") if fields.get(name)}
    number = max([2, *(len(each) for each in kinds.values())])
    for name, each in kinds.items():
        new[name] = [each[index % len(each)] for index in range(number)]
    for name in ("num_hidden_layers", "num_layers"):
        if kinds and name in fields:
            new[name] = number


def _fit_rotary(kind: type[Any], fields: dict[str, Any], new: dict[str, Any]) -> None:
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    modeling = sys.modules.get(kind.__module__.replace("configuration", "modeling"))
    if modeling is not None and "mrope_section" in inspect.getsource(modeling):
        half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
        new["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 4) or 1, half // 4, half // 4]}
        if half < 4:
            new["rope_parameters"]["mrope_section"] = [half - 1, 1, 0]
    if "layer_types" in new and any(isinstance(value, dict) for value in rope.values()):
        some = next(value for value in rope.values() if isinstance(value, dict))
        new["rope_parameters"] = {each: rope.get(each) or some for each in dict.fromkeys(new["layer_types"])}


def tiny_model(kind: type[Any], package: str, heads: Heads) -> Any:
    """Return a tiny model in fp32, without dropout, whose norms and biases are not 1 and 0; the same at each call."""
    config = tiny_config(kind, heads)
    for each in (config, *(getattr(config, name, None) for name in getattr(kind, "sub_configs", None) or {})):
        if each is not None:
            each._attn_implementation = each._experts_implementation = "eager"
    torch.manual_seed(1)
    model = model_class(kind, package)(config).float().train()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, param in model.named_parameters():
            drawn = torch.randn(param.shape, generator=generator)
            if param.ndim > 1:
                param.copy_(0.6 * drawn / param.shape[-1] ** 0.5)
            else:
                param.copy_(("norm" in name and name.endswith("weight")) + 0.2 * drawn)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model
