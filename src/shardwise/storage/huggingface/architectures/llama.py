"""Llama 3, Mistral, Granite 3 and OLMo 2: rotary positions, RMSNorm, SwiGLU, grouped queries, which Qwen shares.

Granite 3 is Llama with factors on the embedding, the residual branches, the scores and the logits. OLMo 2 is Llama with
norms after attention and MLP instead of before, and norms of all queries and of all keys.

Phi-3 and Phi-4: Llama with joint tensors (query, key and value; gate and up), and a share of each head rotated.

Qwen 2, Llama with biases on query, key and value; and Qwen 3, Llama with norms of each head's query and key.

SmolLM 3: Llama of which some layers rotate nothing, and some have a window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.models.description import ModelDescription
from shardwise.storage.huggingface.architectures.architecture import (
    ActivationSetting,
    Architecture,
    Setting,
    classifiers,
)
from shardwise.storage.huggingface.fields import Fields, read_rope, rope_json
from shardwise.storage.huggingface.mapping import Table, joint_qkv, separate_qkv, stacked, whole

_LAYER = "decoder.layers.{layer}."
_STORED = "model.layers.{layer}."

TABLE = {
    "embedding.word_embeddings.*": whole("model.embed_tokens.*"),
    _LAYER + "input_layernorm.*": whole(_STORED + "input_layernorm.*"),
    _LAYER + "self_attention.linear_qkv.*": separate_qkv(
        _STORED + "self_attn.q_proj.*", _STORED + "self_attn.k_proj.*", _STORED + "self_attn.v_proj.*"
    ),
    _LAYER + "self_attention.linear_proj.*": whole(_STORED + "self_attn.o_proj.*"),
    _LAYER + "pre_mlp_layernorm.*": whole(_STORED + "post_attention_layernorm.*"),
    _LAYER + "mlp.linear_fc1.*": stacked(_STORED + "mlp.gate_proj.*", _STORED + "mlp.up_proj.*"),
    _LAYER + "mlp.linear_fc2.*": whole(_STORED + "mlp.down_proj.*"),
    "decoder.final_layernorm.*": whole("model.norm.*"),
    "output_layer.*": whole("lm_head.*"),
}


def decoder_settings(*, intermediate_size: int, vocab_size: int, max_position_embeddings: int) -> dict[str, Setting]:
    """The settings that these decoders have in common, with an architecture's own defaults of these fields."""
    return {
        "vocab_size": Setting("vocab_size", vocab_size),
        "hidden_size": Setting("hidden_size", 4096),
        "ffn_hidden_size": Setting("intermediate_size", intermediate_size),
        "num_layers": Setting("num_hidden_layers", 32),
        "num_attention_heads": Setting("num_attention_heads", 32),
        "activation": ActivationSetting("hidden_act", "silu"),
        "max_sequence_length": Setting("max_position_embeddings", max_position_embeddings),
        "layernorm_epsilon": Setting("rms_norm_eps", 1e-6),
        "attention_dropout": Setting("attention_dropout", 0.0),
        "init_method_std": Setting("initializer_range", 0.02),
        "share_embeddings_and_output_weights": Setting("tie_word_embeddings", False),
    }


