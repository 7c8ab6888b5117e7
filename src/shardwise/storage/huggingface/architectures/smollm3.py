"""SmolLM 3: Llama of which some layers rotate nothing, and some have a window."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.storage.huggingface.architectures.architecture import Setting
from shardwise.storage.huggingface.architectures.classifier import classifiers
from shardwise.storage.huggingface.architectures.llama import (
    LLAMA,
    Decoder,
    decoder_settings,
    layer_types,
    read_layer_types,
)
from shardwise.storage.huggingface.description import ModelDescription
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.rope import read_rope

_THETA = 2000000.0


class _SmolLM3(Decoder):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        rotated = _rotated(fields, values["num_layers"])
        return {"rotary_layers": None if all(rotated) else rotated, **super().read_others(fields, values)}

    def write_others(self, model: ModelDescription) -> dict[str, Any]:
        rotated = model.rotary_layers or (True,) * model.num_layers
        return {
            "no_rope_layers": [int(each) for each in rotated],
            # The default is an id that smaller vocabularies lack.
            "pad_token_id": None,
            **super().write_others(model),
        }

    def read_window(self, fields: Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
        window = fields.optional(int, "sliding_window")
        if not fields.get(bool, "use_sliding_window", default=False):
            return None, None
        return read_layer_types(fields, window, [not each for each in _rotated(fields, num_layers)])

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": layer_types(layers),
        }

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        return read_rope(fields, longest, theta=_THETA)


def _rotated(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers rotate: despite its name, a 1 in ``no_rope_layers`` is a layer that does."""
    given = fields.values.get("no_rope_layers")
    if given is None:
        every = fields.get(int, "no_rope_layer_interval", default=4, within=(1, 1 << 16))
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if not isinstance(given, list) or len(given) < num_layers or any(each not in (0, 1) for each in given):
        raise fields.error("no_rope_layers", given, f"0 or 1 for each of {num_layers} layers")
    return tuple(map(bool, given[:num_layers]))


SMOLLM3 = _SmolLM3(
    model_type="smollm3",
    classes=("SmolLM3ForCausalLM", "SmolLM3Model"),
    classifiers=classifiers("SmolLM3"),
    settings={
        **LLAMA.settings,
        **decoder_settings(intermediate_size=11008, vocab_size=128256, max_position_embeddings=32768),
        "hidden_size": Setting("hidden_size", 2048),
        "num_layers": Setting("num_hidden_layers", 36),
        "num_attention_heads": Setting("num_attention_heads", 16),
        "share_embeddings_and_output_weights": Setting("tie_word_embeddings", True),
    },
    num_key_value_heads=4,
)
