"""Ministral, a Mistral that lists the layers with a window, and Ministral 3: YaRN, and queries scaled by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.storage.huggingface.architectures.llama import MISTRAL, Mistral, Windowed, decoder_settings
from shardwise.storage.huggingface.fields import Fields, read_rope, rope_json

_BETA = "llama_4_scaling_beta"

# Rotary positions of files that do not state any.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


class _Ministral3(Mistral):
    default_window = None

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
        if fields.values.get(name) is None:
            fields = Fields({**fields.values, name: _YARN}, fields.where)
        positions = read_rope(fields, longest)
        rope, scaling = Fields(fields.values[name], f"{fields.where}: {name}"), positions["rope_scaling"]
        if scaling is None or scaling.kind != "yarn":
            raise rope.error("rope_type", "default" if scaling is None else scaling.kind, "yarn")
        return {**positions, "rope_scaling": replace(scaling, llama_4_scaling_beta=rope.get(float, _BETA))}

    def write_positions(self, model: ModelConfig) -> dict[str, Any]:
        written, scaling = rope_json(model), model.rope_scaling
        if scaling is None:
            raise ConfigError(f"{self.model_type} models have YaRN's rotary scaling, and this one has none")
        beta = {_BETA: scaling.llama_4_scaling_beta}
        return written | {name: written[name] | beta for name in ("rope_scaling", "rope_parameters")}


MINISTRAL = Windowed(
    model_type="ministral",
    classes=("MinistralForCausalLM", "MinistralModel"),
    settings=MISTRAL.settings,
    num_key_value_heads=8,
)

MINISTRAL3 = _Ministral3(
    model_type="ministral3",
    classes=("Ministral3ForCausalLM", "Ministral3Model"),
    settings=decoder_settings(
        vocab_size=131072, ffn_hidden_size=14336, num_layers=34, max_sequence_length=262144, layernorm_epsilon=1e-5
    ),
    num_key_value_heads=8,
    head_dim=128,
)
