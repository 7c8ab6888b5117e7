"""One transformer layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.layout import Layout, hidden_layout
from shardwise.core.sequence_view import SequenceView
from shardwise.core.topology import Groups
from shardwise.models.config import ModelConfig
from shardwise.models.experts.exact_moe import ExactMoELayer
from shardwise.models.experts.moe import MoELayer
from shardwise.models.experts.router import RoutedBatch
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.latent_attention import LatentSelfAttention
from shardwise.models.transformer.mlp import MLP, make_norm
from shardwise.nn import GroupModule, arithmetic_of, parameter_device
from shardwise.nn.dropout import sharded_dropout
from shardwise.nn.recompute import OutputRecomputation, recomputed

__all__ = ["ResidualDropout", "TransformerLayer", "TransformerLayerSpec", "attention_of", "make_norm"]


class ResidualDropout(nn.Module):
    """Dropout on the residual stream: one mask for all ranks, or each rank's own mask on its shard of the sequence.

    Under the "global" rule of random streams, the mask of the whole sequence is the same at every number of ranks.

    Args:
        p: dropout probability.
        layer_number: number of the transformer layer; None outside of layers.
    """

    def __init__(self, p: float, layer_number: int | None = None) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.p = p

    def forward(self, input_: Tensor, sequence: SequenceView) -> Tensor:
        """Map ``[s, ...]``, or this rank's shard ``[s/t, ...]``, to the same shape."""
        if self.p == 0.0 or not self.training:
            return input_
        group = sequence.group
        dim = None if group is None else 0
        return sharded_dropout(
            input_,
            self.p,
            dim=dim,
            group=group,
            sizes=sequence.sizes,
            layer_number=self.layer_number,
            context=sequence.context,
        )


def attention_of(config: ModelConfig) -> type[SelfAttention | LatentSelfAttention]:
    """Return the class of the attention of ``config``."""
    return SelfAttention if config.latent is None else LatentSelfAttention


def moe_of(config: ModelConfig) -> Callable[[ModelConfig, Groups], nn.Module]:
    """Return the class of the experts of a model."""
    return MoELayer if config.exact_parts is None else ExactMoELayer


@dataclass(frozen=True)
class TransformerLayerSpec:
    """Parts of a layer; replace one to change the model.

    Attributes:
        norm: function that creates a norm from the config.
        attention: function that creates the attention from config, layer number (from 1) and group; None for that of
            the config (``attention_of``).
        mlp: function that creates the MLP from config and group.
        moe: function that creates the experts from config and groups; None for those of the config (``moe_of``). All
            three have the ``forward`` of the defaults.
    """

    norm: Callable[[ModelConfig], nn.Module] = make_norm
    attention: Callable[[ModelConfig, int, ProcessGroup], nn.Module] | None = None
    mlp: Callable[[ModelConfig, ProcessGroup], nn.Module] = MLP
    moe: Callable[[ModelConfig, Groups], nn.Module] | None = None


class _Input(NamedTuple):
    """The residual, the input of attention or MLP, and the recomputation of that input, if any."""

    residual: Tensor
    input_: Tensor
    recomputation: OutputRecomputation | None


class HiddenToHidden(GroupModule):
    """A module from hidden states to hidden states, ``[s, b, h]``, or ``[s/t, b, h]`` with sequence parallelism."""

    _sequence_parallel: bool

    @property
    def input_layout(self) -> Layout:
        """Layout of hidden states, I or V(dim=0)."""
        return hidden_layout(sequence_parallel=self._sequence_parallel)

    @property
    def output_layout(self) -> Layout:
        """Layout of the result, which has the input's shape."""
        return self.input_layout


