"""Conversions between the config of a model and the model, or this rank's part of it.

``ModelChunks`` are the parts of one model on one rank, for interleaved pipeline schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamShard, ShardedOffset
from shardwise.core.topology import Groups
from shardwise.models.bert import Bert
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.config import ModelConfig
from shardwise.models.experts.moe import MoELayer
from shardwise.models.gpt import GPT
from shardwise.models.language_model import LanguageModel
from shardwise.models.model_fields import ModelFields, TransformerFields
from shardwise.models.transformer.mlp import ACTIVATIONS

Model = GPT | Bert | PlannedModel


def model_config(config: ModelConfig, **settings: Any) -> ModelConfig:
    """Return the config of the same model with other settings.

    Args:
        config: the model; its fields of ``TransformerFields`` are kept, others are those of a new config.
        **settings: other fields (``params_dtype``, ``sequence_parallel``, stages and so on), and values that replace
            the model's (``hidden_dropout``).

    Raises:
        ConfigError: fields contradict each other.
    """
    return ModelConfig(**({spec.name: getattr(config, spec.name) for spec in fields(TransformerFields)} | settings))


def build_model(
    config: ModelConfig,
    *,
    groups: Groups,
    device: torch.device | None = None,
    max_sequence_length: int | None = None,
    vp_stage: int | None = None,
) -> Model:
    """Build the model of a config, or this rank's part of it.

    Args:
        device: device of the parameters; PyTorch's default device if None, or the GPU of NCCL groups.
        max_sequence_length: longest sequence, for models without learned positions.
        vp_stage: index of the chunk in its stage; None without interleaving.

    Raises:
        ConfigError: heads or layers cannot be split over the ranks.
    """
    if config.transformers_config is not None:
        with device or nullcontext():
            return PlannedModel(config, groups=groups)
    model_class: Any = Bert if config.kind == "bert" else GPT
    arguments = model_arguments(config, groups=groups, max_sequence_length=max_sequence_length, vp_stage=vp_stage)
    with device or nullcontext():
        model: Model = model_class(config, **arguments)
    return model


def model_arguments(
    config: ModelConfig, *, groups: Groups, max_sequence_length: int | None = None, vp_stage: int | None = None
) -> dict[str, Any]:
    """Return keyword arguments of ``GPT`` or ``Bert`` for this rank's part of a model; see ``build_model``."""
    learned = config.position_embedding_type == "learned_absolute"
    if learned and max_sequence_length not in (None, config.max_sequence_length):
        raise ConfigError(
            f"max_sequence_length is {max_sequence_length}, but the model has learned positions for "
            f"{config.max_sequence_length}"
        )
    last_chunk, chunk = (config.virtual_pipeline_model_parallel_size or 1) - 1, vp_stage or 0
    return {
        "max_sequence_length": max_sequence_length,
        "pre_process": groups.stage == 0 and chunk == 0,
        "post_process": groups.stage == groups.num_stages - 1 and chunk == last_chunk,
        "groups": groups,
        "vp_stage": vp_stage,
    }


def describe_model(model: nn.Module) -> ModelConfig:
    """Return the config of a model, given this rank's part of it, with the arguments of its constructor.

    Raises:
        ConfigError: the model is neither GPT nor Bert, its activation has no name, or its layers have other parts.
    """
    if isinstance(model, PlannedModel):
        return model_config(model.config)
    if not isinstance(model, GPT | Bert):
        raise ConfigError(f"a {type(model).__name__} cannot be described; only GPT and Bert can")
    config = model.config
    if config.activation_func not in ACTIVATIONS.values():
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
    own = {spec.name: getattr(model, spec.name) for spec in fields(ModelFields) if hasattr(model, spec.name)}
    return model_config(
        config,
        **own,
        kind="bert" if isinstance(model, Bert) else "gpt",
        attention_bias=attention.linear_proj.bias is not None,
        add_qkv_bias=getattr(attention, to_keys).bias is not None,
        add_bias_linear=bool(of_mlp) and mlp.linear_fc1.bias is not None,
    )


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
        self, prefix: str = "", sharded_offsets: Sequence[ShardedOffset] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ParamShard]:
        """Return the entries of ``LanguageModel.sharded_state_dict`` of all chunks."""
        entries: dict[str, ParamShard] = {}
        for chunk in self:
            assert isinstance(chunk, LanguageModel)
            entries |= chunk.sharded_state_dict(prefix, sharded_offsets, metadata)
        return entries
