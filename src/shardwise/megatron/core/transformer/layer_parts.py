"""Megatron's attention, MLP and norm: the engine's classes, with Megatron's arguments and pairs as results."""

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
from shardwise.core.sharding import ParamLayout
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core.packed_seq_params import PackedSeqParams
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection, _group_of
from shardwise.megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from shardwise.megatron.core.tensor_parallel.module import MegatronLinear, mark_replicas
from shardwise.megatron.core.transformer.module import IdentityOp, MegatronModule, get_module
from shardwise.megatron.core.transformer.program_parts import _add_bias
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.surface import offer
from shardwise.models.config import ModelConfig
from shardwise.models.transformer import attention, mlp
from shardwise.models.transformer.core_attention import CoreAttention
from shardwise.models.transformer.heads import split_heads
from shardwise.models.transformer.masks import AttentionMask, AttnMaskType
from shardwise.models.transformer.mlp import make_norm
from shardwise.nn.column import ColumnLinear
from shardwise.nn.module import parameter_device
from shardwise.nn.norm import NormFunction
from shardwise.nn.parallel_linear import ParallelLinear
from shardwise.nn.row import RowLinear

__getattr__ = absent_names("transformer.attention", "transformer.mlp", "transformer.torch_norm")


class FusedLayerNorm:
    """Factory of the norm that the config names, also RMSNorm; the object is of the engine's class.

    Args:
        config: config with the kind of norm, dtype, zero-centered weight and sequence parallelism.
        hidden_size: size of the normalized dimension.
        eps: constant added to the variance.
        persist_layer_norm, zero_centered_gamma, normalization: no effect; the config's fields apply.
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


WrappedTorchNorm = WrappedTorchLayerNorm = FusedLayerNorm


class _NormOfLinear:
    """A norm whose parameters are in the linear layer after it, under Transformer Engine's names."""

    linear: tuple[Any]  # A tuple hides a module from ``modules()``.

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.linear[0].layer_norm_weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.linear[0], "layer_norm_bias", None)


@functools.cache
def _class_of_linear(kind: Any) -> type:
    return type(kind.__name__, (_NormOfLinear, kind), {"kind": kind})


def _move_norm_(norm: Any, linear: Any) -> None:
    """Move a norm's parameters into a column-parallel layer, as ``layer_norm_weight`` and ``layer_norm_bias``.

    The norm computes as before. Nothing changes if they are there already.
    """
    for name, param in [*norm.named_parameters(recurse=False)]:
        own, value = f"layer_norm_{name}", float(name == "weight" and not NormFunction.of(norm).zero_centered)
        del norm._parameters[name]
        linear.param_layouts[own] = ParamLayout.replicated(param.shape, linear.group.size())
        linear.param_replicas[own] = norm.param_replicas.pop(name)
        linear._init_methods[own] = functools.partial(nn.init.constant_, val=value)
        linear.register_parameter(own, param)
        linear._made(own)
    if not isinstance(norm, _NormOfLinear):
        kind: Any = type(norm)
        norm.__class__, norm.linear = _class_of_linear(kind), (linear,)


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm of the kind that the config names, and the ``ColumnParallelLinear`` after it.

    Args:
        input_size, output_size, config, options: as in ``ColumnParallelLinear``.

    Attributes:
        layer_norm_weight, layer_norm_bias: parameters of the norm, ``[input_size]``; RMSNorm has no bias.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        with parameter_device(self.group, on_cpu=config.use_cpu_initialization):
            self.norm = FusedLayerNorm(config, input_size, config.layernorm_epsilon)
        _move_norm_(self.norm, self)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Map ``[s, b, i]``, or its shard, as ``ColumnParallelLinear`` maps its norm."""
        return super().forward(self.norm(x), *args, **options)


def _norm_in(part: Any, linear: Any, config: TransformerConfig) -> nn.Module:
    """Return the norm that a part of a spec puts before ``linear``, with its parameters there; or an identity."""
    if get_module(part) is not TELayerNormColumnParallelLinear:
        return IdentityOp()
    with parameter_device(linear.group, on_cpu=config.use_cpu_initialization):
        norm: nn.Module = FusedLayerNorm(config, linear.in_features, config.layernorm_epsilon)
    _move_norm_(norm, linear)
    return norm


class _ColumnOfPart(ColumnParallelLinear):
    """An engine's column layer in an attention or MLP: Megatron's class, and a pair for a call without ``sequence``."""

    computes_as = ColumnLinear
    returns_bias: bool
    _multiply = ParallelLinear._multiply

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None, **options: Any
    ) -> Any:
        """Return the output alone for the engine, which gives ``sequence``, and for a program's wrapper with a bias."""
        if "sequence" in options:
            return ColumnLinear.forward(self, input_, weight, **options)
        if isinstance(self, TELayerNormColumnParallelLinear):
            raise ConfigError(
                "a program calls linear_qkv or linear_fc1 by Transformer Engine's spec, whose norm the layer computes "
                "before; build the model by get_gpt_layer_local_spec, whose norms are apart"
            )
        if not self.returns_bias:
            return super().forward(input_, weight, runtime_gather_output, **options)
        used = self.weight if weight is None else weight
        assert used is not None
        self._check_shape(used)
        output = self._multiply(input_, used, None)
        return self.gather(output) if runtime_gather_output else output, self.bias


