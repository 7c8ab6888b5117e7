"""Qwen 2, Llama with biases on query, key and value; and Qwen 3, Llama with norms of each head's query and key."""

from collections.abc import Sequence
from typing import Any

from shardwise.storage.huggingface.architectures.architecture import Setting
from shardwise.storage.huggingface.architectures.classifier import classifiers
from shardwise.storage.huggingface.architectures.llama import (
    LLAMA,
    TABLE,
    Decoder,
    decoder_settings,
    layer_types,
    read_layer_types,
)
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.mapping import whole

_SETTINGS = decoder_settings(intermediate_size=22016, vocab_size=151936, max_position_embeddings=32768)
_LAYER, _STORED = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."


class _Qwen(Decoder):
    def read_window(self, fields: Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
        window = fields.optional(int, "sliding_window", 4096)
        if not fields.get(bool, "use_sliding_window", default=False):
            return None, None
        first = fields.get(int, "max_window_layers", default=28)
        return read_layer_types(fields, window, [layer >= first for layer in range(num_layers)])

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        if window is None:
            return {"use_sliding_window": False, "sliding_window": None}
        first = next(index for index, windowed in enumerate(layers) if windowed)
        return {
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": first,
            "layer_types": layer_types(layers),
        }


QWEN2 = _Qwen(
    model_type="qwen2",
    classes=("Qwen2ForCausalLM", "Qwen2Model"),
    classifiers=classifiers("Qwen2"),
    settings=_SETTINGS,
    fixed={**LLAMA.fixed, "qkv_bias": True},
    num_key_value_heads=32,
)

QWEN3 = _Qwen(
    model_type="qwen3",
    classes=("Qwen3ForCausalLM", "Qwen3Model"),
    classifiers=classifiers("Qwen3"),
    settings=_SETTINGS | {"attention_bias": Setting("attention_bias", False)},
    fixed={**LLAMA.fixed, "qk_layernorm": True},
    table=TABLE
    | {
        _LAYER + "q_layernorm.*": whole(_STORED + "q_norm.*"),
        _LAYER + "k_layernorm.*": whole(_STORED + "k_norm.*"),
    },
    num_key_value_heads=32,
    head_dim=128,
)
