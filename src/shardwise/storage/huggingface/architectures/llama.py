"""Llama 3 and similar models: rotary positions, RMSNorm, SwiGLU, grouped queries.

Granite 3 is Llama with factors on the embedding, the residual branches, the scores and the logits. OLMo 2 is Llama with
norms after attention and MLP instead of before, and with a norm over all queries and one over all keys; OLMo 3 adds
windows in three of four layers. Phi-3 and Phi-4 have joint tensors (query, key and value; gate and up), and rotate a
fraction of each head. Mistral has a sliding window. Qwen 2 has biases on query, key and value, and Qwen 3 has norms of
each head's query and key. In SmolLM 3, some layers do not rotate, and some have a window.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardwise.models.config import ModelConfig
from shardwise.storage.huggingface.architectures.architecture import ActivationSetting, Architecture, Setting
from shardwise.storage.huggingface.fields import Fields, read_rope, read_rope_by_kind, rope_json, rope_json_by_kind
from shardwise.storage.huggingface.mapping import Table, joint_qkv, separate_qkv, stacked, whole

_LAYER = "decoder.layers.{layer}."
_STORED = "model.layers.{layer}."

Window = tuple[int | None, tuple[bool, ...] | None]
"""Number of tokens that a token sees, including itself, and which layers have the window; None: all layers."""

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


QK_NORMS = {
    _LAYER + "self_attention.q_layernorm.*": whole(_STORED + "self_attn.q_norm.*"),
    _LAYER + "self_attention.k_layernorm.*": whole(_STORED + "self_attn.k_norm.*"),
}
POST_NORMS = {
    _LAYER + "post_self_attn_layernorm.*": whole(_STORED + "post_attention_layernorm.*"),
    _LAYER + "post_mlp_layernorm.*": whole(_STORED + "post_feedforward_layernorm.*"),
}


_SETTINGS = {
    "vocab_size": Setting("vocab_size", 32000),
    "hidden_size": Setting("hidden_size", 4096),
    "ffn_hidden_size": Setting("intermediate_size", 11008),
    "num_layers": Setting("num_hidden_layers", 32),
    "num_attention_heads": Setting("num_attention_heads", 32),
    "activation_func": ActivationSetting("hidden_act", "silu"),
    "max_sequence_length": Setting("max_position_embeddings", 2048),
    "layernorm_epsilon": Setting("rms_norm_eps", 1e-6),
    "attention_dropout": Setting("attention_dropout", 0.0),
    "init_method_std": Setting("initializer_range", 0.02),
    "share_embeddings_and_output_weights": Setting("tie_word_embeddings", False),
}


def decoder_settings(**defaults: float) -> dict[str, Setting]:
    """Return the common settings of these decoders: Llama's, with other defaults."""
    return {
        name: dataclasses.replace(setting, default=defaults.get(name, setting.default))
        for name, setting in _SETTINGS.items()
    }


