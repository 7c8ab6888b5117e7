"""Megatron's arguments as an ``Architecture``: the config of a model from them, and they from a config.

Parameters have Megatron's names here, so that the table has one stored tensor for each but those of experts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.errors import ConfigError
from shardwise.core.json_text import shown
from shardwise.models.config import ModelConfig
from shardwise.models.experts import Experts
from shardwise.models.transformer.mlp import gelu_tanh, squared_relu
from shardwise.models.transformer.rotary import RotaryScaling
from shardwise.storage.huggingface.architectures.architecture import Architecture, Setting
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.mapping import joint_experts, whole

_LAYER = "decoder.layers.{layer}."
_TABLE = {
    **{f"embedding.{each}_embeddings.*": whole(f"embedding.{each}_embeddings.*") for each in ("word", "position")},
    **{
        _LAYER + name + ".*": whole(_LAYER + name + ".*")
        for name in (
            *("input_layernorm", "self_attention.linear_qkv", "self_attention.q_layernorm"),
            *("self_attention.k_layernorm", "self_attention.linear_proj", "pre_mlp_layernorm", "mlp.linear_fc1"),
            *("mlp.linear_fc2", "mlp.router"),
        )
    },
    _LAYER + "mlp.router.selection_bias": whole(_LAYER + "mlp.router.expert_bias"),
    _LAYER + "mlp.experts.up": joint_experts(_LAYER + "mlp.experts.experts.linear_fc1.weight"),
    _LAYER + "mlp.experts.down": joint_experts(_LAYER + "mlp.experts.experts.linear_fc2.weight", transposed=True),
    _LAYER + "mlp.shared.linear_fc1.*": whole(_LAYER + "mlp.shared_experts.linear_fc1.*"),
    _LAYER + "mlp.shared.linear_fc2.*": whole(_LAYER + "mlp.shared_experts.linear_fc2.*"),
    _LAYER + "mlp.shared_gate.weight": whole(_LAYER + "mlp.shared_experts.gate_weight"),
    "decoder.final_layernorm.*": whole("decoder.final_layernorm.*"),
    "output_layer.*": whole("output_layer.*"),
}
_SETTINGS = {
    "num_layers": Setting("num_layers", 0),
    "hidden_size": Setting("hidden_size", 0),
    "ffn_hidden_size": Setting("ffn_hidden_size", 0),
    "num_attention_heads": Setting("num_attention_heads", 0),
    "kv_channels": Setting("kv_channels", 0),
    "vocab_size": Setting("padded_vocab_size", 0),
    "max_sequence_length": Setting("max_position_embeddings", 0),
    "position_embedding_type": Setting("position_embedding_type", "learned_absolute"),
    "rotary_percent": Setting("rotary_percent", 1.0),
    "rotary_base": Setting("rotary_base", 10000.0),
    "rotary_interleaved": Setting("rotary_interleaved", False),
    "normalization": Setting("normalization", "LayerNorm"),
    "layernorm_epsilon": Setting("norm_epsilon", 1e-5),
    "layernorm_zero_centered_gamma": Setting("apply_layernorm_1p", False),
    "apply_residual_connection_post_layernorm": Setting("apply_residual_connection_post_layernorm", False),
    "qk_layernorm": Setting("qk_layernorm", False),
    "gated_linear_unit": Setting("swiglu", False),
    "add_bias_linear": Setting("add_bias_linear", True),
    "attention_dropout": Setting("attention_dropout", 0.1),
    "hidden_dropout": Setting("hidden_dropout", 0.1),
    "init_method_std": Setting("init_method_std", 0.02),
}
_REQUIRED = {
    **dict.fromkeys(
        (
            *("multi_latent_attention", "is_hybrid_model", "qk_l2_norm", "quick_geglu", "attention_output_gate"),
            *("fp8_param_gather", "encoder_decoder", "use_kitchen"),
        ),
        False,
    ),
    **dict.fromkeys(
        (
            *("mtp_num_layers", "heterogeneous_layers_config_path", "hybrid_override_pattern", "linear_attention_type"),
            *("experimental_attention_variant", "mrope_section", "moe_latent_size", "activation_func_clamp_value"),
        )
    ),
    "softmax_type": "vanilla",
    "glu_linear_offset": 0.0,
}
_OF_EXPERTS = {
    "num": "num_experts",
    "per_token": "moe_router_topk",
    "ffn_hidden_size": "moe_ffn_hidden_size",
    "scores": "moe_router_score_function",
    "selection_bias": "moe_router_enable_expert_bias",
    "weight_scale": "moe_router_topk_scaling_factor",
    "num_groups": "moe_router_num_groups",
    "groups_per_token": "moe_router_group_topk",
    "shared_ffn_hidden_size": "moe_shared_expert_intermediate_size",
    "shared_gate": "moe_shared_expert_gate",
    "weighs_input": "moe_apply_probs_on_input",
}
_OTHERS = (
    *("group_query_attention", "num_query_groups", "use_rope_scaling", "rope_scaling_factor", "squared_relu"),
    *("rotary_seq_len_interpolation_factor", "openai_gelu", "bias_gelu_fusion", "add_qkv_bias", "no_rope_freq"),
    *("untie_embeddings_and_output_weights", "softmax_scale", "window_size", "window_attn_skip_freq"),
    *("moe_layer_freq", "moe_router_pre_softmax"),
)
# Python does not even show integers of more than 4,300 digits.
_LARGEST = 1 << 64
NAMES = frozenset(
    (
        *_REQUIRED,
        *_OTHERS,
        *_OF_EXPERTS.values(),
        *(each.name for each in _SETTINGS.values()),
        "expert_tensor_parallel_size",
    )
)
"""Arguments that say what the model is; all others are of training."""


def config_of(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a ``config.json`` of Megatron's arguments; raise ConfigError for a value that JSON does not have."""
    dtype = args.get("params_dtype", torch.float32)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{where}: the argument params_dtype is {shown(dtype)}; it must be a dtype of PyTorch")
    values = {name: args[name] for name in sorted(NAMES & args.keys())}
    for name, value in values.items():
        items = value if isinstance(value, list | tuple) else [value]
        if not all(each is None or type(each) in (bool, int, float, str) for each in items):
            raise ConfigError(f"{where}: the argument {name} is {shown(value)}; it must be a number, a text or None")
        if any(type(each) is int and abs(each) >= _LARGEST for each in items):
            raise ConfigError(
                f"{where}: the argument {name} has a number of more than 64 bits; no model has such a one"
            )
    return {"model_type": MEGATRON.model_type, "dtype": str(dtype).removeprefix("torch."), **values}


