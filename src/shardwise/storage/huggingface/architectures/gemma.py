"""Gemma 2 and the text model of Gemma 3: norms before and after attention and MLP, windows, soft caps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.core.json_text import shown
from shardwise.models.config import ModelConfig
from shardwise.storage.huggingface.architectures.architecture import ActivationSetting, Setting
from shardwise.storage.huggingface.architectures.llama import (
    LLAMA,
    POST_NORMS,
    QK_NORMS,
    TABLE,
    Decoder,
    Window,
    decoder_settings,
    layer_types,
    read_layer_types,
)
from shardwise.storage.huggingface.fields import Fields, read_rope, rope_json
from shardwise.storage.huggingface.mapping import whole


@dataclass(frozen=True, kw_only=True)
class _Gemma(Decoder):
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

    def read_window(self, fields: Fields, num_layers: int) -> Window:
        window = fields.optional(int, "sliding_window", 4096)
        every = self.full_every(fields)
        return read_layer_types(fields, window, [(layer + 1) % every != 0 for layer in range(num_layers)])

    def full_every(self, fields: Fields) -> int:
        """Return n if every n-th layer has no window, for files without ``layer_types``."""
        return 2

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        return {"sliding_window": window, "layer_types": layer_types(layers)}


class _Gemma3(_Gemma):
    """Layers with a window have another rotary base, which files store in one of two forms."""

    def full_every(self, fields: Fields) -> int:
        return fields.get(int, "sliding_window_pattern", "_sliding_window_pattern", default=6, within=(1, 1 << 16))

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        nested, scaling = (fields.values.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
        if not isinstance(nested, Mapping) or not all(isinstance(each, Mapping | None) for each in nested.values()):
            raise fields.error("rope_parameters", nested, "an object for each kind of layer")
        if not isinstance(scaling, Mapping):
            raise fields.error("rope_scaling", scaling, "an object, or null")
        full, local = (nested.get(name) or {} for name in ("full_attention", "sliding_attention"))
        # transformers adds ``rope_scaling`` to the values of layers without a window.
        own = {**(full if nested else {"rope_type": "default"}), **scaling}
        kind = own.get("rope_type") or own.get("type") or "default"
        if "rope_type" not in scaling and scaling.get("type") not in (None, kind):
            raise ConfigError(
                f"{fields.where}: rope_scaling has type {shown(scaling['type'])} and no rope_type, which transformers "
                f"5 reads as {shown(kind)}; name it rope_type, or leave it out"
            )
        if kind != "default":
            fields.require("partial_rotary_factor", 1.0)
            # transformers does not read it.
            Fields(own, f"{fields.where}: rope_parameters.full_attention").require("truncate", True)
        others = Fields(local, f"{fields.where}: rope_parameters.sliding_attention")
        for name in ("rope_type", "type") if local.get("rope_type") is None else ("rope_type",):
            if local.get(name) is not None:
                others.require(name, "default")
        own = {"rope_theta": fields.get(float, "rope_theta", default=1e6), **own}
        base = fields.get(float, "rope_local_base_freq", default=10000.0)
        return {
            **read_rope(Fields({"rope_parameters": own}, fields.where), longest),
            "window_rotary_base": others.get(float, "rope_theta", default=base),
        }

    def write_positions(self, model: ModelConfig) -> dict[str, Any]:
        written = rope_json(model)
        # If all layers have the same base, the file has it twice.
        local = model.rotary_base if model.window_rotary_base is None else model.window_rotary_base
        return {
            "rope_theta": written["rope_theta"],
            "rope_local_base_freq": local,
            "rope_scaling": written["rope_scaling"],
            "rope_parameters": {
                "full_attention": written["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
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