class TransformerLayer(HiddenToHidden):
    """Attention and MLP, each with a norm and added to the residual stream.

    With ``config.norm_position`` "pre": ``x + attention(norm(x))``, then ``x + mlp(norm(x))``; with "post":
    ``norm(x + attention(x))``, then ``norm(x + mlp(x))``; with "branch": ``x + norm(attention(x))``, and with
    "sandwich": ``x + norm(attention(norm(x)))``. ``config.apply_residual_connection_post_layernorm`` adds to
    ``norm(x)`` instead of ``x``. With ``config.parallel_residual`` attention and MLP both read the layer's input, and
    both outputs are added to it.

    Args:
        config: sizes of the model.
        spec: parts of the layer.
        layer_number: number of this layer in the model, from 1.
        tp_group: tensor-parallel group.
        groups: process groups of experts; None if the tensor-parallel ranks hold them.

    Attributes:
        layer_number: the argument.
        input_layernorm, pre_mlp_layernorm: norms before attention and MLP, or None.
        post_self_attn_layernorm, post_mlp_layernorm: norms after attention and MLP, or None.
        layer_scalar: with ``config.layer_scalar``, factor of the output, ``[1]``, or None.
    """

    layer_scalar: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        spec: TransformerLayerSpec,
        layer_number: int,
        tp_group: ProcessGroup,
        groups: Groups | None = None,
    ) -> None:
        super().__init__()
        position = config.norm_position
        is_before, is_after = position in ("pre", "sandwich"), position != "pre"
        self.layer_number = layer_number
        self.is_parallel = config.parallel_residual
        self.residual_is_normed = config.apply_residual_connection_post_layernorm
        self._tp_group, self._sequence_parallel = tp_group, config.sequence_parallel
        self._norm = arithmetic_of(tp_group).norm(tp_group, sequence_parallel=config.sequence_parallel)
        self.residual_multiplier = config.residual_multiplier
        self._norms_sum = position == "post"
        again = config.recompute
        self.recomputes_norms, self.recomputes_mlp = again.recomputes("layernorm"), again.recomputes("mlp")
        # Custom parts of the spec may create parameters on the default device.
        with parameter_device(tp_group, on_cpu=config.use_cpu_initialization):
            self.input_layernorm = spec.norm(config) if is_before else None
            self.self_attention = (spec.attention or attention_of(config))(config, layer_number, tp_group)
            self.post_self_attn_layernorm = spec.norm(config) if is_after else None
            self.pre_mlp_layernorm = spec.norm(config) if is_before else None
            self._has_experts = config.experts is not None and config.experts.in_layer(layer_number)
            if self._has_experts:
                self.mlp: nn.Module = (spec.moe or moe_of(config))(config, groups or Groups(tp_group))
            else:
                self.mlp = spec.mlp(config, tp_group)
            self.post_mlp_layernorm = spec.norm(config) if is_after else None
            scalar = torch.ones(1, dtype=config.params_dtype) if config.layer_scalar else None
            self.register_buffer("layer_scalar", scalar)
        self.dropout = ResidualDropout(config.hidden_dropout, layer_number)

    def forward(
        self,
        hidden: Tensor,
        *,
        sequence: SequenceView | None = None,
        batch: RoutedBatch | None = None,
        **attention: Any,
    ) -> Tensor:
        """Map ``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism) to the same shape.

        ``batch`` is that of ``MoELayer.forward``; other keyword arguments are those of ``CoreAttention.forward``.
        """
        sequence = sequence or SequenceView.of(hidden, self._tp_group if self._sequence_parallel else None)
        residual, input_, norm = self._normed_input(hidden, self.input_layernorm)
        attended = self.self_attention(input_, sequence=sequence, **attention)
        if norm is not None:
            norm.discard_(attended)
        added = self._branch_output(attended, self.post_self_attn_layernorm, sequence)
        if self.is_parallel:
            residual = residual + added
            _, input_, norm = self._normed_input(hidden, self.pre_mlp_layernorm)
        else:
            residual, input_, norm = self._mlp_input(residual, added)
        mlp = partial(self.mlp, sequence=sequence, **({"batch": batch} if self._has_experts else {}))
        mixed = recomputed(mlp, input_) if self.recomputes_mlp else mlp(input_)
        if norm is not None:
            norm.discard_(mixed)
        added = self._branch_output(mixed, self.post_mlp_layernorm, sequence)
        # The norm after a pre-norm layer's sum belongs to the next layer, because layers are recomputed, sharded and
        # placed on stages one by one.
        norm_after = self.post_mlp_layernorm if self._norms_sum else None
        output = residual + added if norm_after is None else self._norm.add_and_norm(norm_after, residual, added)[1]
        return output if self.layer_scalar is None else output * self.layer_scalar.to(output.dtype)

    def reset_parameters(self) -> None:
        """Set the factor of the output to 1; parameters belong to the parts."""
        if self.layer_scalar is not None:
            self.layer_scalar = torch.ones_like(self.layer_scalar)

    def _branch_output(self, output: Tensor, norm: nn.Module | None, sequence: SequenceView) -> Tensor:
        if norm is not None and not self._norms_sum:
            output = self._norm(norm, output)
        if self.residual_multiplier != 1.0:
            output = output * self.residual_multiplier
        added: Tensor = self.dropout(output, sequence)
        return added

    def _normed_input(self, hidden: Tensor, norm: nn.Module | None) -> _Input:
        if norm is None:
            return _Input(hidden, hidden, None)
        recomputation = OutputRecomputation() if self.recomputes_norms else None
        apply = partial(self._norm, norm)
        normed = apply(hidden) if recomputation is None else recomputation.run(apply, hidden)
        return _Input(normed if self.residual_is_normed else hidden, normed, recomputation)

    def _mlp_input(self, residual: Tensor, added: Tensor) -> _Input:
        """Add attention's output to the residual stream, and compute the MLP's input."""
        if self._norms_sum:
            assert self.post_self_attn_layernorm is not None
            _, normed = self._norm.add_and_norm(self.post_self_attn_layernorm, residual, added)
            return _Input(normed, normed, None)
        if self.recomputes_norms or self.pre_mlp_layernorm is None:
            return self._normed_input(residual + added, self.pre_mlp_layernorm)
        total, normed = self._norm.add_and_norm(self.pre_mlp_layernorm, residual, added)
        return _Input(normed if self.residual_is_normed else total, normed, None)