@dataclass(frozen=True, kw_only=True)
class Decoder(Architecture):
    """Common part of these decoders.

    Attributes:
        num_key_value_heads: default of the field; None for the number of query heads.
        head_dim: default of the field; None for ``hidden_size / num_attention_heads``.
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
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        width = fields.optional(int, "head_dim", self.head_dim)
        if width is None and (heads < 1 or hidden % heads != 0):
            expected = f"a divisor of hidden_size, {hidden}, or head_dim be given"
            raise fields.error("num_attention_heads", heads, expected)
        groups = fields.optional(int, "num_key_value_heads", self.num_key_value_heads) or heads
        if groups < 1 or heads % groups != 0:
            raise fields.error("num_key_value_heads", groups, f"a divisor of num_attention_heads, {heads}")
        window, layers = self.read_window(fields, values["num_layers"])
        return {
            "num_query_groups": groups,
            "kv_channels": width or hidden // heads,
            # ``ModelConfig`` counts the visible positions before and after a token.
            "window_size": None if window is None else (window - 1, 0),
            "windowed_layers": layers,
            **({"add_qkv_bias": values["attention_bias"]} if "attention_bias" in values else {}),
            **self.read_positions(fields, values["max_sequence_length"]),
        }

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        window = None if model.window_size is None else model.window_size[0] + 1
        return {
            "num_key_value_heads": model.num_query_groups,
            "head_dim": model.kv_channels,
            **self.write_window(window, model.windowed_layers or (window is not None,) * model.num_layers),
            **self.write_positions(model),
        }

    def read_window(self, fields: Fields, num_layers: int) -> Window:
        """Read the window; none here."""
        return None, None

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        """Return the fields of the window; none here."""
        return {}

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        """Return the description's fields of rotary positions."""
        return read_rope(fields, longest)

    def write_positions(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of ``config.json`` about rotary positions."""
        return rope_json(model)


def read_layer_types(fields: Fields, window: int | None, default: Sequence[bool]) -> Window:
    """Return the window and its layers, which ``layer_types`` lists, or ``default`` if that is missing."""
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
    """Return ``layer_types``, from whether each layer has the window."""
    return ["sliding_attention" if each else "full_attention" for each in layers]


@dataclass(frozen=True, kw_only=True)
class Windowed(Decoder):
    """A decoder that lists which of its layers have a window (``layer_types``).

    Attributes:
        window: default of ``sliding_window``.
        full_every: n if every n-th layer has no window in files without a list; None if all layers have one.
    """

    window: int | None = 4096
    full_every: int | None = None

    def read_window(self, fields: Fields, num_layers: int) -> Window:
        window, every = fields.optional(int, "sliding_window", self.window), self.every(fields)
        return read_layer_types(fields, window, [not every or (at + 1) % every != 0 for at in range(num_layers)])

    def every(self, fields: Fields) -> int | None:
        """Return ``full_every`` of a file."""
        return self.full_every

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        return {"sliding_window": window, "layer_types": layer_types(layers)}


class Mistral(Decoder):
    """A decoder whose layers all have the same window."""

    default_window: ClassVar[int | None] = 4096

    def read_window(self, fields: Fields, num_layers: int) -> Window:
        return fields.optional(int, "sliding_window", self.default_window), None

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        return {"sliding_window": window}


LLAMA = Decoder(
    model_type="llama",
    classes=("LlamaForCausalLM", "LlamaModel"),
    settings={
        **decoder_settings(),
        "attention_bias": Setting("attention_bias", False),
        "add_bias_linear": Setting("mlp_bias", False),
    },
)

MISTRAL = Mistral(
    model_type="mistral",
    classes=("MistralForCausalLM", "MistralModel"),
    settings=decoder_settings(ffn_hidden_size=14336, max_sequence_length=4096 * 32),
    num_key_value_heads=8,
)


class _Granite(Decoder):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        scale = fields.get(float, "attention_multiplier", default=1.0)
        return {"softmax_scale": scale, **super().read_others(fields, values)}

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        scale = model.heads.width**-0.5 if model.softmax_scale is None else model.softmax_scale
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
    settings={
        **decoder_settings(vocab_size=50304, layernorm_epsilon=1e-5),
        "attention_bias": Setting("attention_bias", False),
    },
    fixed={**LLAMA.fixed, "norm_position": "branch", "qk_layernorm": True, "qk_layernorm_over_heads": True},
    table=TABLE | POST_NORMS | QK_NORMS,
)


class _Olmo3(Windowed):
    """Positions are scaled only in layers without a window."""

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        # transformers 4 reads a base outside of rope_parameters for all layers, version 5 for those without a window.
        is_for_all = fields.get(float, "rope_theta", default=_OLMO3_BASE) == _OLMO3_BASE
        window_theta = _OLMO3_BASE if is_for_all else None
        return read_rope_by_kind(fields, longest, theta=_OLMO3_BASE, window_theta=window_theta)

    def write_positions(self, model: ModelConfig) -> dict[str, Any]:
        return rope_json_by_kind(model)


_OLMO3_BASE = 500000.0
OLMO3 = _Olmo3(
    model_type="olmo3",
    classes=("Olmo3ForCausalLM", "Olmo3Model"),
    settings=OLMO2.settings,
    fixed=OLMO2.fixed,
    table=OLMO2.table,
    full_every=4,
)


class _Phi3(Mistral):
    default_window = None

    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        dropout = fields.get(float, "embd_pdrop", default=0.0)
        if dropout != values["hidden_dropout"]:
            raise fields.error("embd_pdrop", dropout, f"resid_pdrop, {values['hidden_dropout']}")
        return super().read_others(fields, values)

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        # The default padding id is outside smaller vocabularies.
        return {"embd_pdrop": model.hidden_dropout, "pad_token_id": None, **super().write_others(model)}

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        # transformers prefers this field to the one in ``rope_scaling``, also if it is missing.
        fields = Fields({"original_max_position_embeddings": 4096, **fields.values}, fields.where)
        positions = read_rope(fields, longest, share=1.0, old_kinds={"su": "longrope", "yarn": "longrope"})
        scaling = positions["rope_scaling"]
        if scaling is not None and scaling.kind != "longrope":
            raise fields.error("rope_type of rope_scaling or rope_parameters", scaling.kind, "default or longrope")
        return positions

    def write_positions(self, model: ModelConfig) -> dict[str, Any]:
        written = rope_json(model)
        context = None if model.rope_scaling is None else model.rope_scaling.original_max_position_embeddings
        # Readers take the context from this field, not from ``rope_scaling``.
        return written if context is None else {"original_max_position_embeddings": context, **written}


PHI3 = _Phi3(
    model_type="phi3",
    classes=("Phi3ForCausalLM", "Phi3Model"),
    settings={
        **decoder_settings(
            vocab_size=32064, hidden_size=3072, ffn_hidden_size=8192, max_sequence_length=4096, layernorm_epsilon=1e-5
        ),
        "hidden_dropout": Setting("resid_pdrop", 0.0),
    },
    table=TABLE
    | {
        _LAYER + "self_attention.linear_qkv.*": joint_qkv(_STORED + "self_attn.qkv_proj.*"),
        _LAYER + "mlp.linear_fc1.*": whole(_STORED + "mlp.gate_up_proj.*"),
    },
)


_QWEN_SETTINGS = decoder_settings(vocab_size=151936, ffn_hidden_size=22016, max_sequence_length=32768)


class _Qwen(Decoder):
    def read_window(self, fields: Fields, num_layers: int) -> Window:
        window = fields.optional(int, "sliding_window", 4096)
        if not fields.get(bool, "use_sliding_window", default=False):
            return None, None
        first = fields.get(int, "max_window_layers", default=28)
        return read_layer_types(fields, window, [layer >= first for layer in range(num_layers)])

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        if window is None:
            return {"use_sliding_window": False, "sliding_window": None}
        first = next(index for index, windowed in enumerate(layers) if windowed)
        own = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": first}
        return own | {"layer_types": layer_types(layers)}


QWEN2 = _Qwen(
    model_type="qwen2",
    classes=("Qwen2ForCausalLM", "Qwen2Model"),
    settings=_QWEN_SETTINGS,
    fixed={**LLAMA.fixed, "add_qkv_bias": True},
    num_key_value_heads=32,
)

QWEN3 = _Qwen(
    model_type="qwen3",
    classes=("Qwen3ForCausalLM", "Qwen3Model"),
    settings=_QWEN_SETTINGS | {"attention_bias": Setting("attention_bias", False)},
    fixed={**LLAMA.fixed, "qk_layernorm": True},
    table=TABLE | QK_NORMS,
    num_key_value_heads=32,
    head_dim=128,
)


class _SmolLM3(Decoder):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        rotated = _rotated(fields, values["num_layers"])
        return {"rotary_layers": None if all(rotated) else rotated, **super().read_others(fields, values)}

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        rotated = model.rotary_layers or (True,) * model.num_layers
        return {
            "no_rope_layers": [int(each) for each in rotated],
            # The default id is outside smaller vocabularies.
            "pad_token_id": None,
            **super().write_others(model),
        }

    def read_window(self, fields: Fields, num_layers: int) -> Window:
        window = fields.optional(int, "sliding_window")
        if not fields.get(bool, "use_sliding_window", default=False):
            return None, None
        return read_layer_types(fields, window, [not each for each in _rotated(fields, num_layers)])

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        uses, types = window is not None, layer_types(layers)
        return {"use_sliding_window": uses, "sliding_window": window, "layer_types": types}

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        return read_rope(fields, longest, theta=2000000.0)


def _rotated(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer rotates; despite the name, a 1 in ``no_rope_layers`` means that it does."""
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
    settings={
        **LLAMA.settings,
        **decoder_settings(
            vocab_size=128256,
            hidden_size=2048,
            num_layers=36,
            num_attention_heads=16,
            max_sequence_length=32768,
            share_embeddings_and_output_weights=True,
        ),
    },
    num_key_value_heads=4,
)
