"""GPT-2, OPT, BLOOM, GPT-NeoX (Pythia), and BERT: LayerNorm and biases everywhere.

GPT-2 stores matrices as ``[in, out]``. OPT's learned positions begin at the third row. BLOOM has ALiBi and a LayerNorm
after the embedding. GPT-NeoX has parallel attention and MLP, and rotates a quarter of each head. BERT has a norm after
each residual addition, two token types, and heads for masked tokens and for next-sentence prediction.
"""

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.mlp import gelu_tanh
from shardwise.storage.huggingface.architectures.architecture import ActivationSetting, Architecture, Setting
from shardwise.storage.huggingface.fields import Fields, read_rope, rope_json
from shardwise.storage.huggingface.mapping import Table, joint_qkv, separate_qkv, whole

_LAYER = "decoder.layers.{layer}."
_STORED = "transformer.h.{layer}."
_BIASES = {"attention_bias": True, "add_qkv_bias": True, "add_bias_linear": True}


def _fused_layer(stored: str, attention: str) -> Table:
    """Return the table of a BLOOM or GPT-NeoX layer, whose query-key-value tensor has the same order as ours."""
    return {
        _LAYER + "input_layernorm.*": whole(stored + "input_layernorm.*"),
        _LAYER + "self_attention.linear_qkv.*": whole(f"{stored}{attention}.query_key_value.*"),
        _LAYER + "self_attention.linear_proj.*": whole(f"{stored}{attention}.dense.*"),
        _LAYER + "pre_mlp_layernorm.*": whole(stored + "post_attention_layernorm.*"),
        _LAYER + "mlp.linear_fc1.*": whole(stored + "mlp.dense_h_to_4h.*"),
        _LAYER + "mlp.linear_fc2.*": whole(stored + "mlp.dense_4h_to_h.*"),
    }