@dataclass(frozen=True, kw_only=True)
class _Megatron(Architecture):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        heads, num_layers = values["num_attention_heads"], values["num_layers"]
        grouped = fields.get(bool, "group_query_attention", default=False)
        kind = values["position_embedding_type"]
        if kind not in ("learned_absolute", "rope", "none"):
            raise fields.error("position_embedding_type", kind, "learned_absolute, rope or none")
        window = fields.values.get("window_size")
        is_window = isinstance(window, list | tuple) and len(window) == 2 and all(type(each) is int for each in window)
        if window is not None and not is_window:
            raise fields.error("window_size", window, "two integers, or null")
        skipped = _each(fields, "window_attn_skip_freq", num_layers)
        unrotated = _each(fields, "no_rope_freq", num_layers)
        is_tanh = fields.get(bool, "openai_gelu", default=False)
        if values["add_bias_linear"]:
            # The fused bias and GELU is the tanh form.
            is_tanh |= fields.get(bool, "bias_gelu_fusion", default=True)
        if values["gated_linear_unit"]:
            activation: Any = F.silu
        elif fields.get(bool, "squared_relu", default=False):
            activation = squared_relu
        else:
            activation = gelu_tanh if is_tanh else F.gelu
        return {
            "num_query_groups": fields.get(int, "num_query_groups", default=1) if grouped else heads,
            "activation_func": activation,
            "add_qkv_bias": fields.get(bool, "add_qkv_bias", default=False) or values["add_bias_linear"],
            "attention_bias": values["add_bias_linear"],
            "share_embeddings_and_output_weights": not fields.get(
                bool, "untie_embeddings_and_output_weights", default=False
            ),
            "softmax_scale": fields.optional(float, "softmax_scale"),
            "window_size": None if window is None else tuple(window),
            "windowed_layers": None if window is None or skipped is None else skipped,
            "rotary_layers": None if unrotated is None else tuple(not each for each in unrotated),
            "rope_scaling": _scaling(fields) if kind == "rope" else None,
            "experts": self._experts(fields, values),
        }

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        names = {F.silu: "swiglu", squared_relu: "squared_relu", gelu_tanh: "openai_gelu", F.gelu: ""}
        activation, scaling = model.activation_func, model.rope_scaling
        if names.get(activation, "swiglu") == "swiglu" and not (model.gated_linear_unit and activation is F.silu):
            raise ConfigError("its activation is not one of GELU, squared ReLU and SwiGLU")
        listed = {"window_attn_skip_freq": model.windowed_layers, "no_rope_freq": None}
        if model.rotary_layers is not None:
            listed["no_rope_freq"] = tuple(not each for each in model.rotary_layers)
        written = {
            "group_query_attention": model.num_query_groups != model.num_attention_heads,
            "num_query_groups": model.num_query_groups,
            "squared_relu": activation is squared_relu,
            "openai_gelu": activation is gelu_tanh,
            "bias_gelu_fusion": False,
            "add_qkv_bias": model.add_qkv_bias,
            "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
            "softmax_scale": model.softmax_scale,
            "window_size": None if model.window_size is None else list(model.window_size),
            "use_rope_scaling": scaling is not None and scaling.kind == "llama3",
            "rotary_seq_len_interpolation_factor": None,
            **{name: None if value is None else list(map(int, value)) for name, value in listed.items()},
        }
        if scaling is not None:
            is_llama = scaling.kind == "llama3"
            written["rope_scaling_factor" if is_llama else "rotary_seq_len_interpolation_factor"] = scaling.factor
        experts = model.experts
        if experts is not None:
            written |= {theirs: getattr(experts, ours) for ours, theirs in _OF_EXPERTS.items()}
            written["moe_router_pre_softmax"] = experts.scores == "softmax" and not experts.softmax_after_choice
            if experts.num_groups == 1:
                written |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
            written["moe_layer_freq"] = 1 if experts.layers is None else list(map(int, experts.layers))
        return written

    def _experts(self, fields: Fields, values: Mapping[str, Any]) -> Experts | None:
        if fields.values.get("num_experts") is None:
            return None
        own = {ours: fields.values[name] for ours, name in _OF_EXPERTS.items() if fields.values.get(name) is not None}
        given = {"per_token": 2, "ffn_hidden_size": values["ffn_hidden_size"], "scores": "softmax", **own}
        is_sigmoid = given["scores"] == "sigmoid"
        if given["scores"] not in ("softmax", "sigmoid"):
            raise fields.error("moe_router_score_function", given["scores"], "softmax or sigmoid")
        for name in ("num", "per_token", "ffn_hidden_size", "num_groups", "groups_per_token", "shared_ffn_hidden_size"):
            if type(given.get(name, 1)) is not int:
                raise fields.error(_OF_EXPERTS[name], given[name], "an integer")
        if "groups_per_token" not in given:
            given.pop("num_groups", None)
        fields.get(float, "moe_router_topk_scaling_factor", default=1.0)
        layers = _each(fields, "moe_layer_freq", values["num_layers"], first=0)
        return Experts(
            **given,
            layers=None if layers is None or all(layers) else layers,
            softmax_after_choice=not is_sigmoid and not fields.get(bool, "moe_router_pre_softmax", default=False),
            normalizes_weights=is_sigmoid,
        )


