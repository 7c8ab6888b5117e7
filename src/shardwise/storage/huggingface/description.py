"""What a model is, without its weights: the middle between ``config.json`` and a model of ours."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.core.errors import ConfigError
from shardwise.models.classification import Classification
from shardwise.models.transformer.rotary import RotaryScaling
from shardwise.storage.huggingface.mapping import Heads

# A larger size is a mistake, and is refused before anyone waits for it or runs out of memory.
_LARGEST = {
    "num_layers": 1 << 16,
    "num_attention_heads": 1 << 16,
    "num_query_groups": 1 << 16,
    **dict.fromkeys(("hidden_size", "kv_channels", "ffn_hidden_size", "vocab_size", "max_sequence_length"), 1 << 30),
}


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """All of a model that decides which function of its weights and inputs it is.

    Fields have the names and meaning that ``ModelConfig`` and the models give them, and for each there is one
    value, whatever defaults it was written with. Two descriptions are equal if the models are, outside of training:
    dropout and initial values are no part of the comparison.

    Attributes:
        kind: the class: ``"gpt"`` or ``"bert"``.
        activation: the MLP's activation, a key of ``models.transformer.activations.ACTIVATIONS``.
        attention_bias: there is a bias on attention's output projection.
        qkv_bias: there are biases on its query, key and value projections.
        mlp_bias: there are biases on both projections of the MLP.
        classification: a head for labels, in place of all others.
        add_binary_head: BERT's next-sentence head, and the pooler before it.
        init_method_std: standard deviation of new weights.
    """

    kind: Literal["gpt", "bert"] = "gpt"
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    max_sequence_length: int
    activation: str
    gated_linear_unit: bool = False
    normalization: str = "LayerNorm"
    norm_position: str = "pre"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    embedding_layernorm: bool = False
    final_layernorm: bool = True
    qk_layernorm: bool = False
    apply_residual_connection_post_layernorm: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int, int] | None = None
    windowed_layers: tuple[bool, ...] | None = None
    rotary_layers: tuple[bool, ...] | None = None
    qk_layernorm_over_heads: bool = False
    parallel_residual: bool = False
    residual_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    final_logit_softcap: float | None = None
    attention_logit_softcap: float | None = None
    position_offset: int = 0
    positions_skip_padding: bool = False
    share_embeddings_and_output_weights: bool = False
    position_embedding_type: str = "learned_absolute"
    rotary_percent: float = 1.0
    rotary_base: float = 10000.0
    rotary_interleaved: bool = False
    rope_scaling: RotaryScaling | None = None
    window_rotary_base: float | None = None
    num_tokentypes: int = 0
    classification: Classification | None = None
    add_binary_head: bool = False
    hidden_dropout: float = dataclasses.field(default=0.0, compare=False)
    attention_dropout: float = dataclasses.field(default=0.0, compare=False)
    init_method_std: float = dataclasses.field(default=0.02, compare=False)

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            if not 1 <= getattr(self, name) <= largest:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 1 to {largest}")
        for name in ("layernorm_epsilon", "rotary_base"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0 and under 1")

    @property
    def heads(self) -> Heads:
        """Query heads, key-value heads, and the width of a head."""
        return Heads(self.num_attention_heads, self.num_query_groups, self.kv_channels)

    def differences(self, other: ModelDescription) -> dict[str, tuple[Any, Any]]:
        """The fields in which the two differ, with this one's value and the other's.

        How long a sequence may be is no difference where there is no table of positions.
        """
        bounded = "learned_absolute" in (self.position_embedding_type, other.position_embedding_type)
        return {
            field.name: (mine, theirs)
            for field in dataclasses.fields(self)
            if field.compare
            and (bounded or field.name != "max_sequence_length")
            and (mine := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        }