class _RowOfPart(RowParallelLinear):
    """An engine's row layer in an attention or MLP; see ``_ColumnOfPart``. A wrapper gets the bias apart."""

    computes_as = RowLinear
    _multiply = ParallelLinear._multiply

    def forward(self, input_: Tensor, **options: Any) -> Any:
        """Return the output alone if the engine calls."""
        if "sequence" in options:
            return RowLinear.forward(self, input_, **options)
        return self._apply_linear(input_, None), self.bias


class _NormedColumnOfPart(_ColumnOfPart, TELayerNormColumnParallelLinear):  # type: ignore[misc]  # Any, for calls of the engine.
    """A ``_ColumnOfPart`` with the parameters of the norm before it."""

    computes_as = ColumnLinear


_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def _offer_linears_(part: Any, config: TransformerConfig) -> None:
    """Give the linear layers of an engine's attention or MLP Megatron's classes, and let a program replace them.

    A program may set a wrapper in their place, which calls the old layer and returns a pair, as in Megatron.
    """
    for name in _LINEARS:
        linear: Any = getattr(part, name, None)
        kind = type(linear)
        if kind is ColumnLinear:
            linear.__class__ = _NormedColumnOfPart if hasattr(linear, "layer_norm_weight") else _ColumnOfPart
            linear.returns_bias = name == "linear_fc1"
            linear.gather_output = linear.disable_grad_reduce = False
            linear.output_size_per_partition = linear.local_features
            linear.allreduce_dgrad = linear.tp_size > 1 and not linear.sequence_parallel
        elif kind is RowLinear:
            linear.__class__, linear.input_is_parallel = _RowOfPart, True
            linear.input_size_per_partition = linear.local_features
        else:
            continue
        linear.config, linear.master_weight, linear._keeps_master_weight = config, None, False
        linear.is_expert = linear.explicit_expert_comm = False
        linear.expert_parallel = config.expert_model_parallel_size > 1
        linear.input_size, linear.output_size = linear.in_features, linear.out_features
        linear.stride, linear.tp_comm_buffer_name = linear.sections, None
    if _adapt_replaced not in part._forward_pre_hooks.values():
        part.register_forward_pre_hook(_adapt_replaced)


def _adapt_replaced(part: nn.Module, _: Any) -> None:
    """Let the engine call modules that a program has set in place of linear layers, before each forward."""
    for name in _LINEARS:
        linear = part._modules.get(name)
        is_of_engine = isinstance(linear, ParallelLinear) and not isinstance(linear, MegatronLinear)
        if linear is None or is_of_engine or isinstance(linear, (_ColumnOfPart, _RowOfPart)):
            continue
        if _call_replaced not in linear._forward_pre_hooks.values():
            linear.register_forward_pre_hook(_call_replaced, with_kwargs=True)
            linear.register_forward_hook(_sum_of_pair)


