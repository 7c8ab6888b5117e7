"""OPT: learned positions that begin at the third row, ReLU, biases everywhere."""

from collections.abc import Mapping
from typing import Any

from shardwise.storage.huggingface.architectures.architecture import ActivationSetting, Architecture, Setting
from shardwise.storage.huggingface.architectures.classifier import classifiers
from shardwise.storage.huggingface.description import ModelDescription
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.mapping import separate_qkv, whole

_LAYER = "decoder.layers.{layer}."
_STORED = "model.decoder.layers.{layer}."

TABLE = {
    "embedding.word_embeddings.*": whole("model.decoder.embed_tokens.*"),
    "embedding.position_embeddings.*": whole("model.decoder.embed_positions.*"),
    # One model of the family, of 350 million parameters, norms after attention and MLP.
    _LAYER + "input_layernorm.*": whole(_STORED + "self_attn_layer_norm.*"),
    _LAYER + "post_self_attn_layernorm.*": whole(_STORED + "self_attn_layer_norm.*"),
    _LAYER + "self_attention.linear_qkv.*": separate_qkv(
        _STORED + "self_attn.q_proj.*", _STORED + "self_attn.k_proj.*", _STORED + "self_attn.v_proj.*"
    ),
    _LAYER + "self_attention.linear_proj.*": whole(_STORED + "self_attn.out_proj.*"),
    _LAYER + "pre_mlp_layernorm.*": whole(_STORED + "final_layer_norm.*"),
    _LAYER + "post_mlp_layernorm.*": whole(_STORED + "final_layer_norm.*"),
    _LAYER + "mlp.linear_fc1.*": whole(_STORED + "fc1.*"),
    _LAYER + "mlp.linear_fc2.*": whole(_STORED + "fc2.*"),
    "decoder.final_layernorm.*": whole("model.decoder.final_layer_norm.*"),
    "output_layer.*": whole("lm_head.*"),
}


class _OPT(Architecture):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        fields.require("word_embed_proj_dim", values["hidden_size"])
        is_before = fields.get(bool, "do_layer_norm_before", default=True)
        return super().read_others(fields, values) | {
            "norm_position": "pre" if is_before else "post",
            "final_layernorm": is_before,
        }

    def write_others(self, model: ModelDescription) -> dict[str, Any]:
        return {"do_layer_norm_before": model.norm_position == "pre", "word_embed_proj_dim": model.hidden_size}


OPT = _OPT(
    model_type="opt",
    classes=("OPTForCausalLM", "OPTModel"),
    classifiers=classifiers("OPT", of_tokens=False),
    settings={
        "vocab_size": Setting("vocab_size", 50272),
        "max_sequence_length": Setting("max_position_embeddings", 2048),
        "hidden_size": Setting("hidden_size", 768),
        "ffn_hidden_size": Setting("ffn_dim", 3072),
        "num_layers": Setting("num_hidden_layers", 12),
        "num_attention_heads": Setting("num_attention_heads", 12),
        "activation": ActivationSetting("activation_function", "relu"),
        "hidden_dropout": Setting("dropout", 0.1),
        "attention_dropout": Setting("attention_dropout", 0.0),
        "init_method_std": Setting("init_std", 0.02),
        "share_embeddings_and_output_weights": Setting("tie_word_embeddings", True),
    },
    fixed={
        "attention_bias": True,
        "qkv_bias": True,
        "mlp_bias": True,
        "position_offset": 2,
        "positions_skip_padding": True,
    },
    required={"enable_bias": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
    prefix="model.",
    table=TABLE,
    tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
)
