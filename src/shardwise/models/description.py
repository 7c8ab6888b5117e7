"""Descriptions of models without their weights, and conversions between a description and a model.

``config.json`` is read into a ``ModelDescription`` and written from one. ``ModelChunks`` are the parts of one model on
one rank, for interleaved pipeline schedules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamShard, ShardedOffset
from shardwise.core.topology import Groups
from shardwise.models.bert import Bert
from shardwise.models.config import ModelConfig, TransformerFields
from shardwise.models.experts.moe import MoELayer
from shardwise.models.gpt import GPT
from shardwise.models.language_model import LanguageModel
from shardwise.models.transformer.core_attention import CoreAttention
from shardwise.models.transformer.layer import TransformerLayerSpec, attention_of
from shardwise.models.transformer.mlp import ACTIVATIONS
from shardwise.models.transformer.rotary import RotaryScaling

# A larger size is a mistake. It raises an error before it takes time or memory.
_LARGEST = {
    "num_layers": 1 << 16,
    "num_attention_heads": 1 << 16,
    "num_query_groups": 1 << 16,
    **dict.fromkeys(("hidden_size", "kv_channels", "ffn_hidden_size", "vocab_size", "max_sequence_length"), 1 << 30),
}


@dataclass(kw_only=True, unsafe_hash=True)
class ModelDescription(TransformerFields):
    """A model without its weights: all fields that determine the model as a function of weights and inputs.

    Fields are those of ``TransformerFields``, and arguments of the models. Every field has an explicit value. Two
    descriptions are equal if the models are equal outside of training: dropout and initial values are not compared.
    Treat it as immutable.

    Attributes:
        kind: class of the model, ``"gpt"`` or ``"bert"``.
        activation: the MLP's activation, a key of ``models.transformer.mlp.ACTIVATIONS``.
        attention_bias: whether attention's output projection has a bias.
        qkv_bias: whether its query, key and value projections have biases.
        mlp_bias: whether both projections of the MLP have biases.
        add_binary_head: whether BERT has the next-sentence head and its pooler.
    """

    num_query_groups: int = 0
    kv_channels: int = 0
    ffn_hidden_size: int = 0
    kind: Literal["gpt", "bert"] = "gpt"
    vocab_size: int
    max_sequence_length: int
    activation: str
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    position_offset: int = 0
    positions_skip_padding: bool = False
    share_embeddings_and_output_weights: bool = False
    position_embedding_type: str = "learned_absolute"
    rotary_percent: float = 1.0
    rotary_base: float = 10000.0
    rope_scaling: RotaryScaling | None = None
    window_rotary_base: float | None = None
    num_tokentypes: int = 0
    add_binary_head: bool = False
    hidden_dropout: float = field(default=0.0, compare=False)
    attention_dropout: float = field(default=0.0, compare=False)
    init_method_std: float = field(default=0.02, compare=False)

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            if not 1 <= getattr(self, name) <= largest:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 1 to {largest}")
        for name in ("layernorm_epsilon", "rotary_base"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        self._check_dropout()

    def differences(self, other: ModelDescription) -> dict[str, tuple[Any, Any]]:
        """Return the fields in which the two differ, with this one's value and the other's.

        ``max_sequence_length`` is compared only if one of them has learned positions.
        """
        bounded = "learned_absolute" in (self.position_embedding_type, other.position_embedding_type)
        return {
            spec.name: (mine, theirs)
            for spec in fields(self)
            if spec.compare
            and (bounded or spec.name != "max_sequence_length")
            and (mine := getattr(self, spec.name)) != (theirs := getattr(other, spec.name))
        }


Model = GPT | Bert

_CONFIG_FIELDS = {spec.name for spec in fields(TransformerFields)}
# Fields that are arguments and attributes of the models under the same name.
_BERT_FIELDS = {spec.name for spec in fields(ModelDescription)} - _CONFIG_FIELDS
_BERT_FIELDS -= {"kind", "activation", "attention_bias", "qkv_bias", "mlp_bias"}
_GPT_FIELDS = _BERT_FIELDS - {"num_tokentypes", "add_binary_head"}


def model_config(description: ModelDescription, **settings: Any) -> ModelConfig:
    """Create the ``ModelConfig`` of a described model.

    Args:
        description: description of the model.
        **settings: other fields of the config (``params_dtype``, ``sequence_parallel``, stages and so on), and values
            that override the description's (``hidden_dropout``).

    Raises:
        ConfigError: fields contradict each other.
    """
    values = {name: getattr(description, name) for name in _CONFIG_FIELDS}
    values |= {
        "activation_func": ACTIVATIONS[description.activation],
        "add_bias_linear": description.mlp_bias,
        "add_qkv_bias": description.qkv_bias,
    }
    return ModelConfig(**(values | settings))


def build_model(
    description: ModelDescription,
    config: ModelConfig,
    *,
    groups: Groups,
    device: torch.device | None = None,
    max_sequence_length: int | None = None,
    vp_stage: int | None = None,
) -> Model:
    """Build a described model, or this rank's part of it.

    Args:
        description, config: description of the model, and its config from ``model_config``.
        groups: process groups of the model.
        device: device of the parameters; PyTorch's default device if None, or the GPU of NCCL groups.
        max_sequence_length: longest sequence, for models without learned positions.
        vp_stage: index of the chunk in its stage; None without interleaving.

    Raises:
        ConfigError: heads or layers cannot be split over the ranks.
    """
    model_class: Any = Bert if description.kind == "bert" else GPT
    arguments = model_arguments(
        description, config, groups=groups, max_sequence_length=max_sequence_length, vp_stage=vp_stage
    )
    with device or nullcontext():
        model: Model = model_class(config, **arguments)
    return model


def model_arguments(
    description: ModelDescription,
    config: ModelConfig,
    *,
    groups: Groups,
    max_sequence_length: int | None = None,
    vp_stage: int | None = None,
) -> dict[str, Any]:
    """Return keyword arguments of ``GPT`` or ``Bert`` for a described model; see ``build_model``."""
    names = _BERT_FIELDS if description.kind == "bert" else _GPT_FIELDS
    arguments = {name: getattr(description, name) for name in names}
    if max_sequence_length is not None:
        learned = description.position_embedding_type == "learned_absolute"
        if learned and max_sequence_length != description.max_sequence_length:
            raise ConfigError(
                f"max_sequence_length is {max_sequence_length}, but the model has learned positions for "
                f"{description.max_sequence_length}"
            )
        arguments["max_sequence_length"] = max_sequence_length
    stage, num_stages = groups.stage, groups.num_stages
    last_chunk = (config.virtual_pipeline_model_parallel_size or 1) - 1
    chunk = vp_stage or 0
    return arguments | {
        "layer_spec": _layer_spec(description),
        "pre_process": stage == 0 and chunk == 0,
        "post_process": stage == num_stages - 1 and chunk == last_chunk,
        "groups": groups,
        "vp_stage": vp_stage,
    }


def describe_model(model: nn.Module) -> ModelDescription:
    """Describe a model, given this rank's part of it; the inverse of ``build_model``.

    Raises:
        ConfigError: the model is neither GPT nor Bert, its activation has no name, or its layers have other parts.
    """
    if not isinstance(model, GPT | Bert):
        raise ConfigError(f"a {type(model).__name__} cannot be described; only GPT and Bert can")
    is_bert = isinstance(model, Bert)
    config: Any = model.config
    activation = next((name for name, function in ACTIVATIONS.items() if function is config.activation_func), None)
    if activation is None:
        raise ConfigError(
            f"activation_func {config.activation_func!r} has no name; use one of {', '.join(ACTIVATIONS)}"
        )
    first: Any = model.block.layers[0]
    # Biases of experts are a field of ``Experts``.
    of_mlp = () if isinstance(first.mlp, MoELayer) else ("linear_fc1",)
    to_keys = "linear_qkv" if config.latent is None else "linear_kv_down_proj"
    for name, wanted in (("self_attention", (to_keys, "linear_proj")), ("mlp", of_mlp)):
        part = getattr(first, name, None)
        missing = [each for each in wanted if not hasattr(part, each)]
        if missing:
            raise ConfigError(
                f"the first layer's {name} is of {type(part).__name__} without {' and '.join(missing)}, so the model "
                "cannot be described; a description knows SelfAttention and MLP"
            )
    attention, mlp = first.self_attention, first.mlp
    return ModelDescription(
        kind="bert" if is_bert else "gpt",
        activation=activation,
        attention_bias=attention.linear_proj.bias is not None,
        qkv_bias=getattr(attention, to_keys).bias is not None,
        mlp_bias=bool(of_mlp) and mlp.linear_fc1.bias is not None,
        **{name: getattr(config, name) for name in _CONFIG_FIELDS},
        **{name: getattr(model, name) for name in (_BERT_FIELDS if is_bert else _GPT_FIELDS)},
    )


def _layer_spec(description: ModelDescription) -> TransformerLayerSpec:
    if description.attention_bias == description.mlp_bias:
        return TransformerLayerSpec()
    biases = (description.attention_bias, description.qkv_bias)
    return TransformerLayerSpec(attention=partial(_attention_with_biases, *biases))


def _attention_with_biases(
    projection: bool, qkv: bool, config: ModelConfig, *args: Any, **kwargs: Any
) -> CoreAttention:
    """Create attention whose biases do not follow the MLP's."""
    # Experts exclude the biases of an MLP, and attention does not read them.
    own = dataclasses.replace(config, add_bias_linear=projection, add_qkv_bias=qkv, experts=None)
    return attention_of(own)(own, *args, **kwargs)


def chunks_of(config: ModelConfig) -> Sequence[int | None]:
    """Return the ``vp_stage`` of each chunk of a stage."""
    count = config.virtual_pipeline_model_parallel_size
    return [None] if count is None else range(count)


class ModelChunks(nn.ModuleList):
    """The chunks of a model on one pipeline stage, in order; at least one, all with the same config."""

    config: ModelConfig

    def __init__(self, chunks: Sequence[LanguageModel]) -> None:
        super().__init__(chunks)
        self.config = chunks[0].config

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[ShardedOffset] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ParamShard]:
        """Return the entries of ``LanguageModel.sharded_state_dict`` of all chunks."""
        entries: dict[str, ParamShard] = {}
        for chunk in self:
            assert isinstance(chunk, LanguageModel)
            entries |= chunk.sharded_state_dict(prefix, sharded_offsets, metadata)
        return entries
