"""GPT-NeoX and Pythia: attention and MLP side by side, and a quarter of each head rotated."""

from collections.abc import Mapping
from typing import Any

from shardwise.storage.huggingface.architectures.architecture import ActivationSetting, Architecture, Setting
from shardwise.storage.huggingface.architectures.classifier import classifiers
from shardwise.storage.huggingface.description import ModelDescription
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.mapping import whole
from shardwise.storage.huggingface.rope import read_rope, rope_json

_LAYER = "decoder.layers.{layer}."
_STORED = "gpt_neox.layers.{layer}."

TABLE = {
    "embedding.word_embeddings.*": whole("gpt_neox.embed_in.*"),
    _LAYER + "input_layernorm.*": whole(_STORED + "input_layernorm.*"),
    _LAYER + "self_attention.linear_qkv.*": whole(_STORED + "attention.query_key_value.*"),
    _LAYER + "self_attention.linear_proj.*": whole(_STORED + "attention.dense.*"),
    _LAYER + "pre_mlp_layernorm.*": whole(_STORED + "post_attention_layernorm.*"),
    _LAYER + "mlp.linear_fc1.*": whole(_STORED + "mlp.dense_h_to_4h.*"),
    _LAYER + "mlp.linear_fc2.*": whole(_STORED + "mlp.dense_4h_to_h.*"),
    "decoder.final_layernorm.*": whole("gpt_neox.final_layer_norm.*"),
    "output_layer.*": whole("embed_out.*"),
}


class _GPTNeoX(Architecture):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        rope = read_rope(fields, values["max_sequence_length"], theta_name="rotary_emb_base", share=0.25)
        return super().read_others(fields, values) | {"qkv_bias": values["attention_bias"]} | rope

    def write_others(self, model: ModelDescription) -> dict[str, Any]:
        return {
            **rope_json(model),
            "rotary_emb_base": model.rotary_base,
            "rotary_pct": model.rotary_percent,
        }


GPT_NEOX = _GPTNeoX(
    model_type="gpt_neox",
    classes=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    classifiers=classifiers("GPTNeoX", token_tensor="classifier", token_dropout=("classifier_dropout",)),
    settings={
        "vocab_size": Setting("vocab_size", 50432),
        "max_sequence_length": Setting("max_position_embeddings", 2048),
        "hidden_size": Setting("hidden_size", 6144),
        "ffn_hidden_size": Setting("intermediate_size", 24576),
        "num_layers": Setting("num_hidden_layers", 44),
        "num_attention_heads": Setting("num_attention_heads", 64),
        "activation": ActivationSetting("hidden_act", "gelu"),
        "attention_bias": Setting("attention_bias", True),
        "parallel_residual": Setting("use_parallel_residual", True),
        "hidden_dropout": Setting("hidden_dropout", 0.0),
        "attention_dropout": Setting("attention_dropout", 0.0),
        "layernorm_epsilon": Setting("layer_norm_eps", 1e-5),
        "init_method_std": Setting("initializer_range", 0.02),
        "share_embeddings_and_output_weights": Setting("tie_word_embeddings", False),
    },
    fixed={"mlp_bias": True},
    prefix="gpt_neox.",
    table=TABLE,
    tied={"embed_out.weight": "gpt_neox.embed_in.weight"},
    # These buffers hold the causal mask, its fill value and the rotary frequencies.
    ignored=(r"\.attention\.(masked_)?bias", r"rotary_emb\.inv_freq"),
    renamed=(("lm_head.weight", "embed_out.weight"),),
)
