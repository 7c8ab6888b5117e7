"""GPT-OSS: experts with biases and a clamped gate, attention sinks, windows in every other layer, YaRN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.models.config import ModelConfig
from shardwise.models.experts import ClampedGate, Experts
from shardwise.storage.huggingface.architectures.architecture import Setting
from shardwise.storage.huggingface.architectures.llama import LLAMA, TABLE, Windowed, decoder_settings
from shardwise.storage.huggingface.architectures.mixtures import WithExperts, tied_of
from shardwise.storage.huggingface.fields import Fields, read_rope
from shardwise.storage.huggingface.mapping import Table, joint_experts, whole

# Rotary positions of files that do not state any.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class _Decoder(Windowed):
    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        if fields.values.get("rope_parameters") is None and not fields.values.get("rope_scaling"):
            fields = Fields({**fields.values, "rope_parameters": _YARN}, fields.where)
        return read_rope(fields, longest, theta=150000.0)


class _GptOss(WithExperts):
    @property
    def fused(self) -> Table:
        return {}

    def read_experts(self, fields: Fields, num_layers: int) -> Experts:
        usual = ClampedGate()
        return replace(
            super().read_experts(fields, num_layers),
            softmax_after_choice=True,
            normalizes_weights=False,
            biases=True,
            gate=ClampedGate(
                limit=fields.get(float, "swiglu_limit", default=usual.limit),
                alpha=fields.get(float, "swiglu_alpha", default=usual.alpha),
            ),
        )

    def write_experts(self, experts: Experts, model: ModelConfig) -> dict[str, Any]:
        gate = experts.gate or ClampedGate()
        return {**super().write_experts(experts, model), "swiglu_limit": gate.limit, "swiglu_alpha": gate.alpha}


_LAYER, _STORED = "decoder.layers.{layer}.", "model.layers.{layer}."
_EXPERTS = _STORED + "mlp.experts."
_DECODER = _Decoder(
    model_type="gpt_oss", classes=(), settings={}, num_key_value_heads=8, head_dim=64, window=128, full_every=2
)
GPT_OSS = _GptOss(
    **tied_of(_DECODER) | {"fixed": {**LLAMA.fixed, "attention_sinks": True}},
    model_type="gpt_oss",
    classes=("GptOssForCausalLM", "GptOssModel"),
    settings={
        **decoder_settings(
            vocab_size=201088,
            hidden_size=2880,
            ffn_hidden_size=2880,
            num_layers=36,
            num_attention_heads=64,
            max_sequence_length=131072,
            layernorm_epsilon=1e-5,
        ),
        "attention_bias": Setting("attention_bias", True),
    },
    table={
        **TABLE,
        _LAYER + "self_attention.sinks.logits": whole(_STORED + "self_attn.sinks"),
        _LAYER + "mlp.router.*": whole(_STORED + "mlp.router.*"),
        _LAYER + "mlp.experts.up": joint_experts(_EXPERTS + "gate_up_proj", sections=2, transposed=True),
        _LAYER + "mlp.experts.up_bias": joint_experts(_EXPERTS + "gate_up_proj_bias", sections=2),
        # The rows are those of the parameter, which is transposed.
        _LAYER + "mlp.experts.down": joint_experts(_EXPERTS + "down_proj"),
        _LAYER + "mlp.experts.down_bias": joint_experts(_EXPERTS + "down_proj_bias"),
    },
    decoder=_DECODER,
    names=("num_local_experts", "num_experts"),
    num=128,
    width=("intermediate_size", 2880),
    per_token=4,
    quantizations=("mxfp4",),
    parameters={
        _LAYER + "mlp.router.weight": _STORED + "mlp.router.weight",
        _LAYER + "mlp.experts.up": _EXPERTS + "gate_up_proj",
        _LAYER + "mlp.experts.down": _EXPERTS + "down_proj",
    },
)