def _each(fields: Fields, name: str, num_layers: int, *, first: int | None = None) -> tuple[bool, ...] | None:
    """Return for each layer whether it is meant: a list of 1 and 0, or every n-th for an integer; None if not given.

    ``first`` is the first layer of those that an integer means; by default the n-th.
    """
    value = fields.values.get(name)
    if value is None:
        return None
    if isinstance(value, list | tuple):
        if len(value) != num_layers or any(each not in (0, 1) for each in value):
            raise fields.error(name, value, f"a number, or 1 or 0 for each of the {num_layers} layers")
        return tuple(map(bool, value))
    every = fields.get(int, name, within=(1, math.inf))
    if first is not None:
        return tuple(layer % every == first for layer in range(num_layers))
    return tuple(
        (layer + 1) % every != 0 if name == "window_attn_skip_freq" else (layer + 1) % every == 0
        for layer in range(num_layers)
    )


def _scaling(fields: Fields) -> RotaryScaling | None:
    if fields.get(bool, "use_rope_scaling", default=False):
        factor = fields.get(float, "rope_scaling_factor", default=8.0)
        # These three have no arguments in Megatron.
        return RotaryScaling(
            "llama3", factor, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0
        )
    divisor = fields.optional(float, "rotary_seq_len_interpolation_factor")
    return None if divisor is None else RotaryScaling("linear", divisor)


MEGATRON = _Megatron(
    model_type="megatron",
    classes=("GPTModel",),
    settings=_SETTINGS,
    fixed={},
    required=_REQUIRED,
    prefix="",
    table=_TABLE,
    tied={"output_layer.weight": "embedding.word_embeddings.weight"},
)
