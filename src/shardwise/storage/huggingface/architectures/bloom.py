"""BLOOM: ALiBi, a LayerNorm after the embedding, and query, key and value of a head side by side, as we have them."""

from collections.abc import Mapping
from typing import Any

from shardwise.storage.huggingface.architectures.architecture import Architecture, Setting
from shardwise.storage.huggingface.architectures.classifier import classifiers
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.mapping import whole

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


class _Bloom(Architecture):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        return super().read_others(fields, values) | {"ffn_hidden_size": 4 * values["hidden_size"]}


BLOOM = _Bloom(
    model_type="bloom",
    classes=("BloomForCausalLM", "BloomModel"),
    classifiers=classifiers("Bloom", token_tensor="classifier"),
    settings={
        "vocab_size": Setting("vocab_size", 250880),
        # The field is optional: ALiBi bounds no sequence.
        "max_sequence_length": Setting("seq_length", 2048),
        "hidden_size": Setting("hidden_size", 64, "n_embed"),
        "num_layers": Setting("n_layer", 2, "num_hidden_layers"),
        "num_attention_heads": Setting("n_head", 8, "num_attention_heads"),
        "layernorm_epsilon": Setting("layer_norm_epsilon", 1e-5),
        "apply_residual_connection_post_layernorm": Setting("apply_residual_connection_post_layernorm", False),
        "hidden_dropout": Setting("hidden_dropout", 0.0),
        "attention_dropout": Setting("attention_dropout", 0.0),
        "init_method_std": Setting("initializer_range", 0.02),
        "share_embeddings_and_output_weights": Setting("tie_word_embeddings", True),
    },
    fixed={
        "activation": "gelu_tanh",
        "embedding_layernorm": True,
        "attention_bias": True,
        "qkv_bias": True,
        "mlp_bias": True,
        "position_embedding_type": "alibi",
    },
    prefix="transformer.",
    table=TABLE,
    tied={"lm_head.weight": "transformer.word_embeddings.weight"},
)
