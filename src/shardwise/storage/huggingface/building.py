"""From a description to a model, and back."""

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.models.bert import Bert
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.mlp import ACTIVATIONS
from shardwise.storage.huggingface.description import ModelDescription

Model = GPT | Bert

_FIELDS = {field.name for field in dataclasses.fields(ModelDescription)}
# Fields that ModelConfig has under the same name.
_CONFIG_FIELDS = _FIELDS & {field.name for field in dataclasses.fields(ModelConfig)}
# Fields that are arguments and attributes of the models under the same name.
_BERT_FIELDS = _FIELDS - _CONFIG_FIELDS - {"kind", "activation", "attention_bias", "qkv_bias", "mlp_bias"}
_GPT_FIELDS = _BERT_FIELDS - {"num_tokentypes", "add_binary_head"}


def model_config(description: ModelDescription, **settings: Any) -> ModelConfig:
    """The ``ModelConfig`` of a described model.

    Args:
        description: the model's description.
        **settings: other fields of the config (``params_dtype``, ``sequence_parallel``, stages and the like), and
            values that replace the description's (``hidden_dropout``).

    Raises:
        ConfigError: fields that contradict each other.
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
    """A described model, or this rank's part of it.

    Args:
        description: the model's description.
        config: its config, from ``model_config``.
        groups: its process groups.
        device: the device that its parameters are made on; PyTorch's default device if None, or the GPU of NCCL groups.
        max_sequence_length: longest sequence, for models without learned positions.
        vp_stage: the index of the stage's chunk; None without interleaving.

    Raises:
        ConfigError: heads or layers that cannot be split over the ranks.
    """
    fields = _BERT_FIELDS if description.kind == "bert" else _GPT_FIELDS
    arguments = {name: getattr(description, name) for name in fields}
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
    arguments |= {
        "layer_spec": _layer_spec(description),
        "pre_process": stage == 0 and chunk == 0,
        "post_process": stage == num_stages - 1 and chunk == last_chunk,
        "groups": groups,
        "vp_stage": vp_stage,
    }
    model_class: Any = Bert if description.kind == "bert" else GPT
    with device or nullcontext():
        model: Model = model_class(config, **arguments)
    return model


def describe_model(model: nn.Module) -> ModelDescription:
    """The description of a model, by this rank's part of it; ``build_model``'s inverse.

    Raises:
        ConfigError: it is of another class, or its activation has no name.
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
    attention, mlp = first.self_attention, first.mlp
    return ModelDescription(
        kind="bert" if is_bert else "gpt",
        activation=activation,
        attention_bias=attention.linear_proj.bias is not None,
        qkv_bias=attention.linear_qkv.bias is not None,
        mlp_bias=mlp.linear_fc1.bias is not None,
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
) -> SelfAttention:
    """Attention with a bias on its projections where the MLP has none, or the other way round."""
    own = dataclasses.replace(config, add_bias_linear=projection, add_qkv_bias=qkv)
    return SelfAttention(own, *args, **kwargs)


def chunks_of(config: ModelConfig) -> Sequence[int | None]:
    """The ``vp_stage`` of each of a stage's chunks."""
    count = config.virtual_pipeline_model_parallel_size
    return [None] if count is None else range(count)
