"""Gemma 2 and the text models of Gemma 3 and 4: norms before and after attention and MLP, windows, soft caps.

Of Gemma 4 the dense model is here. Models with embeddings of each layer, with keys and values that layers share, and
with experts next to the MLP are left to transformers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.heads import GlobalHeads
from shardwise.storage.huggingface.architectures.architecture import ActivationSetting, Setting
from shardwise.storage.huggingface.architectures.llama import (
    LLAMA,
    POST_NORMS,
    QK_NORMS,
    TABLE,
    Windowed,
    decoder_settings,
)
from shardwise.storage.huggingface.fields import Fields, read_rope_by_kind, rope_json_by_kind
from shardwise.storage.huggingface.mapping import whole


@dataclass(frozen=True, kw_only=True)
class _Gemma(Windowed):
    """Scores are divided by the square root of ``query_pre_attn_scalar``, and embeddings multiplied by ``sqrt(h)``.

    Attributes:
        caps: default soft caps of logits and of scores.
    """

    caps: tuple[float | None, float | None] = (None, None)

    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        scalar = fields.get(float, "query_pre_attn_scalar", default=256.0, within=(1, 1 << 30))
        caps = {
            "final_logit_softcap": fields.optional(float, "final_logit_softcapping", self.caps[0]),
            "attention_logit_softcap": fields.optional(float, "attn_logit_softcapping", self.caps[1]),
        }
        return {
            "softmax_scale": scalar**-0.5,
            "embedding_multiplier": math.sqrt(values["hidden_size"]),
            **caps,
            **super().read_others(fields, values),
        }

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        scalar = model.heads.width if model.softmax_scale is None else model.softmax_scale**-2
        if not math.isclose(scalar, round(scalar), rel_tol=1e-9):
            raise ConfigError(
                f"{self.model_type} has no softmax_scale of {model.softmax_scale}; n ** -0.5 for an integer"
            )
        return {
            "query_pre_attn_scalar": round(scalar),
            "final_logit_softcapping": model.final_logit_softcap,
            "attn_logit_softcapping": model.attention_logit_softcap,
            **super().write_others(model),
        }


class _Gemma3(_Gemma):
    """Layers with a window have another rotary base, which files store in one of two forms."""

    def every(self, fields: Fields) -> int | None:
        return fields.get(int, "sliding_window_pattern", "_sliding_window_pattern", default=6, within=(1, 1 << 16))

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        base = fields.get(float, "rope_local_base_freq", default=10000.0)
        return read_rope_by_kind(fields, longest, theta=1e6, window_theta=base)

    def write_positions(self, model: ModelConfig) -> dict[str, Any]:
        written = rope_json_by_kind(model)
        return {"rope_local_base_freq": written["rope_parameters"]["sliding_attention"]["rope_theta"], **written}


class _Gemma4(Windowed):
    """Layers without a window have other heads, and scores are not divided."""

    def needs_transformers(self, fields: Fields) -> bool:
        usual = {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0, "enable_moe_block": False}
        return any(fields.values.get(name, default) for name, default in usual.items())

    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        if (width := fields.get(int, "hidden_size_per_layer_input", default=256)) != 0:
            raise fields.error("hidden_size_per_layer_input", width, "0: embeddings of each layer are not supported")
        if fields.optional(int, "sliding_window", self.window) is None:
            raise fields.error("sliding_window", None, "an integer")
        read = super().read_others(fields, values)
        layers = read["windowed_layers"] or (read["window_size"] is not None,) * values["num_layers"]
        if layers[-1]:
            raise fields.error("layer_types", fields.values.get("layer_types"), "full_attention in the last layer")
        heads = self._global_heads(fields, (read["num_query_groups"], read["kv_channels"]), layers)
        if values["num_attention_heads"] % heads.groups:
            expected = f"a divisor of num_attention_heads, {values['num_attention_heads']}"
            raise fields.error("num_global_key_value_heads", heads.groups, expected)
        return {
            "softmax_scale": 1.0,
            "embedding_multiplier": math.sqrt(values["hidden_size"]),
            "final_logit_softcap": fields.optional(float, "final_logit_softcapping"),
            "global_heads": heads,
            **read,
        }

    def _global_heads(self, fields: Fields, usual: tuple[int, int], layers: Sequence[bool]) -> GlobalHeads:
        """Return the heads of layers without a window, from a number for all or, in new files, a list of layers."""
        is_shared, listed = fields.get(bool, "attention_k_eq_v", default=False), fields.values.get("per_layer_config")
        if listed is None:
            groups = fields.optional(int, "num_global_key_value_heads") if is_shared else None
            width = fields.get(int, "global_head_dim", default=512)
            return GlobalHeads(usual[0] if groups is None else groups, width, is_shared)
        names = ("num_key_value_heads", "head_dim")
        others: Mapping[str, Any] = listed if isinstance(listed, Mapping) else {"": None}
        # transformers pads the numbers of layers with zeros.
        own = {int(number): each for number, each in others.items() if number.isdecimal()}
        wrong = own.keys() - range(len(layers)) or any(
            not isinstance(each, Mapping) or not set(each) <= set(names) for each in others.values()
        )
        same = dict(zip(names, usual, strict=True))
        of_layers = [] if wrong else [{**same, **own.get(number, {})} for number in range(len(layers))]
        if wrong or of_layers != [same if windowed else of_layers[-1] for windowed in layers]:
            expected = f"{' and '.join(names)}, the same in all layers of full_attention, and in no others"
            raise fields.error("per_layer_config", listed, expected)
        last = Fields(of_layers[-1], f"{fields.where}: per_layer_config")
        groups, width = (last.get(int, name, within=(1, 1 << 30)) for name in names)
        return GlobalHeads(groups, width, is_shared)

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        if model.softmax_scale != 1.0:
            raise ConfigError(f"{self.model_type} has no softmax_scale of {model.softmax_scale}; only 1.0")
        written = super().write_others(model)
        _, groups, width = model.heads_of(model.num_layers)
        own = {"num_key_value_heads": groups, "head_dim": width}
        return written | {
            "sliding_window": written["sliding_window"] or self.window,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": model.final_logit_softcap,
            "attention_k_eq_v": model.keys_are_values(model.num_layers),
            # Readers before transformers 5.23 know the first two.
            "global_head_dim": width,
            "num_global_key_value_heads": groups,
            "per_layer_config": {
                str(at): own for at in range(model.num_layers) if written["layer_types"][at] == "full_attention"
            },
        }

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        if scaling := fields.values.get("rope_scaling"):
            # transformers makes no model of it.
            raise fields.error("rope_scaling", scaling, "left out; scale rope_parameters.full_attention")
        given = {"rope_parameters": fields.values.get("rope_parameters") or _GEMMA4_POSITIONS}
        return read_rope_by_kind(Fields(given, fields.where), longest, theta=1e6, window_theta=None)

    def write_positions(self, model: ModelConfig) -> dict[str, Any]:
        return {"rope_parameters": rope_json_by_kind(model)["rope_parameters"]}


_GEMMA4_POSITIONS = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_SETTINGS = {
    **decoder_settings(
        vocab_size=256000,
        hidden_size=2304,
        ffn_hidden_size=9216,
        num_layers=26,
        num_attention_heads=8,
        max_sequence_length=8192,
        share_embeddings_and_output_weights=True,
    ),
    "activation_func": ActivationSetting("hidden_activation", "gelu_pytorch_tanh"),
    "attention_bias": Setting("attention_bias", False),
}
_FIXED = {**LLAMA.fixed, "norm_position": "sandwich", "layernorm_zero_centered_gamma": True}
_PRE_MLP_NORM = whole("model.layers.{layer}.pre_feedforward_layernorm.*")
_TABLE = TABLE | POST_NORMS | {"decoder.layers.{layer}.pre_mlp_layernorm.*": _PRE_MLP_NORM}

GEMMA2 = _Gemma(
    model_type="gemma2",
    classes=("Gemma2ForCausalLM", "Gemma2Model"),
    settings=_SETTINGS,
    fixed=_FIXED,
    table=_TABLE,
    num_key_value_heads=4,
    head_dim=256,
    caps=(30.0, 50.0),
    full_every=2,
)

GEMMA3 = _Gemma3(
    model_type="gemma3_text",
    classes=("Gemma3ForCausalLM", "Gemma3TextModel"),
    settings=_SETTINGS
    | {"vocab_size": Setting("vocab_size", 262208), "max_sequence_length": Setting("max_position_embeddings", 131072)},
    fixed={**_FIXED, "qk_layernorm": True},
    # For Gemma 3, transformers caps output logits but ignores this field, the cap of attention scores.
    required={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    table=_TABLE | QK_NORMS,
    num_key_value_heads=4,
    head_dim=256,
)

GEMMA4 = _Gemma4(
    model_type="gemma4_text",
    classes=("Gemma4ForCausalLM", "Gemma4TextModel"),
    settings={
        **GEMMA3.settings,
        "vocab_size": Setting("vocab_size", 262144),
        "num_layers": Setting("num_hidden_layers", 30),
    },
    fixed={
        **LLAMA.fixed,
        "norm_position": "sandwich",
        "qk_layernorm": True,
        "value_layernorm": True,
        "layer_scalar": True,
    },
    required={"use_bidirectional_attention": None, "num_kv_shared_layers": 0, "enable_moe_block": False},
    table={**GEMMA3.table, "decoder.layers.{layer}.layer_scalar": whole("model.layers.{layer}.layer_scalar")},
    num_key_value_heads=4,
    head_dim=256,
    window=512,
    full_every=6,
)
