"""Granite 3: Llama with factors on the embedding, the residual branches, the scores and the logits."""

from collections.abc import Mapping
from typing import Any

from shardwise.storage.huggingface.architectures.architecture import Setting
from shardwise.storage.huggingface.architectures.llama import LLAMA, Decoder
from shardwise.storage.huggingface.description import ModelDescription
from shardwise.storage.huggingface.fields import Fields


class _Granite(Decoder):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        scale = fields.get(float, "attention_multiplier", default=1.0)
        return {"softmax_scale": scale, **super().read_others(fields, values)}

    def write_others(self, model: ModelDescription) -> dict[str, Any]:
        scale = model.kv_channels**-0.5 if model.softmax_scale is None else model.softmax_scale
        return {"attention_multiplier": scale, **super().write_others(model)}


GRANITE = _Granite(
    model_type="granite",
    classes=("GraniteForCausalLM", "GraniteModel"),
    settings={
        **LLAMA.settings,
        "embedding_multiplier": Setting("embedding_multiplier", 1.0),
        "residual_multiplier": Setting("residual_multiplier", 1.0),
        "logits_scaling": Setting("logits_scaling", 1.0),
    },
)
