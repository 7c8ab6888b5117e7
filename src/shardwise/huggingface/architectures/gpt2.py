"""GPT-2: learned positions, LayerNorm before, GELU, biases everywhere, matrices stored as ``[in, out]``."""

from __future__ import annotations

from typing import Any

from shardwise.errors import ConfigError
from shardwise.huggingface.architectures.architecture import Architecture, activation_json
from shardwise.huggingface.description import ModelDescription
from shardwise.huggingface.fields import Fields
from shardwise.huggingface.mapping import joint_qkv, whole

_LAYER = "decoder.layers.{layer}."
_STORED = "transformer.h.{layer}."

TABLE = {
    "embedding.word_embeddings.*": whole("transformer.wte.*"),
    "embedding.position_embeddings.*": whole("transformer.wpe.*"),
    _LAYER + "input_layernorm.*": whole(_STORED + "ln_1.*"),
    _LAYER + "self_attention.linear_qkv.*": joint_qkv(_STORED + "attn.c_attn.*", transposed=True),
    _LAYER + "self_attention.linear_proj.*": whole(_STORED + "attn.c_proj.*", transposed=True),
    _LAYER + "pre_mlp_layernorm.*": whole(_STORED + "ln_2.*"),
    _LAYER + "mlp.linear_fc1.*": whole(_STORED + "mlp.c_fc.*", transposed=True),
    _LAYER + "mlp.linear_fc2.*": whole(_STORED + "mlp.c_proj.*", transposed=True),
    "decoder.final_layernorm.*": whole("transformer.ln_f.*"),
    "output_layer.*": whole("lm_head.*"),
}


def read(fields: Fields) -> ModelDescription:
    """The model that a GPT-2 ``config.json`` describes."""
    fields.require("scale_attn_by_inverse_layer_idx", False, default=False)
    fields.require("add_cross_attention", False, default=False)
    hidden = fields.integer("n_embd", "hidden_size", default=768)
    heads = fields.integer("n_head", "num_attention_heads", default=12)
    dropout = fields.number("resid_pdrop", default=0.1)
    if fields.number("embd_pdrop", default=0.1) != dropout:
        raise fields.error("embd_pdrop", fields.number("embd_pdrop", default=0.1), f"resid_pdrop, {dropout}")
    if heads < 1 or hidden % heads != 0:
        raise fields.error("n_head", heads, f"a divisor of n_embd, {hidden}")
    return ModelDescription(
        num_layers=fields.integer("n_layer", "num_hidden_layers", default=12),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=fields.optional_integer("n_inner") or 4 * hidden,
        vocab_size=fields.integer("vocab_size", default=50257),
        max_sequence_length=fields.integer("n_positions", "max_position_embeddings", default=1024),
        activation=fields.activation("activation_function", default="gelu_new"),
        layernorm_epsilon=fields.number("layer_norm_epsilon", default=1e-5),
        attention_bias=True,
        qkv_bias=True,
        mlp_bias=True,
        softmax_scale=None if fields.flag("scale_attn_weights", default=True) else 1.0,
        share_embeddings_and_output_weights=fields.flag("tie_word_embeddings", default=True),
        hidden_dropout=dropout,
        attention_dropout=fields.number("attn_pdrop", default=0.1),
        init_method_std=fields.number("initializer_range", default=0.02),
    )


def write(model: ModelDescription) -> dict[str, Any]:
    """The ``config.json`` of a model with this description."""
    if model.softmax_scale not in (None, 1.0):
        raise ConfigError(f"GPT-2 has no softmax_scale of {model.softmax_scale}; 1.0 or None")
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_sequence_length,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "activation_function": activation_json(model, prefer="gelu_new"),
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "scale_attn_weights": model.softmax_scale is None,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
    }


GPT2 = Architecture(
    model_type="gpt2",
    classes=("GPT2LMHeadModel", "GPT2Model"),
    prefix="transformer.",
    table=TABLE,
    tied={"lm_head.weight": "transformer.wte.weight"},
    read=read,
    write=write,
    class_of=lambda model: "GPT2LMHeadModel",
    # The causal mask and its fill value.
    ignored=(r"\.attn\.(masked_)?bias",),
)
