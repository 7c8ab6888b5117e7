"""Qwen 2, Llama with biases on query, key and value; and Qwen 3, Llama with norms of each head's query and key."""

from __future__ import annotations

from typing import Any

from shardwise.huggingface.architectures.architecture import Architecture
from shardwise.huggingface.architectures.llama import IGNORED, LLAMA, TABLE, read_decoder, write_decoder
from shardwise.huggingface.description import ModelDescription
from shardwise.huggingface.fields import Fields
from shardwise.huggingface.mapping import whole

_DEFAULTS = {
    "intermediate_size": 22016,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
}
_LAYER, _STORED = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."

QWEN3_TABLE = TABLE | {
    _LAYER + "q_layernorm.*": whole(_STORED + "q_norm.*"),
    _LAYER + "k_layernorm.*": whole(_STORED + "k_norm.*"),
}


def _read_window(fields: Fields) -> tuple[int, int] | None:
    """The sliding window, which all layers must have or none."""
    window = fields.optional_integer("sliding_window", 4096)
    if not fields.flag("use_sliding_window", default=False) or window is None:
        return None
    num_layers = fields.integer("num_hidden_layers", default=32)
    first = fields.integer("max_window_layers", default=28)
    kinds = fields.values.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if all(kind == "full_attention" for kind in kinds):
        return None
    if any(kind != "sliding_attention" for kind in kinds):
        name = "layer_types" if fields.values.get("layer_types") else "max_window_layers"
        raise fields.error(
            name, fields.values.get(name, first), "such that all layers have the sliding window, or none has it"
        )
    return (window - 1, 0)


def _write_window(model: ModelDescription) -> dict[str, Any]:
    if model.window_size is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": model.window_size[0] + 1,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * model.num_layers,
    }


def _read_qwen2(fields: Fields) -> ModelDescription:
    return ModelDescription(qkv_bias=True, window_size=_read_window(fields), **read_decoder(fields, defaults=_DEFAULTS))


def _write_qwen2(model: ModelDescription) -> dict[str, Any]:
    return write_decoder(model) | _write_window(model)


def _read_qwen3(fields: Fields) -> ModelDescription:
    attention_bias = fields.flag("attention_bias", default=False)
    return ModelDescription(
        attention_bias=attention_bias,
        qkv_bias=attention_bias,
        qk_layernorm=True,
        window_size=_read_window(fields),
        **read_decoder(fields, defaults=_DEFAULTS, head_dim=128),
    )


def _write_qwen3(model: ModelDescription) -> dict[str, Any]:
    return write_decoder(model) | {"attention_bias": model.attention_bias} | _write_window(model)


QWEN2 = Architecture(
    model_type="qwen2",
    classes=("Qwen2ForCausalLM", "Qwen2Model"),
    prefix="model.",
    table=TABLE,
    tied=LLAMA.tied,
    read=_read_qwen2,
    write=_write_qwen2,
    class_of=lambda model: "Qwen2ForCausalLM",
    ignored=IGNORED,
)

QWEN3 = Architecture(
    model_type="qwen3",
    classes=("Qwen3ForCausalLM", "Qwen3Model"),
    prefix="model.",
    table=QWEN3_TABLE,
    tied=LLAMA.tied,
    read=_read_qwen3,
    write=_write_qwen3,
    class_of=lambda model: "Qwen3ForCausalLM",
    ignored=IGNORED,
)
