"""OLMo 2: Llama with norms after attention and MLP in place of before, and norms of all queries and of all keys."""

from shardwise.storage.huggingface.architectures.architecture import Setting
from shardwise.storage.huggingface.architectures.classifier import classifiers
from shardwise.storage.huggingface.architectures.llama import LLAMA, TABLE, Decoder, decoder_settings
from shardwise.storage.huggingface.mapping import whole

_LAYER, _STORED = "decoder.layers.{layer}.", "model.layers.{layer}."

OLMO2 = Decoder(
    model_type="olmo2",
    classes=("Olmo2ForCausalLM", "Olmo2Model"),
    classifiers=classifiers("Olmo2", of_tokens=False),
    settings={
        **decoder_settings(intermediate_size=11008, vocab_size=50304, max_position_embeddings=2048),
        "layernorm_epsilon": Setting("rms_norm_eps", 1e-5),
        "attention_bias": Setting("attention_bias", False),
    },
    fixed={**LLAMA.fixed, "norm_position": "branch", "qk_layernorm": True, "qk_layernorm_over_heads": True},
    table=TABLE
    | {
        _LAYER + "post_self_attn_layernorm.*": whole(_STORED + "post_attention_layernorm.*"),
        _LAYER + "post_mlp_layernorm.*": whole(_STORED + "post_feedforward_layernorm.*"),
        _LAYER + "self_attention.q_layernorm.*": whole(_STORED + "self_attn.q_norm.*"),
        _LAYER + "self_attention.k_layernorm.*": whole(_STORED + "self_attn.k_norm.*"),
    },
)