_GPT2_TABLE = {
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

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
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
    settings={
        "vocab_size": Setting("vocab_size", 50257),
        "max_sequence_length": Setting("n_positions", 1024, "max_position_embeddings"),
        "hidden_size": Setting("n_embd", 768, "hidden_size"),
        "num_layers": Setting("n_layer", 12, "num_hidden_layers"),
        "num_attention_heads": Setting("n_head", 12, "num_attention_heads"),
        "activation_func": ActivationSetting("activation_function", "gelu_new"),
        "hidden_dropout": Setting("resid_pdrop", 0.1),
        "attention_dropout": Setting("attn_pdrop", 0.1),
        "layernorm_epsilon": Setting("layer_norm_epsilon", 1e-5),
        "init_method_std": Setting("initializer_range", 0.02),
        "share_embeddings_and_output_weights": Setting("tie_word_embeddings", True),
    },
    fixed=_BIASES,
    required={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    prefix="transformer.",
    table=_GPT2_TABLE,
    tied={"lm_head.weight": "transformer.wte.weight"},
    # These buffers hold the causal mask and its fill value.
    ignored=(r"\.attn\.(masked_)?bias",),
)


_OPT_STORED = "model.decoder.layers.{layer}."

_OPT_TABLE = {
    "embedding.word_embeddings.*": whole("model.decoder.embed_tokens.*"),
    "embedding.position_embeddings.*": whole("model.decoder.embed_positions.*"),
    # One model of the family, with 350 million parameters, has its norms after attention and MLP.
    _LAYER + "input_layernorm.*": whole(_OPT_STORED + "self_attn_layer_norm.*"),
    _LAYER + "post_self_attn_layernorm.*": whole(_OPT_STORED + "self_attn_layer_norm.*"),
    _LAYER + "self_attention.linear_qkv.*": separate_qkv(
        _OPT_STORED + "self_attn.q_proj.*", _OPT_STORED + "self_attn.k_proj.*", _OPT_STORED + "self_attn.v_proj.*"
    ),
    _LAYER + "self_attention.linear_proj.*": whole(_OPT_STORED + "self_attn.out_proj.*"),
    _LAYER + "pre_mlp_layernorm.*": whole(_OPT_STORED + "final_layer_norm.*"),
    _LAYER + "post_mlp_layernorm.*": whole(_OPT_STORED + "final_layer_norm.*"),
    _LAYER + "mlp.linear_fc1.*": whole(_OPT_STORED + "fc1.*"),
    _LAYER + "mlp.linear_fc2.*": whole(_OPT_STORED + "fc2.*"),
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

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        return {"do_layer_norm_before": model.norm_position == "pre", "word_embed_proj_dim": model.hidden_size}


OPT = _OPT(
    model_type="opt",
    classes=("OPTForCausalLM", "OPTModel"),
    settings={
        "vocab_size": Setting("vocab_size", 50272),
        "max_sequence_length": Setting("max_position_embeddings", 2048),
        "hidden_size": Setting("hidden_size", 768),
        "ffn_hidden_size": Setting("ffn_dim", 3072),
        "num_layers": Setting("num_hidden_layers", 12),
        "num_attention_heads": Setting("num_attention_heads", 12),
        "activation_func": ActivationSetting("activation_function", "relu"),
        "hidden_dropout": Setting("dropout", 0.1),
        "attention_dropout": Setting("attention_dropout", 0.0),
        "init_method_std": Setting("init_std", 0.02),
        "share_embeddings_and_output_weights": Setting("tie_word_embeddings", True),
    },
    fixed={**_BIASES, "position_offset": 2, "positions_skip_padding": True},
    required={"enable_bias": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
    prefix="model.",
    table=_OPT_TABLE,
    tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
)


_BLOOM_TABLE = {
    "embedding.word_embeddings.*": whole("transformer.word_embeddings.*"),
    "embedding.layernorm.*": whole("transformer.word_embeddings_layernorm.*"),
    **_fused_layer(_STORED, "self_attention"),
    "decoder.final_layernorm.*": whole("transformer.ln_f.*"),
    "output_layer.*": whole("lm_head.*"),
}


class _Bloom(Architecture):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        return super().read_others(fields, values) | {"ffn_hidden_size": 4 * values["hidden_size"]}


BLOOM = _Bloom(
    model_type="bloom",
    classes=("BloomForCausalLM", "BloomModel"),
    settings={
        "vocab_size": Setting("vocab_size", 250880),
        # The field is optional, because ALiBi does not limit the length.
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
    fixed={**_BIASES, "activation_func": gelu_tanh, "embedding_layernorm": True, "position_embedding_type": "alibi"},
    prefix="transformer.",
    table=_BLOOM_TABLE,
    tied={"lm_head.weight": "transformer.word_embeddings.weight"},
)


_NEOX_TABLE = {
    "embedding.word_embeddings.*": whole("gpt_neox.embed_in.*"),
    **_fused_layer("gpt_neox.layers.{layer}.", "attention"),
    "decoder.final_layernorm.*": whole("gpt_neox.final_layer_norm.*"),
    "output_layer.*": whole("embed_out.*"),
}


class _GPTNeoX(Architecture):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        longest = values["max_sequence_length"]
        rope = read_rope(fields, longest, theta_name="rotary_emb_base", share=0.25, share_name="rotary_pct")
        return super().read_others(fields, values) | {"add_qkv_bias": values["attention_bias"]} | rope

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        return rope_json(model) | {"rotary_emb_base": model.rotary_base, "rotary_pct": model.rotary_percent}


GPT_NEOX = _GPTNeoX(
    model_type="gpt_neox",
    classes=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    settings={
        "vocab_size": Setting("vocab_size", 50432),
        "max_sequence_length": Setting("max_position_embeddings", 2048),
        "hidden_size": Setting("hidden_size", 6144),
        "ffn_hidden_size": Setting("intermediate_size", 24576),
        "num_layers": Setting("num_hidden_layers", 44),
        "num_attention_heads": Setting("num_attention_heads", 64),
        "activation_func": ActivationSetting("hidden_act", "gelu"),
        "attention_bias": Setting("attention_bias", True),
        "parallel_residual": Setting("use_parallel_residual", True),
        "hidden_dropout": Setting("hidden_dropout", 0.0),
        "attention_dropout": Setting("attention_dropout", 0.0),
        "layernorm_epsilon": Setting("layer_norm_eps", 1e-5),
        "init_method_std": Setting("initializer_range", 0.02),
        "share_embeddings_and_output_weights": Setting("tie_word_embeddings", False),
    },
    fixed={"add_bias_linear": True},
    prefix="gpt_neox.",
    table=_NEOX_TABLE,
    tied={"embed_out.weight": "gpt_neox.embed_in.weight"},
    # These buffers hold the causal mask, its fill value and the rotary frequencies.
    ignored=(r"\.attention\.(masked_)?bias", r"rotary_emb\.inv_freq"),
    renamed=(("lm_head.weight", "embed_out.weight"),),
)


_BERT_LAYER = "encoder.layers.{layer}."
_BERT_STORED = "bert.encoder.layer.{layer}."

_BERT_TABLE = {
    "embedding.word_embeddings.*": whole("bert.embeddings.word_embeddings.*"),
    "embedding.position_embeddings.*": whole("bert.embeddings.position_embeddings.*"),
    "embedding.tokentype_embeddings.*": whole("bert.embeddings.token_type_embeddings.*"),
    "embedding.layernorm.*": whole("bert.embeddings.LayerNorm.*"),
    _BERT_LAYER + "self_attention.linear_qkv.*": separate_qkv(
        *(f"{_BERT_STORED}attention.self.{each}.*" for each in ("query", "key", "value"))
    ),
    _BERT_LAYER + "self_attention.linear_proj.*": whole(_BERT_STORED + "attention.output.dense.*"),
    _BERT_LAYER + "post_self_attn_layernorm.*": whole(_BERT_STORED + "attention.output.LayerNorm.*"),
    _BERT_LAYER + "mlp.linear_fc1.*": whole(_BERT_STORED + "intermediate.dense.*"),
    _BERT_LAYER + "mlp.linear_fc2.*": whole(_BERT_STORED + "output.dense.*"),
    _BERT_LAYER + "post_mlp_layernorm.*": whole(_BERT_STORED + "output.LayerNorm.*"),
    "lm_head.dense.*": whole("cls.predictions.transform.dense.*"),
    "lm_head.layernorm.*": whole("cls.predictions.transform.LayerNorm.*"),
    "output_layer.weight": whole("cls.predictions.decoder.weight"),
    "output_layer.bias": whole("cls.predictions.bias"),
    "pooler.dense.*": whole("bert.pooler.dense.*"),
    "binary_head.*": whole("cls.seq_relationship.*"),
}


class _Bert(Architecture):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        classes = fields.values.get("architectures")
        own: dict[str, Any] = {"add_binary_head": classes == ["BertForPreTraining"]}
        if classes == ["BertModel"]:
            own |= {"add_lm_head": False, "share_embeddings_and_output_weights": False}
        return super().read_others(fields, values) | own

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        if model.num_tokentypes < 1:
            raise ConfigError(f"BERT in Hugging Face has at least 1 token type; this model has {model.num_tokentypes}")
        return {} if model.add_lm_head else {"tie_word_embeddings": True}

    def class_of(self, model: ModelConfig) -> str:
        return self.classes[2 if not model.add_lm_head else 0 if model.add_binary_head else 1]

    def adapt(self, model: ModelConfig, stored: Set[str]) -> ModelConfig:
        # A file may have more heads than ``architectures`` states, as in ``bert-base-uncased``.
        has_head = model.add_binary_head or "cls.seq_relationship.weight" in stored
        if model.add_lm_head or "cls.predictions.bias" not in stored:
            return dataclasses.replace(model, add_binary_head=has_head)
        return dataclasses.replace(
            model, add_binary_head=has_head, add_lm_head=True, share_embeddings_and_output_weights=True
        )


BERT = _Bert(
    model_type="bert",
    classes=("BertForPreTraining", "BertForMaskedLM", "BertModel"),
    settings={
        "vocab_size": Setting("vocab_size", 30522),
        "hidden_size": Setting("hidden_size", 768),
        "num_layers": Setting("num_hidden_layers", 12),
        "num_attention_heads": Setting("num_attention_heads", 12),
        "ffn_hidden_size": Setting("intermediate_size", 3072),
        "activation_func": ActivationSetting("hidden_act", "gelu"),
        "hidden_dropout": Setting("hidden_dropout_prob", 0.1),
        "attention_dropout": Setting("attention_probs_dropout_prob", 0.1),
        "max_sequence_length": Setting("max_position_embeddings", 512),
        "num_tokentypes": Setting("type_vocab_size", 2),
        "init_method_std": Setting("initializer_range", 0.02),
        "layernorm_epsilon": Setting("layer_norm_eps", 1e-12),
        "share_embeddings_and_output_weights": Setting("tie_word_embeddings", True),
    },
    fixed={**_BIASES, "kind": "bert", "norm_position": "post", "embedding_layernorm": True, "final_layernorm": False},
    required={
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
        # With untied embeddings, transformers stores two output biases and uses only one.
        "tie_word_embeddings": True,
    },
    prefix="bert.",
    table=_BERT_TABLE,
    tied={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
    # These are buffers, and the pooler of a model without a head that reads it.
    ignored=(r"embeddings\.position_ids", r"embeddings\.token_type_ids", r"pooler\.dense\.(weight|bias)"),
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    # Files converted from TensorFlow have these old endings.
    renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
)
