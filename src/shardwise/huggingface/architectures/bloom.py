"""BLOOM: ALiBi, a LayerNorm after the embedding, and query, key and value of a head side by side, as we have them."""

from __future__ import annotations

from typing import Any

from shardwise.huggingface.architectures.architecture import Architecture
from shardwise.huggingface.description import ModelDescription
from shardwise.huggingface.fields import Fields
from shardwise.huggingface.mapping import whole

_LAYER = "decoder.layers.{layer}."
_STORED = "transformer.h.{layer}."

TABLE = {
    "embedding.word_embeddings.*": whole("transformer.word_embeddings.*"),
    "embedding.layernorm.*": whole("transformer.word_embeddings_layernorm.*"),
    _LAYER + "input_layernorm.*": whole(_STORED + "input_layernorm.*"),
    _LAYER + "self_attention.linear_qkv.*": whole(_STORED + "self_attention.query_key_value.*"),
    _LAYER + "self_attention.linear_proj.*": whole(_STORED + "self_attention.dense.*"),
    _LAYER + "pre_mlp_layernorm.*": whole(_STORED + "post_attention_layernorm.*"),
    _LAYER + "mlp.linear_fc1.*": whole(_STORED + "mlp.dense_h_to_4h.*"),
    _LAYER + "mlp.linear_fc2.*": whole(_STORED + "mlp.dense_4h_to_h.*"),
    "decoder.final_layernorm.*": whole("transformer.ln_f.*"),
    "output_layer.*": whole("lm_head.*"),
}


def read(fields: Fields) -> ModelDescription:
    """The model that a BLOOM ``config.json`` describes; it need not say how long a sequence may be."""
    hidden = fields.integer("n_embed", "hidden_size", default=64)
    heads = fields.integer("n_head", "num_attention_heads", default=8)
    if heads < 1 or hidden % heads != 0:
        raise fields.error("n_head", heads, f"a divisor of hidden_size, {hidden}")
    return ModelDescription(
        num_layers=fields.integer("n_layer", "num_hidden_layers", default=2),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=4 * hidden,
        vocab_size=fields.integer("vocab_size", default=250880),
        max_sequence_length=fields.integer("seq_length", default=2048),
        activation="gelu_tanh",
        layernorm_epsilon=fields.number("layer_norm_epsilon", default=1e-5),
        embedding_layernorm=True,
        apply_residual_connection_post_layernorm=fields.flag("apply_residual_connection_post_layernorm", default=False),
        attention_bias=True,
        qkv_bias=True,
        mlp_bias=True,
        share_embeddings_and_output_weights=fields.flag("tie_word_embeddings", default=True),
        position_embedding_type="alibi",
        hidden_dropout=fields.number("hidden_dropout", default=0.0),
        attention_dropout=fields.number("attention_dropout", default=0.0),
        init_method_std=fields.number("initializer_range", default=0.02),
    )


def write(model: ModelDescription) -> dict[str, Any]:
    """The ``config.json`` of a model with this description."""
    return {
        "vocab_size": model.vocab_size,
        "seq_length": model.max_sequence_length,
        "hidden_size": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "apply_residual_connection_post_layernorm": model.apply_residual_connection_post_layernorm,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
    }


BLOOM = Architecture(
    model_type="bloom",
    classes=("BloomForCausalLM", "BloomModel"),
    prefix="transformer.",
    table=TABLE,
    tied={"lm_head.weight": "transformer.word_embeddings.weight"},
    read=read,
    write=write,
    class_of=lambda model: "BloomForCausalLM",
)
