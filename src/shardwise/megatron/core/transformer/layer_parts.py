"""Megatron's attention, MLP and norm: the engine's, with Megatron's arguments and pairs."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from shardwise.megatron.core.tensor_parallel.attributes import mark_replicas
from shardwise.megatron.core.transformer.layer_arguments import check_part, engine_arguments, refuse, tp_group_of
from shardwise.megatron.core.transformer.module import MegatronModule
from shardwise.megatron.core.transformer.spec_utils import IdentityOp, get_module
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.models.config import ModelConfig
from shardwise.models.transformer import attention, mlp
from shardwise.models.transformer.masks import AttnMaskType
from shardwise.models.transformer.mlp import make_norm

__all__ = [
    "MLP",
    "DotProductAttention",
    "FusedLayerNorm",
    "MLPSubmodules",
    "SelfAttention",
    "SelfAttentionSubmodules",
    "WrappedTorchNorm",
    "get_bias_dropout_add",
]

__getattr__ = absent_names("transformer.attention")
DotProductAttention = __getattr__("DotProductAttention")


class FusedLayerNorm:
    """The norm that the config names, RMSNorm too; what is made is of the engine's own class.

    Args:
        config: kind, dtype, zero-centred weight and sequence parallelism.
        hidden_size: width of what is normalised.
        eps: added to the variance.
        persist_layer_norm, zero_centered_gamma, normalization: accepted; the config's fields decide.
    """

    def __new__(  # type: ignore[misc]  # As Megatron's WrappedTorchNorm.
        cls,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = True,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> nn.Module:
        norm: Any = make_norm(config, hidden_size)
        norm.eps = eps
        mark_replicas(norm)
        made: nn.Module = norm
        return made


WrappedTorchNorm = FusedLayerNorm


def get_bias_dropout_add(training: bool, fused: bool) -> Any:
    """A function of ``((x, bias or None), residual, p)``: ``residual + dropout(x + bias)``.

    Args:
        training: whether there is dropout.
        fused: accepted; nothing depends on it.
    """
    return functools.partial(_bias_dropout_add, training=training)


def _bias_dropout_add(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, *, training: bool
) -> Tensor:
    x, bias = x_with_bias
    return residual + F.dropout(x if bias is None else x + bias, p=prob, training=training)


@dataclass
class SelfAttentionSubmodules:
    """Parts of ``SelfAttention``: all are as they are; the config's ``qk_layernorm`` says whether there are norms."""

    linear_qkv: Any = ColumnParallelLinear
    core_attention: Any = DotProductAttention
    linear_proj: Any = RowParallelLinear
    q_layernorm: Any = None
    k_layernorm: Any = None

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError for other parts, and for norms where the config has none."""
        check_part(self, "linear_qkv", ColumnParallelLinear)
        check_part(self, "core_attention", DotProductAttention)
        check_part(self, "linear_proj", RowParallelLinear)
        for name in ("q_layernorm", "k_layernorm"):
            if get_module(getattr(self, name)) in (IdentityOp, None):
                continue
            check_part(self, name, FusedLayerNorm)
            if not config.qk_layernorm:
                raise ConfigError(f"{name} is given, and the config's qk_layernorm is False; set it to True")


@dataclass
class MLPSubmodules:
    """Parts of ``MLP``: all are as they are."""

    linear_fc1: Any = ColumnParallelLinear
    linear_fc2: Any = RowParallelLinear
    activation_func: Any = None

    def check(self) -> None:
        """Raise ConfigError for other parts."""
        check_part(self, "linear_fc1", ColumnParallelLinear)
        check_part(self, "linear_fc2", RowParallelLinear)
        if self.activation_func is not None:
            raise ConfigError("activation_func of MLPSubmodules is given; set the config's activation_func")


class SelfAttention(attention.SelfAttention, MegatronModule):
    """The engine's ``SelfAttention`` with Megatron's arguments.

    Args:
        config: sizes and kind of the attention.
        submodules: as they are by default.
        layer_number: from 1.
        attn_mask_type: what it forbids by itself.
        pg_collection: group ``tp``; the ambient topology's if None.
        cp_comm_type, pp_layer_offset, name: accepted; nothing depends on them.

    Raises:
        ConfigError: other parts, or fewer query heads than ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules | None = None,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        (submodules or SelfAttentionSubmodules()).check(config)
        self.tp_group = tp_group_of(pg_collection)
        super().__init__(config, layer_number, self.tp_group, attn_mask_type=attn_mask_type)
        mark_replicas(self)
        self.config = config

    def forward(  # type: ignore[override]  # Megatron's modules return pairs.
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **arguments: Any
    ) -> tuple[Tensor, None]:
        """Attend.

        Args:
            hidden_states: ``[s, b, h]``, or this rank's shard ``[s/t, b, h]`` with sequence parallelism.
            attention_mask: bools, True where attention is forbidden, beyond ``attn_mask_type``; ``[b, 1, s, keys]``.
            arguments: ``inference_context``, a key-value cache, whose keys come before those of ``hidden_states``;
                ``rotary_pos_emb``, angles ``[s, 1, 1, d]`` of ``RotaryEmbedding``, of a packed row those of its longest
                sequence; ``packed_seq_params``, the sequences of a packed row. Megatron's others must be None.

        Returns:
            Like ``hidden_states``, with the projection's bias added; and None.

        Raises:
            ConfigError: an argument that must be None.
        """
        given = engine_arguments(self, hidden_states, attention_mask, **arguments)
        return super().forward(hidden_states, **given), None


class MLP(mlp.MLP, MegatronModule):
    """The engine's ``MLP`` with Megatron's arguments.

    Args:
        config: sizes, activation and biases.
        submodules: as they are by default.
        is_expert: False.
        input_size: the config's ``hidden_size``, or None.
        ffn_hidden_size: inner width; the config's if None.
        tp_group, pg_collection: tensor-parallel group, or a collection with it; the ambient topology's if None.
        name: accepted; nothing depends on it.

    Raises:
        ConfigError: other parts, an expert, or an input of another width.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: ProcessGroup | None = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        (submodules or MLPSubmodules()).check()
        if is_expert or input_size not in (None, config.hidden_size):
            raise ConfigError(
                f"MLP is made with is_expert={is_expert} and input_size={input_size}; it is dense here, and as wide as "
                f"the config's hidden_size, {config.hidden_size}"
            )
        sized = copy.copy(config)
        sized.ffn_hidden_size = ffn_hidden_size or config.ffn_hidden_size
        self.tp_group = tp_group_of(pg_collection) if tp_group is None else tp_group
        super().__init__(sized, self.tp_group)
        mark_replicas(self)
        self.config = config

    @classmethod
    def as_mlp_submodule(
        cls, submodules: MLPSubmodules, config: TransformerConfig, is_mtp_layer: bool = False, **options: Any
    ) -> MLP:
        """An MLP, made as a layer makes it; ``options`` are the other arguments of the class."""
        return cls(config, submodules, **options)

    def forward(  # type: ignore[override]  # Megatron's modules return pairs.
        self, hidden_states: Tensor, per_token_scale: None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism) to the same, with the bias added; and None."""
        refuse(per_token_scale=per_token_scale, **kwargs)
        return super().forward(hidden_states), None
