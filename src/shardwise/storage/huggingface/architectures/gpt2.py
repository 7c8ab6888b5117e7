"""GPT-2: learned positions, LayerNorm before, GELU, biases everywhere, matrices stored as ``[in, out]``."""

from collections.abc import Mapping
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.storage.huggingface.architectures.architecture import ActivationSetting, Architecture, Setting
from shardwise.storage.huggingface.architectures.classifier import classifiers
from shardwise.storage.huggingface.description import ModelDescription
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.mapping import joint_qkv, whole

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


class _GPT2(Architecture):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        dropout = fields.get(float, "embd_pdrop", default=0.1)
        if dropout != values["hidden_dropout"]:
            raise fields.error("embd_pdrop", dropout, f"resid_pdrop, {values['hidden_dropout']}")
        return super().read_others(fields, values) | {
            "ffn_hidden_size": fields.optional(int, "n_inner") or 4 * values["hidden_size"],
            "softmax_scale": None if fields.get(bool, "scale_attn_weights", default=True) else 1.0,
        }

    def write_others(self, model: ModelDescription) -> dict[str, Any]:
        if model.softmax_scale not in (None, 1.0):
            raise ConfigError(f"GPT-2 has no softmax_scale of {model.softmax_scale}; 1.0 or None")
        return {
            "n_inner": model.ffn_hidden_size,
            "embd_pdrop": model.hidden_dropout,
            "scale_attn_weights": model.softmax_scale is None,
        }


GPT2 = _GPT2(
    model_type="gpt2",
    classes=("GPT2LMHeadModel", "GPT2Model"),
    classifiers=classifiers("GPT2", token_tensor="classifier"),
    settings={
        "vocab_size": Setting("vocab_size", 50257),
        "max_sequence_length": Setting("n_positions", 1024, "max_position_embeddings"),
        "hidden_size": Setting("n_embd", 768, "hidden_size"),
        "num_layers": Setting("n_layer", 12, "num_hidden_layers"),
        "num_attention_heads": Setting("n_head", 12, "num_attention_heads"),
        "activation": ActivationSetting("activation_function", "gelu_new"),
        "hidden_dropout": Setting("resid_pdrop", 0.1),
        "attention_dropout": Setting("attn_pdrop", 0.1),
        "layernorm_epsilon": Setting("layer_norm_epsilon", 1e-5),
        "init_method_std": Setting("initializer_range", 0.02),
        "share_embeddings_and_output_weights": Setting("tie_word_embeddings", True),
    },
    fixed={"attention_bias": True, "qkv_bias": True, "mlp_bias": True},
    required={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    prefix="transformer.",
    table=TABLE,
    tied={"lm_head.weight": "transformer.wte.weight"},
    # These buffers hold the causal mask and its fill value.
    ignored=(r"\.attn\.(masked_)?bias",),
)
