"""DeepSeek V2 and V3: latent attention, and experts after dense layers.

V2 chooses experts by a softmax, V3 in groups by sigmoids with a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.models.experts import Experts
from shardwise.models.transformer.heads import LatentAttention
from shardwise.storage.huggingface.architectures.architecture import Setting
from shardwise.storage.huggingface.architectures.llama import TABLE, Decoder, decoder_settings
from shardwise.storage.huggingface.architectures.mixtures import (
    EXPERTS_AND_SHARED,
    MODULE_TARGETS,
    SELECTION_BIAS,
    AfterDenseLayers,
    tied_of,
)
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.mapping import whole

_ATTENTION = "decoder.layers.{layer}.self_attention."
_STORED = "model.layers.{layer}.self_attn."
_TABLE = {
    **{name: source for name, source in TABLE.items() if not name.startswith(_ATTENTION + "linear_qkv")},
    _ATTENTION + "linear_q_proj.*": whole(_STORED + "q_proj.*"),
    _ATTENTION + "linear_q_down_proj.*": whole(_STORED + "q_a_proj.*"),
    _ATTENTION + "q_layernorm.*": whole(_STORED + "q_a_layernorm.*"),
    _ATTENTION + "linear_q_up_proj.*": whole(_STORED + "q_b_proj.*"),
    _ATTENTION + "linear_kv_down_proj.*": whole(_STORED + "kv_a_proj_with_mqa.*"),
    _ATTENTION + "kv_layernorm.*": whole(_STORED + "kv_a_layernorm.*"),
    _ATTENTION + "linear_kv_up_proj.*": whole(_STORED + "kv_b_proj.*"),
    **EXPERTS_AND_SHARED,
}
_WIDTHS = {
    "key_value_rank": ("kv_lora_rank", 512),
    "plain_width": ("qk_nope_head_dim", 128),
    "rotary_width": ("qk_rope_head_dim", 64),
    "value_width": ("v_head_dim", 128),
}
"""By field of ``LatentAttention``, that of ``config.json`` and its default."""


@dataclass(frozen=True, kw_only=True)
class _Latent(Decoder):
    """A decoder with latent attention; ``rope_interleave`` says which elements are pairs if it ``chooses_pairs``."""

    chooses_pairs: bool = False

    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        heads = values["num_attention_heads"]
        groups = fields.optional(int, "num_key_value_heads", self.num_key_value_heads) or heads
        if groups != heads:
            raise fields.error("num_key_value_heads", groups, f"num_attention_heads, {heads}")
        widths = {
            name: fields.get(int, theirs, default=usual, within=(1, 1 << 30))
            for name, (theirs, usual) in _WIDTHS.items()
        }
        latent = LatentAttention(**widths, query_rank=fields.optional(int, "q_lora_rank", 1536))
        positions = self.read_positions(fields, values["max_sequence_length"])
        scaling = positions["rope_scaling"]
        factor = 1.0 if scaling is None else scaling.score_factor
        pairs = fields.optional(bool, "rope_interleave", default=True) if self.chooses_pairs else True
        return {
            "latent": latent,
            "num_query_groups": heads,
            "kv_channels": latent.head_width,
            "softmax_scale": None if factor == 1.0 else latent.head_width**-0.5 * factor,
            # Null is false.
            "rotary_interleaved": bool(pairs),
            "add_qkv_bias": values["attention_bias"],
            **positions,
        }

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        latent = model.latent
        if latent is None:
            raise ConfigError(f"{self.model_type} models have latent attention, and this one has none")
        return {
            "num_key_value_heads": model.num_query_groups,
            **{theirs: getattr(latent, name) for name, (theirs, _) in _WIDTHS.items()},
            "q_lora_rank": latent.query_rank,
            **({"rope_interleave": model.rotary_interleaved} if self.chooses_pairs else {}),
            **self.write_positions(model),
        }

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        positions = super().read_positions(fields, longest)
        scaling = positions["rope_scaling"]
        rope = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
        if scaling is not None and scaling.kind != "yarn" and (found := rope.get("mscale_all_dim")):
            raise fields.error("mscale_all_dim", found, f"null with rotary scaling of type {scaling.kind!r}")
        return positions


class _DeepseekV2(AfterDenseLayers):
    def read_choice(self, fields: Fields) -> dict[str, Any]:
        method = fields.get(str, "topk_method", default="greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise fields.error("topk_method", method, "greedy or group_limited_greedy")
        groups = {}
        if method != "greedy":
            groups = {"num_groups": fields.get(int, "n_group"), "groups_per_token": fields.get(int, "topk_group")}
        return {"normalizes_weights": False, **groups}

    def write_experts(self, experts: Experts, model: ModelConfig) -> dict[str, Any]:
        method = "greedy" if experts.num_groups == 1 else "group_limited_greedy"
        return {**super().write_experts(experts, model), "topk_method": method}


_V2_SETTINGS = {**decoder_settings(vocab_size=102400), "attention_bias": Setting("attention_bias", False)}
_V2 = _Latent(model_type="deepseek_v2", classes=(), settings=_V2_SETTINGS)
DEEPSEEK_V2 = _DeepseekV2(
    **tied_of(_V2),
    model_type="deepseek_v2",
    classes=("DeepseekV2ForCausalLM", "DeepseekV2Model"),
    settings=_V2_SETTINGS,
    # transformers ignores the last three; DeepSeek's own code does not.
    required={"mlp_bias": False, "norm_topk_prob": False, "moe_layer_freq": 1, "scoring_func": "softmax"},
    table=_TABLE,
    decoder=_V2,
    names=("n_routed_experts", "num_experts"),
    num=64,
    width=("moe_intermediate_size", 1407),
    module_targets=MODULE_TARGETS,
    per_token=None,
    num_dense=0,
    num_shared=2,
)
_V3_SETTINGS = {
    **decoder_settings(
        vocab_size=129280,
        hidden_size=7168,
        num_layers=61,
        num_attention_heads=128,
        ffn_hidden_size=18432,
        max_sequence_length=4096,
    ),
    "attention_bias": Setting("attention_bias", False),
}
_V3 = _Latent(model_type="deepseek_v3", classes=(), settings=_V3_SETTINGS, num_key_value_heads=128, chooses_pairs=True)
DEEPSEEK_V3 = AfterDenseLayers(
    **tied_of(_V3),
    has_mtp=True,
    model_type="deepseek_v3",
    classes=("DeepseekV3ForCausalLM", "DeepseekV3Model"),
    settings=_V3_SETTINGS,
    # transformers ignores these; DeepSeek's own code does not.
    required={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    table={**_TABLE, **SELECTION_BIAS},
    decoder=_V3,
    names=("n_routed_experts", "num_local_experts"),
    num=256,
    width=("moe_intermediate_size", 2048),
    module_targets=MODULE_TARGETS,
    per_token=8,
    num_dense=3,
    scale=2.5,
    groups=(8, 4),
)
