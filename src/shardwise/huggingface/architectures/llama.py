"""Llama 3 and Mistral, and what Qwen shares with them: rotary positions, RMSNorm, SwiGLU, grouped queries."""

from __future__ import annotations

from typing import Any

from shardwise.huggingface.architectures.architecture import Architecture, activation_json
from shardwise.huggingface.description import ModelDescription
from shardwise.huggingface.fields import Fields
from shardwise.huggingface.mapping import separate_qkv, stacked, whole
from shardwise.huggingface.rope import read_rope, rope_json

_LAYER = "decoder.layers.{layer}."
_STORED = "model.layers.{layer}."

TABLE = {
    "embedding.word_embeddings.*": whole("model.embed_tokens.*"),
    _LAYER + "input_layernorm.*": whole(_STORED + "input_layernorm.*"),
    _LAYER + "self_attention.linear_qkv.*": separate_qkv(
        _STORED + "self_attn.q_proj.*", _STORED + "self_attn.k_proj.*", _STORED + "self_attn.v_proj.*"
    ),
    _LAYER + "self_attention.linear_proj.*": whole(_STORED + "self_attn.o_proj.*"),
    _LAYER + "pre_mlp_layernorm.*": whole(_STORED + "post_attention_layernorm.*"),
    _LAYER + "mlp.linear_fc1.*": stacked(_STORED + "mlp.gate_proj.*", _STORED + "mlp.up_proj.*"),
    _LAYER + "mlp.linear_fc2.*": whole(_STORED + "mlp.down_proj.*"),
    "decoder.final_layernorm.*": whole("model.norm.*"),
    "output_layer.*": whole("lm_head.*"),
}

# Old files keep the rotary frequencies.
IGNORED = (r"rotary_emb\.inv_freq",)


def read_decoder(fields: Fields, *, defaults: dict[str, Any], head_dim: int | None = None) -> dict[str, Any]:
    """The fields of a description that the four have in common.

    Args:
        fields: of the ``config.json``.
        defaults: of the sizes that it may lack.
        head_dim: likewise; ``hidden_size / num_attention_heads`` if None.

    Raises:
        ConfigError: a value out of range.
    """
    hidden = fields.integer("hidden_size", default=4096)
    heads = fields.integer("num_attention_heads", default=32)
    given = fields.optional_integer("head_dim", head_dim)
    if given is None and (heads < 1 or hidden % heads != 0):
        raise fields.error("num_attention_heads", heads, f"a divisor of hidden_size, {hidden}, or head_dim be given")
    groups = fields.optional_integer("num_key_value_heads", defaults.get("num_key_value_heads")) or heads
    if groups < 1 or heads % groups != 0:
        raise fields.error("num_key_value_heads", groups, f"a divisor of num_attention_heads, {heads}")
    return {
        "num_layers": fields.integer("num_hidden_layers", default=32),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": given or hidden // heads,
        "ffn_hidden_size": fields.integer("intermediate_size", default=defaults["intermediate_size"]),
        "vocab_size": fields.integer("vocab_size", default=defaults["vocab_size"]),
        "max_sequence_length": fields.integer("max_position_embeddings", default=defaults["max_position_embeddings"]),
        "activation": fields.activation("hidden_act", default="silu"),
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": fields.number("rms_norm_eps", default=1e-6),
        "share_embeddings_and_output_weights": fields.flag("tie_word_embeddings", default=False),
        "attention_dropout": fields.number("attention_dropout", default=0.0),
        "init_method_std": fields.number("initializer_range", default=0.02),
        **read_rope(fields, max_position_embeddings=defaults["max_position_embeddings"]),
    }


def write_decoder(model: ModelDescription) -> dict[str, Any]:
    """The fields of ``config.json`` that the four have in common."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "hidden_act": activation_json(model, prefer="silu"),
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": model.layernorm_epsilon,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        **rope_json(model),
    }


def _read_llama(fields: Fields) -> ModelDescription:
    defaults = {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048}
    attention_bias = fields.flag("attention_bias", default=False)
    return ModelDescription(
        attention_bias=attention_bias,
        qkv_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
        **read_decoder(fields, defaults=defaults),
    )


def _write_llama(model: ModelDescription) -> dict[str, Any]:
    return write_decoder(model) | {"attention_bias": model.attention_bias, "mlp_bias": model.mlp_bias}


def _read_mistral(fields: Fields) -> ModelDescription:
    defaults = {
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
    }
    window = fields.optional_integer("sliding_window", 4096)
    return ModelDescription(window_size=_window(window), **read_decoder(fields, defaults=defaults))


def _write_mistral(model: ModelDescription) -> dict[str, Any]:
    return write_decoder(model) | {"sliding_window": _window_json(model)}


def _window(tokens: int | None) -> tuple[int, int] | None:
    """As ``ModelConfig`` has it: positions before and after a token that it sees."""
    return None if tokens is None else (tokens - 1, 0)


def _window_json(model: ModelDescription) -> int | None:
    return None if model.window_size is None else model.window_size[0] + 1


LLAMA = Architecture(
    model_type="llama",
    classes=("LlamaForCausalLM", "LlamaModel"),
    prefix="model.",
    table=TABLE,
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    read=_read_llama,
    write=_write_llama,
    class_of=lambda model: "LlamaForCausalLM",
    ignored=IGNORED,
)

MISTRAL = Architecture(
    model_type="mistral",
    classes=("MistralForCausalLM", "MistralModel"),
    prefix="model.",
    table=TABLE,
    tied=LLAMA.tied,
    read=_read_mistral,
    write=_write_mistral,
    class_of=lambda model: "MistralForCausalLM",
    ignored=IGNORED,
)