def _call_replaced(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    called.is_called_by_engine = "sequence" in kwargs
    sequence = kwargs.pop("sequence", None)
    if sequence is not None and sequence.group is not None and sequence.length % sequence.group.size():
        raise ConfigError(
            f"a sequence of {sequence.length} positions is split over {sequence.group.size()} ranks, and a program's "
            f"{type(called).__name__} in place of a linear layer needs equal parts; pad the sequence"
        )
    return args, kwargs


def _sum_of_pair(called: Any, _: Any, output: Any) -> Any:
    return _add_bias(called, _, output) if called.is_called_by_engine else output


class L2Norm(nn.Module):
    """Divide by the root of the mean square of the last dimension, in fp32; it has no weight.

    Args:
        hidden_size: no effect.
        eps: constant added to the mean square.
        options: no effect.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, **options: Any) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized ``x``, in its dtype."""
        return F.rms_norm(x.float(), (x.size(-1),), eps=self.eps).type_as(x)


def bias_dropout_add_unfused(training: bool) -> Any:
    """Return a function of ``((x, bias or None), residual, p)`` that computes ``residual + dropout(x + bias)``."""
    return functools.partial(_bias_dropout_add, training=training)


def get_bias_dropout_add(training: bool, fused: bool) -> Any:
    """Return ``bias_dropout_add_unfused(training)``; ``fused`` has no effect."""
    return bias_dropout_add_unfused(training)


def _bias_dropout_add(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, *, training: bool
) -> Tensor:
    x, bias = x_with_bias
    return residual + F.dropout(x if bias is None else x + bias, p=prob, training=training)


bias_dropout_add_fused_train = bias_dropout_add_unfused(True)
bias_dropout_add_fused_inference = bias_dropout_add_unfused(False)


class DotProductAttention(CoreAttention, MegatronModule):
    """Attention between this rank's queries, keys and values, without projections: the engine's kernels.

    Args:
        config: numbers of heads, their width, window, dropout and kernel.
        layer_number: number of the layer, from 1.
        attn_mask_type: mask that needs no tensor.
        attention_type: "self".
        attention_dropout: dropout probability; None means the config's.
        softmax_scale: factor of the scores; None means the config's.
        cp_comm_type: no effect; the config's field applies.
        pg_collection: collection with the group ``tp``; None means the ambient topology's.

    Raises:
        ConfigError: cross-attention, or fewer query heads than ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        if attention_type != "self":
            raise ConfigError(f"attention_type is {attention_type!r}; attention is self-attention here")
        config.check_complete()
        self.tp_group = _group_of(pg_collection, "tp")
        heads = split_heads(config.heads.queries, config.heads.groups, self.tp_group.size())
        super().__init__(config, max(1, layer_number), heads, self.tp_group, attn_mask_type)
        if attention_dropout is not None:
            self.dropout = attention_dropout
        self.softmax_scale = softmax_scale or self.softmax_scale
        mark_replicas(self)
        self.config = config
        config.note_read()

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[s, b, heads/t, d]``, rotated if the positions are.
            key, value: ``[s, b, groups/t, d]``.
            attention_mask: bools ``[b, 1, s, s]``, True where attention is forbidden, besides ``attn_mask_type``.
            attn_mask_type: the constructor's, or None.
            attention_bias: None.
            packed_seq_params: the sequences of a packed row, or None.

        Returns:
            ``[s, b, heads/t * d]``.

        Raises:
            ConfigError: another ``attn_mask_type``, or an ``attention_bias``.
        """
        _refuse(attention_bias=attention_bias)
        if attn_mask_type not in (None, self.attn_mask_type):
            raise ConfigError(
                f"attn_mask_type is {attn_mask_type}, and {self.attn_mask_type} in the constructor; give it there"
            )
        documents = None
        if packed_seq_params is not None:
            documents, _ = packed_seq_params.documents_and_positions(torch.Size(query.shape[1::-1]))
        return self.attended(query, key, value, AttentionMask(attention_mask, document_ids=documents))


@dataclass
class SelfAttentionSubmodules:
    """Parts of ``SelfAttention``, which cannot be replaced; the config's ``qk_layernorm`` turns norms on."""

    linear_qkv: Any = ColumnParallelLinear
    core_attention: Any = DotProductAttention
    linear_proj: Any = RowParallelLinear
    q_layernorm: Any = None
    k_layernorm: Any = None

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError for other parts, and for norms without ``qk_layernorm`` in the config."""
        _check_part(self, "linear_qkv", ColumnParallelLinear, TELayerNormColumnParallelLinear)
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
        _check_part(self, "linear_fc1", ColumnParallelLinear, TELayerNormColumnParallelLinear)
        _check_part(self, "linear_fc2", RowParallelLinear)
        if self.activation_func is not None:
            raise ConfigError("activation_func of MLPSubmodules is given; set the config's activation_func")


class _CalledAsMegatrons:
    """An attention or a layer of the engine that takes Megatron's arguments."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **arguments: Any
    ) -> tuple[Tensor, None]:
        """Apply the attention or the layer.

        Args:
            hidden_states: ``[s, b, h]``, or this rank's shard ``[s/t, b, h]`` with sequence parallelism.
            attention_mask: bools ``[b, 1, s, keys]``, True where attention is forbidden, besides ``attn_mask_type``.
            arguments: ``inference_context``, a key-value cache, whose keys precede those of ``hidden_states``;
                ``rotary_pos_emb``, angles ``[s, 1, 1, d]`` from ``RotaryEmbedding``, for a packed row those of its
                longest sequence; ``packed_seq_params``, the sequences of a packed row. Others must be None.

        Returns:
            The output, of the same shape as ``hidden_states`` and with all biases added, and None.

        Raises:
            ConfigError: an argument is given that must be None.
        """
        given = _engine_arguments(self, hidden_states, attention_mask, **arguments)
        engine: Any = super()
        return engine.forward(hidden_states, **given), None


