"""Megatron's attention, MLP and norm: the engine's, with Megatron's arguments and pairs."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core.packed_seq_params import PackedSeqParams
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection, _group_of
from shardwise.megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from shardwise.megatron.core.tensor_parallel.module import mark_replicas
from shardwise.megatron.core.transformer.module import IdentityOp, MegatronModule, get_module
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.surface import offer
from shardwise.models.config import ModelConfig
from shardwise.models.transformer import attention, mlp
from shardwise.models.transformer.masks import AttentionMask, AttnMaskType
from shardwise.models.transformer.mlp import make_norm

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
        return norm  # type: ignore[no-any-return]


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
    """Parts of ``SelfAttention``, which cannot be replaced; the config's ``qk_layernorm`` decides about norms."""

    linear_qkv: Any = ColumnParallelLinear
    core_attention: Any = DotProductAttention
    linear_proj: Any = RowParallelLinear
    q_layernorm: Any = None
    k_layernorm: Any = None

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError for other parts, and for norms where the config has none."""
        _check_part(self, "linear_qkv", ColumnParallelLinear)
        _check_part(self, "core_attention", DotProductAttention)
        _check_part(self, "linear_proj", RowParallelLinear)
        for name in ("q_layernorm", "k_layernorm"):
            if get_module(getattr(self, name)) in (IdentityOp, None):
                continue
            _check_part(self, name, FusedLayerNorm)
            if not config.qk_layernorm:
                raise ConfigError(f"{name} is given, and the config's qk_layernorm is False; set it to True")


@dataclass
class MLPSubmodules:
    """Parts of ``MLP``, which cannot be replaced."""

    linear_fc1: Any = ColumnParallelLinear
    linear_fc2: Any = RowParallelLinear
    activation_func: Any = None

    def check(self) -> None:
        """Raise ConfigError for other parts."""
        _check_part(self, "linear_fc1", ColumnParallelLinear)
        _check_part(self, "linear_fc2", RowParallelLinear)
        if self.activation_func is not None:
            raise ConfigError("activation_func of MLPSubmodules is given; set the config's activation_func")


class _CalledAsMegatrons:
    """An attention or a layer of the engine, called with Megatron's arguments."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **arguments: Any
    ) -> tuple[Tensor, None]:
        """Apply the attention or the layer.

        Args:
            hidden_states: ``[s, b, h]``, or this rank's shard ``[s/t, b, h]`` with sequence parallelism.
            attention_mask: bools, True where attention is forbidden, beyond ``attn_mask_type``; ``[b, 1, s, keys]``.
            arguments: ``inference_context``, a key-value cache, whose keys come before those of ``hidden_states``;
                ``rotary_pos_emb``, angles ``[s, 1, 1, d]`` of ``RotaryEmbedding``, of a packed row those of its longest
                sequence; ``packed_seq_params``, the sequences of a packed row. Megatron's others must be None.

        Returns:
            Like ``hidden_states``, with all biases added; and None.

        Raises:
            ConfigError: an argument that must be None.
        """
        given = _engine_arguments(self, hidden_states, attention_mask, **arguments)
        engine: Any = super()
        return engine.forward(hidden_states, **given), None


class SelfAttention(_CalledAsMegatrons, attention.SelfAttention, MegatronModule):  # type: ignore[misc]
    """The engine's ``SelfAttention`` with Megatron's arguments.

    Args:
        config: sizes and kind of the attention.
        submodules: the default parts.
        layer_number: from 1.
        attn_mask_type: the mask that needs no tensor.
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
        self.tp_group = _group_of(pg_collection, "tp")
        super().__init__(config, layer_number, self.tp_group, attn_mask_type=attn_mask_type)
        mark_replicas(self)
        self.config = config


class MLP(mlp.MLP, MegatronModule):
    """The engine's ``MLP`` with Megatron's arguments.

    Args:
        config: sizes, activation and biases.
        submodules: the default parts.
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
        self.tp_group = _group_of(pg_collection, "tp") if tp_group is None else tp_group
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
        _refuse(per_token_scale=per_token_scale, **kwargs)
        return super().forward(hidden_states), None


def _check_part(parts: Any, name: str, only: Any) -> None:
    found = get_module(getattr(parts, name))
    if found is not only:
        raise ConfigError(
            f"{name} of {type(parts).__name__} is {getattr(found, '__name__', found)}; here it is "
            f"{getattr(only, '__name__', only)}, and a program may replace norms, attention and MLP as wholes"
        )


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(f"{name} is given, which a layer's parts do not take here; leave it out")


def _engine_arguments(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    *,
    rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
    inference_context: Any = None,
    packed_seq_params: PackedSeqParams | None = None,
    **others: Any,
) -> dict[str, Any]:
    """The engine's keyword arguments of a layer or of its attention; ``others`` must be None."""
    _refuse(**others)
    if isinstance(rotary_pos_emb, tuple):
        if rotary_pos_emb[0] is not rotary_pos_emb[1] and not torch.equal(*rotary_pos_emb):
            raise ConfigError("rotary_pos_emb has other angles for keys than for queries; give one tensor for both")
        rotary_pos_emb = rotary_pos_emb[0]
    documents = None
    if packed_seq_params is not None:
        s, b = hidden_states.shape[:2]
        s *= module.tp_group.size() if module.config.sequence_parallel else 1
        documents, positions = packed_seq_params.documents_and_positions(torch.Size((b, s)))
        rotary_pos_emb = None if rotary_pos_emb is None else rotary_pos_emb[positions[0]]
    return {
        "attention_mask": AttentionMask(attention_mask, document_ids=documents),
        "rotary": None if rotary_pos_emb is None else _cos_and_sin(rotary_pos_emb, module.config, hidden_states.dtype),
        "cache": inference_context,
    }


def _cos_and_sin(angles: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of angles ``[s, 1, 1, d]`` of both elements of each pair, as the engine takes them: ``[s, 1, 1, d/2]``."""
    angles = angles[..., ::2] if config.rotary_interleaved else angles[..., : angles.size(-1) // 2]
    return angles.cos().to(dtype), angles.sin().to(dtype)


offer(globals(), "DotProductAttention", "WrappedTorchNorm")