@dataclass(frozen=True, kw_only=True)
class Decoder(Architecture):
    """What these decoders have in common.

    Attributes:
        num_key_value_heads: default of that field; the number of query heads if None.
        head_dim: default of that field; ``hidden_size / num_attention_heads`` if None.
    """

    fixed: Mapping[str, Any] = field(default_factory=lambda: {"gated_linear_unit": True, "normalization": "RMSNorm"})
    prefix: str = "model."
    table: Table = field(default_factory=lambda: TABLE)
    tied: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    # Old files store the rotary frequencies.
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq",)
    num_key_value_heads: int | None = None
    head_dim: int | None = None

    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        """Heads, sliding window and rotary positions."""
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        width = fields.optional(int, "head_dim", self.head_dim)
        if width is None and (heads < 1 or hidden % heads != 0):
            expected = f"a divisor of hidden_size, {hidden}, or head_dim be given"
            raise fields.error("num_attention_heads", heads, expected)
        groups = fields.optional(int, "num_key_value_heads", self.num_key_value_heads) or heads
        if groups < 1 or heads % groups != 0:
            raise fields.error("num_key_value_heads", groups, f"a divisor of num_attention_heads, {heads}")
        window, layers = self.read_window(fields, values["num_layers"])
        others = {
            "num_query_groups": groups,
            "kv_channels": width or hidden // heads,
            # ``ModelConfig`` counts the positions before and after a token that the token attends to.
            "window_size": None if window is None else (window - 1, 0),
            "windowed_layers": layers,
        }
        if "attention_bias" in values:
            others["qkv_bias"] = values["attention_bias"]
        return others | self.read_positions(fields, values["max_sequence_length"])

    def write_others(self, model: ModelDescription) -> dict[str, Any]:
        """As ``read_others``."""
        window = None if model.window_size is None else model.window_size[0] + 1
        return {
            "num_key_value_heads": model.num_query_groups,
            "head_dim": model.kv_channels,
            **self.write_window(window, model.windowed_layers or (window is not None,) * model.num_layers),
            **self.write_positions(model),
        }

    def read_window(self, fields: Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
        """How many tokens a token sees, itself included, and in which layers; all if None."""
        return None, None

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        """The fields that say so."""
        return {}

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        """The fields of the description about rotary positions."""
        return read_rope(fields, longest)

    def write_positions(self, model: ModelDescription) -> dict[str, Any]:
        """The fields of ``config.json`` that say so."""
        return rope_json(model)


def read_layer_types(
    fields: Fields, window: int | None, default: Sequence[bool]
) -> tuple[int | None, tuple[bool, ...] | None]:
    """The window, and in which layers it is, by ``layer_types``, or by ``default`` where that is missing."""
    types = fields.values.get("layer_types")
    names = ("full_attention", "sliding_attention")
    layers = tuple(default)
    if types:
        if not isinstance(types, list) or len(types) != len(layers) or any(each not in names for each in types):
            raise fields.error("layer_types", types, f"one of {' and '.join(names)} for each of {len(layers)} layers")
        layers = tuple(each == names[1] for each in types)
    if window is None or not any(layers):
        return None, None
    return window, None if all(layers) else layers


def layer_types(layers: Sequence[bool]) -> list[str]:
    """``layer_types`` of layers that have the window, or not."""
    return ["sliding_attention" if each else "full_attention" for each in layers]


class _Mistral(Decoder):
    def read_window(self, fields: Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
        return fields.optional(int, "sliding_window", 4096), None

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        return {"sliding_window": window}


LLAMA = Decoder(
    model_type="llama",
    classes=("LlamaForCausalLM", "LlamaModel"),
    classifiers=classifiers("Llama"),
    settings={
        **decoder_settings(intermediate_size=11008, vocab_size=32000, max_position_embeddings=2048),
        "attention_bias": Setting("attention_bias", False),
        "mlp_bias": Setting("mlp_bias", False),
    },
)

MISTRAL = _Mistral(
    model_type="mistral",
    classes=("MistralForCausalLM", "MistralModel"),
    classifiers=classifiers("Mistral"),
    settings=decoder_settings(intermediate_size=14336, vocab_size=32000, max_position_embeddings=4096 * 32),
    num_key_value_heads=8,
)


class _Granite(Decoder):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        scale = fields.get(float, "attention_multiplier", default=1.0)
        return {"softmax_scale": scale, **super().read_others(fields, values)}

    def write_others(self, model: ModelDescription) -> dict[str, Any]:
        scale = model.kv_channels**-0.5 if model.softmax_scale is None else model.softmax_scale
        return {"attention_multiplier": scale, **super().write_others(model)}


GRANITE = _Granite(
    model_type="granite",
    classes=("GraniteForCausalLM", "GraniteModel"),
    settings={
        **LLAMA.settings,
        "embedding_multiplier": Setting("embedding_multiplier", 1.0),
        "residual_multiplier": Setting("residual_multiplier", 1.0),
        "logits_scaling": Setting("logits_scaling", 1.0),
    },
)

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


_LAYER, _STORED = "decoder.layers.{layer}.", "model.layers.{layer}."


class _Phi3(Decoder):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        dropout = fields.get(float, "embd_pdrop", default=0.0)
        if dropout != values["hidden_dropout"]:
            raise fields.error("embd_pdrop", dropout, f"resid_pdrop, {values['hidden_dropout']}")
        return super().read_others(fields, values)

    def write_others(self, model: ModelDescription) -> dict[str, Any]:
        # The default of padding is an id that smaller vocabularies lack.
        return {"embd_pdrop": model.hidden_dropout, "pad_token_id": None, **super().write_others(model)}

    def read_window(self, fields: Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
        return fields.optional(int, "sliding_window"), None

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        return {"sliding_window": window}

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        return read_rope(fields, longest, share=1.0)

    def write_positions(self, model: ModelDescription) -> dict[str, Any]:
        written = rope_json(model)
        context = None if model.rope_scaling is None else model.rope_scaling.original_max_position_embeddings
        # Readers take it from here, and not from beside the factors.
        return written if context is None else {"original_max_position_embeddings": context, **written}


PHI3 = _Phi3(
    model_type="phi3",
    classes=("Phi3ForCausalLM", "Phi3Model"),
    classifiers=classifiers("Phi3"),
    settings={
        **decoder_settings(intermediate_size=8192, vocab_size=32064, max_position_embeddings=4096),
        "hidden_size": Setting("hidden_size", 3072),
        "layernorm_epsilon": Setting("rms_norm_eps", 1e-5),
        "hidden_dropout": Setting("resid_pdrop", 0.0),
    },
    table=TABLE
    | {
        _LAYER + "self_attention.linear_qkv.*": joint_qkv(_STORED + "self_attn.qkv_proj.*"),
        _LAYER + "mlp.linear_fc1.*": whole(_STORED + "mlp.gate_up_proj.*"),
    },
)


_SETTINGS = decoder_settings(intermediate_size=22016, vocab_size=151936, max_position_embeddings=32768)
_LAYER, _STORED = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."


class _Qwen(Decoder):
    def read_window(self, fields: Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
        window = fields.optional(int, "sliding_window", 4096)
        if not fields.get(bool, "use_sliding_window", default=False):
            return None, None
        first = fields.get(int, "max_window_layers", default=28)
        return read_layer_types(fields, window, [layer >= first for layer in range(num_layers)])

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        if window is None:
            return {"use_sliding_window": False, "sliding_window": None}
        first = next(index for index, windowed in enumerate(layers) if windowed)
        return {
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": first,
            "layer_types": layer_types(layers),
        }


QWEN2 = _Qwen(
    model_type="qwen2",
    classes=("Qwen2ForCausalLM", "Qwen2Model"),
    classifiers=classifiers("Qwen2"),
    settings=_SETTINGS,
    fixed={**LLAMA.fixed, "qkv_bias": True},
    num_key_value_heads=32,
)

QWEN3 = _Qwen(
    model_type="qwen3",
    classes=("Qwen3ForCausalLM", "Qwen3Model"),
    classifiers=classifiers("Qwen3"),
    settings=_SETTINGS | {"attention_bias": Setting("attention_bias", False)},
    fixed={**LLAMA.fixed, "qk_layernorm": True},
    table=TABLE
    | {
        _LAYER + "q_layernorm.*": whole(_STORED + "q_norm.*"),
        _LAYER + "k_layernorm.*": whole(_STORED + "k_norm.*"),
    },
    num_key_value_heads=32,
    head_dim=128,
)


_THETA = 2000000.0


class _SmolLM3(Decoder):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        rotated = _rotated(fields, values["num_layers"])
        return {"rotary_layers": None if all(rotated) else rotated, **super().read_others(fields, values)}

    def write_others(self, model: ModelDescription) -> dict[str, Any]:
        rotated = model.rotary_layers or (True,) * model.num_layers
        return {
            "no_rope_layers": [int(each) for each in rotated],
            # The default is an id that smaller vocabularies lack.
            "pad_token_id": None,
            **super().write_others(model),
        }

    def read_window(self, fields: Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
        window = fields.optional(int, "sliding_window")
        if not fields.get(bool, "use_sliding_window", default=False):
            return None, None
        return read_layer_types(fields, window, [not each for each in _rotated(fields, num_layers)])

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": layer_types(layers),
        }

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        return read_rope(fields, longest, theta=_THETA)


def _rotated(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers rotate: despite its name, a 1 in ``no_rope_layers`` is a layer that does."""
    given = fields.values.get("no_rope_layers")
    if given is None:
        every = fields.get(int, "no_rope_layer_interval", default=4, within=(1, 1 << 16))
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if not isinstance(given, list) or len(given) < num_layers or any(each not in (0, 1) for each in given):
        raise fields.error("no_rope_layers", given, f"0 or 1 for each of {num_layers} layers")
    return tuple(map(bool, given[:num_layers]))


SMOLLM3 = _SmolLM3(
    model_type="smollm3",
    classes=("SmolLM3ForCausalLM", "SmolLM3Model"),
    classifiers=classifiers("SmolLM3"),
    settings={
        **LLAMA.settings,
        **decoder_settings(intermediate_size=11008, vocab_size=128256, max_position_embeddings=32768),
        "hidden_size": Setting("hidden_size", 2048),
        "num_layers": Setting("num_hidden_layers", 36),
        "num_attention_heads": Setting("num_attention_heads", 16),
        "share_embeddings_and_output_weights": Setting("tie_word_embeddings", True),
    },
    num_key_value_heads=4,
)
