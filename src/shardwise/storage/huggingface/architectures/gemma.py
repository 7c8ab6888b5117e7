"""Gemma 2 and the text model of Gemma 3: norms before and after attention and MLP, windows, soft caps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.models.config import ModelConfig
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