class Attention:
    """Base class of attention, for ``isinstance``; a program's own subclass raises ConfigError when it is made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__} is a subclass of Attention, which has no parts here; derive it from SelfAttention, "
            "or from MegatronModule with parts of its own"
        )


class SelfAttention(_CalledAsMegatrons, attention.SelfAttention, MegatronModule, Attention):
    """The engine's ``SelfAttention`` with Megatron's arguments.

    Args:
        config: sizes and kind of the attention.
        submodules: the default parts.
        layer_number: number of the layer, from 1.
        attn_mask_type: mask that needs no tensor.
        pg_collection: collection with the group ``tp``; None means the ambient topology's.
        cp_comm_type, pp_layer_offset, name: no effect.

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
        parts = submodules or SelfAttentionSubmodules()
        parts.check(config)
        config.check_complete()
        self.tp_group = _group_of(pg_collection, "tp")
        super().__init__(config, layer_number, self.tp_group, attn_mask_type=attn_mask_type)
        self.linear_proj.skip_bias_add = True
        self.input_norm = _norm_in(parts.linear_qkv, self.linear_qkv, config)
        _offer_linears_(self, config)
        mark_replicas(self)
        self.config = config
        config.note_read()

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention without its last bias, which the caller adds, and that bias; see the layer's forward.

        With ``TELayerNormColumnParallelLinear`` the input is normed first.
        """
        output, _ = super().forward(self.input_norm(hidden_states), attention_mask, **arguments)
        return output, _bias_apart(self.linear_proj)


class MLP(mlp.MLP, MegatronModule):
    """The engine's ``MLP`` with Megatron's arguments.

    Args:
        config: sizes, activation and biases.
        submodules: the default parts.
        is_expert: False.
        input_size: number of input features; None means the config's ``hidden_size``.
        ffn_hidden_size: inner size; None means the config's.
        tp_group, pg_collection: tensor-parallel group, or a collection with it; None means the ambient topology's.
        name: no effect.

    Raises:
        ConfigError: other parts, or an expert.
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
        parts = submodules or MLPSubmodules()
        parts.check()
        config.check_complete()
        if is_expert:
            raise ConfigError("MLP is made with is_expert=True; it is dense here, and MoELayer makes experts")
        sized = copy.copy(config)
        sized.ffn_hidden_size = ffn_hidden_size or config.ffn_hidden_size
        self.tp_group = _group_of(pg_collection, "tp") if tp_group is None else tp_group
        super().__init__(sized, self.tp_group, input_size=input_size)
        self.linear_fc2.skip_bias_add = True
        self.input_norm = _norm_in(parts.linear_fc1, self.linear_fc1, config)
        _offer_linears_(self, config)
        mark_replicas(self)
        self.config = config
        config.note_read()

    @classmethod
    def as_mlp_submodule(
        cls, submodules: MLPSubmodules, config: TransformerConfig, is_mtp_layer: bool = False, **options: Any
    ) -> MLP:
        """Make an MLP with a layer's arguments; ``options`` are the other arguments of the class."""
        return cls(config, submodules, **options)

    def forward(  # type: ignore[override]  # Megatron's modules return pairs.
        self, hidden_states: Tensor, per_token_scale: None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map ``[s, b, i]`` (``[s/t, b, i]`` with sequence parallelism) to ``[s, b, h]`` without the last bias.

        The second result is that bias, ``[h]`` or None, which the caller adds.
        """
        _refuse(per_token_scale=per_token_scale, **kwargs)
        return super().forward(self.input_norm(hidden_states)), _bias_apart(self.linear_fc2)


def _bias_apart(linear: Any) -> Tensor | None:
    """Return the bias that a last layer has not added; a program's module in its place has added its own."""
    return linear.bias if isinstance(linear, _RowOfPart) else None


def _check_part(parts: Any, name: str, only: Any, *others: Any) -> None:
    found = get_module(getattr(parts, name))
    if found not in (only, *others):
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
    """Return the engine's keyword arguments for a layer or its attention; ``others`` must be None."""
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
        "rotary": None
        if rotary_pos_emb is None
        else _cos_and_sin(rotary_pos_emb, module.config.rotary_interleaved, hidden_states.dtype),
        "cache": inference_context,
    }


def _cos_and_sin(angles: Tensor, interleaved: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the engine's cosine and sine ``[s, 1, 1, d/2]`` of angles ``[s, 1, 1, d]``, which repeat in each pair."""
    angles = angles[..., ::2] if interleaved else angles[..., : angles.size(-1) // 2]
    return angles.cos().to(dtype), angles.sin().to(dtype)


offer(globals(), "WrappedTorchLayerNorm WrappedTorchNorm bias_dropout_add_fused_inference bias_dropout_add_fused_train")
