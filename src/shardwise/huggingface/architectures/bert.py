"""BERT: a norm after each addition, tokens of two types, and heads for masked tokens and for the next sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from typing import Any

from shardwise.errors import ConfigError
from shardwise.huggingface.architectures.architecture import Architecture, activation_json
from shardwise.huggingface.description import ModelDescription
from shardwise.huggingface.fields import Fields
from shardwise.huggingface.mapping import separate_qkv, whole

_LAYER = "encoder.layers.{layer}."
_STORED = "bert.encoder.layer.{layer}."

TABLE = {
    "embedding.word_embeddings.*": whole("bert.embeddings.word_embeddings.*"),
    "embedding.position_embeddings.*": whole("bert.embeddings.position_embeddings.*"),
    "embedding.tokentype_embeddings.*": whole("bert.embeddings.token_type_embeddings.*"),
    "embedding.layernorm.*": whole("bert.embeddings.LayerNorm.*"),
    _LAYER + "self_attention.linear_qkv.*": separate_qkv(
        _STORED + "attention.self.query.*", _STORED + "attention.self.key.*", _STORED + "attention.self.value.*"
    ),
    _LAYER + "self_attention.linear_proj.*": whole(_STORED + "attention.output.dense.*"),
    _LAYER + "post_self_attn_layernorm.*": whole(_STORED + "attention.output.LayerNorm.*"),
    _LAYER + "mlp.linear_fc1.*": whole(_STORED + "intermediate.dense.*"),
    _LAYER + "mlp.linear_fc2.*": whole(_STORED + "output.dense.*"),
    _LAYER + "post_mlp_layernorm.*": whole(_STORED + "output.LayerNorm.*"),
    "lm_head.dense.*": whole("cls.predictions.transform.dense.*"),
    "lm_head.layernorm.*": whole("cls.predictions.transform.LayerNorm.*"),
    "output_layer.weight": whole("cls.predictions.decoder.weight"),
    "output_layer.bias": whole("cls.predictions.bias"),
    "pooler.dense.*": whole("bert.pooler.dense.*"),
    "binary_head.*": whole("cls.seq_relationship.*"),
}


def read(fields: Fields) -> ModelDescription:
    """The model that a BERT ``config.json`` describes; it has the binary head if ``architectures`` says so."""
    fields.require("is_decoder", False, default=False)
    fields.require("add_cross_attention", False, default=False)
    fields.require("position_embedding_type", "absolute", default="absolute")
    # Otherwise transformers has two biases of which one is used.
    fields.require("tie_word_embeddings", True, default=True)
    hidden = fields.integer("hidden_size", default=768)
    heads = fields.integer("num_attention_heads", default=12)
    if heads < 1 or hidden % heads != 0:
        raise fields.error("num_attention_heads", heads, f"a divisor of hidden_size, {hidden}")
    return ModelDescription(
        kind="bert",
        num_layers=fields.integer("num_hidden_layers", default=12),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=fields.integer("intermediate_size", default=3072),
        vocab_size=fields.integer("vocab_size", default=30522),
        max_sequence_length=fields.integer("max_position_embeddings", default=512),
        activation=fields.activation("hidden_act", default="gelu"),
        norm_position="post",
        layernorm_epsilon=fields.number("layer_norm_eps", default=1e-12),
        embedding_layernorm=True,
        final_layernorm=False,
        attention_bias=True,
        qkv_bias=True,
        mlp_bias=True,
        share_embeddings_and_output_weights=True,
        num_tokentypes=fields.integer("type_vocab_size", default=2),
        add_binary_head=fields.values.get("architectures") == ["BertForPreTraining"],
        hidden_dropout=fields.number("hidden_dropout_prob", default=0.1),
        attention_dropout=fields.number("attention_probs_dropout_prob", default=0.1),
        init_method_std=fields.number("initializer_range", default=0.02),
    )


def write(model: ModelDescription) -> dict[str, Any]:
    """The ``config.json`` of a model with this description."""
    if model.num_tokentypes < 1:
        raise ConfigError(f"BERT in Hugging Face has token types, at least 1; this model has {model.num_tokentypes}")
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_hidden_size,
        "hidden_act": activation_json(model, prefer="gelu"),
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": model.max_sequence_length,
        "type_vocab_size": model.num_tokentypes,
        "initializer_range": model.init_method_std,
        "layer_norm_eps": model.layernorm_epsilon,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
    }


def _with_heads_found(model: ModelDescription, stored: Set[str]) -> ModelDescription:
    """A file may have more heads than ``architectures`` says, as that of ``bert-base-uncased`` has."""
    return dataclasses.replace(model, add_binary_head=model.add_binary_head or "cls.seq_relationship.weight" in stored)


BERT = Architecture(
    model_type="bert",
    classes=("BertForPreTraining", "BertForMaskedLM"),
    prefix="bert.",
    table=TABLE,
    tied={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
    read=read,
    write=write,
    class_of=lambda model: "BertForPreTraining" if model.add_binary_head else "BertForMaskedLM",
    # Buffers; and the pooler of a model without the head that it is for.
    ignored=(r"embeddings\.position_ids", r"embeddings\.token_type_ids", r"pooler\.dense\.(weight|bias)"),
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    adapt=_with_heads_found,
    # As converted from TensorFlow.
    renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
)
