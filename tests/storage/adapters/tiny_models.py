"""Tiny random models of Hugging Face's library, with adapters of ``peft``, in folders."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

VOCABULARY = 103
# Six experts, whose widths nothing divides; some models have a layer without experts, or shared ones.
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 6, "intermediate_size": 13, "sliding_window": None}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"num_experts": 6, "moe_intermediate_size": 13, "shared_expert_intermediate_size": 11, "norm_topk_prob": True},
    ),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 6, "intermediate_size": 13, "residual_multiplier": 0.5}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 6, "intermediate_size": 13, "sliding_window": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 6, "moe_intermediate_size": 13, "mlp_only_layers": [0]}),
    "glm4_moe": ("Glm4MoeConfig", {"n_routed_experts": 6, "moe_intermediate_size": 13, "norm_topk_prob": True}),
}


def config_of(kind: str, **changes: Any) -> Any:
    """A configuration of ``kind``: "llama" (6 query heads on 2 key-value heads), "mistral" (on 3, in a window shorter
    than the tests' texts), "qwen2" (biases of queries, keys and values), "qwen3" (heads wider than their share of the
    hidden size), "gemma4" (other heads in the second layer, whose values are keys), "deepseek_v3" (a dense layer, then
    experts), "gpt2", "bloom", or one of ``EXPERTS``."""
    import transformers

    if kind in EXPERTS:
        cls = getattr(transformers, EXPERTS[kind][0])
        sizes = {
            "hidden_size": 24,
            "intermediate_size": 10,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",
            **EXPERTS[kind][1],
        }
    elif kind in ("llama", "mistral", "qwen2", "qwen3", "gemma4"):
        cls = {
            "llama": transformers.LlamaConfig,
            "mistral": transformers.MistralConfig,
            "qwen2": transformers.Qwen2Config,
            "qwen3": transformers.Qwen3Config,
            "gemma4": transformers.Gemma4TextConfig,
        }[kind]
        sizes = {
            "hidden_size": 36,
            "intermediate_size": 22,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "max_position_embeddings": 64,
        }
        sizes |= {"mistral": {"num_key_value_heads": 3, "sliding_window": 4}, "qwen3": {"head_dim": 10}}.get(kind, {})
        if kind == "gemma4":
            sizes |= {"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"]}
            sizes |= {"global_head_dim": 10, "num_global_key_value_heads": 3, "attention_k_eq_v": True}
    elif kind == "deepseek_v3":
        cls = transformers.DeepseekV3Config
        sizes = {"hidden_size": 36, "intermediate_size": 22, "num_hidden_layers": 2, "first_k_dense_replace": 1}
        sizes |= {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 64}
        sizes |= {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 7}
        sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 2}
        sizes |= {"topk_group": 1, "num_mtp_layers": 0}
    elif kind == "gpt2":
        cls = transformers.GPT2Config
        sizes = {"n_embd": 30, "n_layer": 2, "n_head": 5, "n_positions": 64, "n_inner": 22}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        cls = transformers.BloomConfig
        sizes = {"hidden_size": 30, "n_layer": 2, "n_head": 5, "seq_length": 64}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return cls(**(sizes | special | {"vocab_size": VOCABULARY} | changes))


def make_model(kind: str, *, seed: int = 0, dtype: Any = None, **changes: Any) -> Any:
    """A causal model with random weights, norms and biases that are not their defaults, in evaluation mode."""
    import torch
    import transformers

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(
            config_of(kind, **changes), attn_implementation="eager", dtype=dtype
        )
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model.eval()


def save_model(kind: str, folder: Path, **options: Any) -> Any:
    """``make_model``, saved in ``folder`` too."""
    model = make_model(kind, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return model


def with_adapters(model: Any, *, seed: int = 1, targets: Any = "all-linear", **options: Any) -> Any:
    """The model with ``peft``'s adapters, no factor 0."""
    import peft
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(
            target_modules=list(targets) if not isinstance(targets, str) else targets,
            task_type="CAUSAL_LM",
            **({"r": 4, "lora_alpha": 6} | options),
        )
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.2)
    return adapted.eval()


def read_adapters(model: Any, folder: Path) -> Any:
    """The model with the adapters of a folder, as ``peft`` reads them, in evaluation mode."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, folder).eval()


def save_expected(adapted: Any, folder: Path, ids: Any, *, merges: bool = False, **others: Any) -> None:
    """Save ``peft``'s adapters, and in ``expected`` their logits, gradients, merged weights if asked, and others."""
    import safetensors.torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(folder / "adapter")
    logits = adapted(ids).logits
    logits.log_softmax(-1)[..., 3].mean().backward()
    expected = {"ids": ids, "after": logits.detach(), **others}
    for name, param in adapted.named_parameters():
        if param.requires_grad:
            stored = name.replace(".modules_to_save.default", "").replace(".default", "")
            expected[f"gradient.{stored.replace('magnitude_vector.weight', 'magnitude_vector')}"] = param.grad
    if merges:
        expected |= {f"merged.{name}": each for name, each in adapted.merge_and_unload().state_dict().items()}
    safetensors.torch.save_file({name: each.contiguous() for name, each in expected.items()}, folder / "expected")
