"""BERT: a norm after each addition, tokens of two types, and heads for masked tokens and for the next sentence."""

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.models.description import ModelDescription
from shardwise.storage.huggingface.architectures.architecture import (
    ActivationSetting,
    Architecture,
    ClassifierFormat,
    Setting,
)
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.mapping import separate_qkv, whole

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


class _Bert(Architecture):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        is_pretraining = fields.values.get("architectures") == ["BertForPreTraining"]
        return super().read_others(fields, values) | {"add_binary_head": is_pretraining}

    def write_others(self, model: ModelDescription) -> dict[str, Any]:
        if model.num_tokentypes < 1:
            raise ConfigError(
                f"BERT in Hugging Face has token types, at least 1; this model has {model.num_tokentypes}"
            )
        return {}

    def class_of(self, model: ModelDescription) -> str:
        return self.classes[0] if model.add_binary_head else self.classes[1]

    def adapt(self, model: ModelDescription, stored: Set[str]) -> ModelDescription:
        # A file may hold more heads than ``architectures`` says; that of ``bert-base-uncased`` does.
        if model.classification is not None:
            return model
        has_head = model.add_binary_head or "cls.seq_relationship.weight" in stored
        return dataclasses.replace(model, add_binary_head=has_head)


_DROPOUT = ("classifier_dropout", "hidden_dropout_prob")

BERT = _Bert(
    model_type="bert",
    classes=("BertForPreTraining", "BertForMaskedLM"),
    settings={
        "vocab_size": Setting("vocab_size", 30522),
        "hidden_size": Setting("hidden_size", 768),
        "num_layers": Setting("num_hidden_layers", 12),
        "num_attention_heads": Setting("num_attention_heads", 12),
        "ffn_hidden_size": Setting("intermediate_size", 3072),
        "activation": ActivationSetting("hidden_act", "gelu"),
        "hidden_dropout": Setting("hidden_dropout_prob", 0.1),
        "attention_dropout": Setting("attention_probs_dropout_prob", 0.1),
        "max_sequence_length": Setting("max_position_embeddings", 512),
        "num_tokentypes": Setting("type_vocab_size", 2),
        "init_method_std": Setting("initializer_range", 0.02),
        "layernorm_epsilon": Setting("layer_norm_eps", 1e-12),
        "share_embeddings_and_output_weights": Setting("tie_word_embeddings", True),
    },
    fixed={
        "kind": "bert",
        "norm_position": "post",
        "embedding_layernorm": True,
        "final_layernorm": False,
        "attention_bias": True,
        "qkv_bias": True,
        "mlp_bias": True,
    },
    required={
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
        # With untied embeddings, transformers stores two output biases and uses only one.
        "tie_word_embeddings": True,
    },
    classifiers=(
        ClassifierFormat(
            "sequence-classification",
            "BertForSequenceClassification",
            "classifier",
            bias=True,
            dropout=_DROPOUT,
            pads=False,
        ),
        ClassifierFormat(
            "token-classification", "BertForTokenClassification", "classifier", bias=True, dropout=_DROPOUT
        ),
    ),
    prefix="bert.",
    table=TABLE,
    tied={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
    # These are buffers, and the pooler of a model without the head that would read it.
    ignored=(r"embeddings\.position_ids", r"embeddings\.token_type_ids", r"pooler\.dense\.(weight|bias)"),
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    # Files converted from TensorFlow have these names.
    renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
)
