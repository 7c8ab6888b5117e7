"""A transformer block of inference layers that shares the parameters of a training block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.communication.collectives import all_gather, split_for_rank
from shardwise.core.communication.symmetric_memory import symmetric_buffer_of
from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import SequenceView
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.block import TransformerBlock
from shardwise.models.transformer.layer import TransformerLayer
from shardwise.models.transformer.mlp import MLP
from shardwise.nn.inference import InferenceNormColumnLinear, InferenceRowLinear, sharing
from shardwise.nn.linear import LinearParallelism
from shardwise.nn.norm import NormFunction


class InferenceLayer(TransformerLayer):
    """A pre-norm ``TransformerLayer`` in evaluation mode, without gradient, that shares a training layer's parameters.

    Attributes:
        fused: whether row-parallel layers add the residual and apply the next norm in their one exchange.
        splits_residual: whether the input is whole, and each rank takes its shard of the residual from it.
    """

    fused = False
    splits_residual = False
    self_attention: SelfAttention
    mlp: MLP

    @classmethod
    def of(cls, layer: nn.Module) -> InferenceLayer:
        """Return an inference layer that is equivalent to ``layer``.

        Raises:
            ConfigError: ``layer`` is not pre-norm, or has custom parts.
        """
        if type(layer) is not TransformerLayer or type(layer.self_attention) is not SelfAttention:
            raise ConfigError("layers for inference are made of TransformerLayer with SelfAttention, of no other class")
        if type(layer.mlp) is not MLP:
            raise ConfigError(
                f"layers for inference are made of MLP, and this is of another class, {type(layer.mlp).__name__}"
            )
        has_other_norms = layer.post_mlp_layernorm is not None or layer.residual_is_normed
        if layer.input_layernorm is None or layer.pre_mlp_layernorm is None or has_other_norms or layer.is_parallel:
            raise ConfigError(
                "layers for inference add to what was normed before attention or MLP; a model with another "
                "norm_position than 'pre', apply_residual_connection_post_layernorm or parallel_residual does otherwise"
            )
        if layer.residual_multiplier != 1.0 or layer.layer_scalar is not None:
            raise ConfigError(
                "layers for inference add to the plain residual stream; a model with residual_multiplier "
                f"{layer.residual_multiplier} and layer_scalar {layer.layer_scalar is not None} does otherwise"
            )
        attention, mlp = layer.self_attention, layer.mlp
        return sharing(
            layer,
            cls,
            self_attention=sharing(
                attention,
                SelfAttention,
                linear_qkv=InferenceNormColumnLinear.of(layer.input_layernorm, attention.linear_qkv),
                linear_proj=InferenceRowLinear.of(attention.linear_proj),
            ),
            mlp=sharing(
                mlp,
                MLP,
                linear_fc1=InferenceNormColumnLinear.of(layer.pre_mlp_layernorm, mlp.linear_fc1),
                linear_fc2=InferenceRowLinear.of(mlp.linear_fc2),
            ),
        )

    @property
    def columns(self) -> tuple[InferenceNormColumnLinear, InferenceNormColumnLinear]:
        """The two column-parallel layers, in order."""
        columns = self.self_attention.linear_qkv, self.mlp.linear_fc1
        assert isinstance(columns[0], InferenceNormColumnLinear)
        assert isinstance(columns[1], InferenceNormColumnLinear)
        return columns[0], columns[1]

    @property
    def rows(self) -> tuple[InferenceRowLinear, InferenceRowLinear]:
        """The two row-parallel layers, in order."""
        rows = self.self_attention.linear_proj, self.mlp.linear_fc2
        assert isinstance(rows[0], InferenceRowLinear)
        assert isinstance(rows[1], InferenceRowLinear)
        return rows[0], rows[1]

    def forward(self, hidden: Tensor, *, sequence: SequenceView | None = None, **keywords: Any) -> Tensor:
        """Map ``[s, b, h]``, or ``[s/t, b, h]``, to the same shape; in fused mode the output is always a shard."""
        attention, mlp = self.self_attention, self.mlp
        residual = hidden
        if self.fused:
            if self.splits_residual:
                residual = split_for_rank(hidden, group=attention.group, dim=0)
            attention.linear_proj.residual = residual
        attended: Tensor = attention(hidden, sequence=sequence, **keywords)
        if not self.fused:
            hidden = residual + attended
            mixed: Tensor = mlp(hidden, sequence=sequence)
            return hidden + mixed
        mlp.linear_fc2.residual = attended
        new_residual: Tensor = mlp(attended, sequence=sequence)
        return new_residual


class InferenceBlock(TransformerBlock):
    """A ``TransformerBlock`` in evaluation mode, without gradient, that shares a training block's parameters.

    Attributes:
        fused: whether each rank keeps its shard of the residual, and each half block has one exchange
            (``nn.inference``). The result is then whole on every rank, even with sequence parallelism.
    """

    fused: bool

    @classmethod
    def of(cls, block: TransformerBlock, *, fused: bool) -> InferenceBlock:
        """Return an inference block that is equivalent to ``block``.

        Args:
            block: training block, whose parameters are shared.
            fused: see the class; no effect on one rank.

        Raises:
            ConfigError: a layer is not supported (``InferenceLayer.of``) or, with ``fused``, the block does not include
                the model's last layer and a norm after it.
        """
        fused = fused and block.tp_group.size() > 1
        if fused and (block.final_layernorm is None or len(block.layers) == 0):
            raise ConfigError(
                "fused mode needs a norm after the last layer, on this stage: set final_layernorm and one stage, or "
                "leave communication unfused"
            )
        layers = [InferenceLayer.of(layer) for layer in block.layers]
        view = sharing(block, cls, layers=nn.ModuleList(layers), fused=fused)
        if fused:
            view._fuse(layers)
        return view

    def _fuse(self, layers: list[InferenceLayer]) -> None:
        columns = [column for layer in layers for column in layer.columns]
        assert self.final_layernorm is not None
        norms = [*(column.norm for column in columns[1:]), NormFunction.of(self.final_layernorm)]
        for row, norm in zip((row for layer in layers for row in layer.rows), norms, strict=True):
            row.next_norm, row.parallelism = norm, LinearParallelism.ROW_SEQUENCE
        layers[0].splits_residual = columns[0].parallelism is not LinearParallelism.COLUMN_SEQUENCE
        for column in columns[1:]:
            column.skip_norm_and_all_gather, column.parallelism = True, LinearParallelism.COLUMN_SEQUENCE
        for layer in layers:
            layer.fused = True

    @torch.no_grad()
    def forward(self, hidden: Tensor, *, sequence: SequenceView | None = None, **attention: Any) -> Tensor:
        """Like ``TransformerBlock.forward``; in fused mode to ``[s, b, h]``, which the group's next pass overwrites."""
        if self.fused and sequence is not None:
            sequence = SequenceView(sequence.length, self.tp_group)
        for layer in self.layers:
            hidden = layer(hidden, sequence=sequence, **attention)
        norm = self.final_layernorm
        if not self.fused or norm is None:
            return hidden if norm is None else norm(hidden)
        left = symmetric_buffer_of(self.tp_group, hidden.device).take()
        if left is not None and left.normed is not None:
            return left.normed
        # The buffer is too small for the normed output.
        assert sequence is not None
        return all_gather(norm(hidden), group=self.tp_group, dim=0, sizes=sequence.sizes)
