"""The MLP of a transformer layer: column-parallel up, row-parallel down."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.layout import Layout
from shardwise.kernels.blocks import in_blocks
from shardwise.kernels.elementwise import swiglu
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.layer_arguments import layer_arguments
from shardwise.nn import ColumnLinear, GroupModule, RowLinear
from shardwise.nn.recompute import OutputRecomputation


class MLP(GroupModule):
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` with ``gated_linear_unit``.

    Gate and up are the two sections of one weight (``stride=2``), so every rank holds matching halves of both.

    Args:
        config: sizes, activation and biases.
        tp_group: tensor-parallel group.
    """

    def __init__(self, config: ModelConfig, tp_group: ProcessGroup) -> None:
        super().__init__()
        assert config.ffn_hidden_size is not None
        self.activation_func = config.activation_func
        self.recomputes_activation = config.recomputes("mlp_act")
        self._exact = config.exact_parts is not None
        self.gated = config.gated_linear_unit
        sections = 2 if self.gated else 1
        arguments = layer_arguments(config, group=tp_group)
        self.linear_fc1 = ColumnLinear(
            config.hidden_size,
            sections * config.ffn_hidden_size,
            bias=config.add_bias_linear,
            init=config.init_method,
            sections=sections,
            **arguments,
        )
        self.linear_fc2 = RowLinear(
            config.ffn_hidden_size,
            config.hidden_size,
            bias=config.add_bias_linear,
            init=config.output_layer_init_method,
            **arguments,
        )

    @property
    def input_layout(self) -> Layout:
        """The layout of hidden states, I or V(dim=0)."""
        return self.linear_fc1.input_layout

    @property
    def output_layout(self) -> Layout:
        """As ``input_layout``."""
        return self.linear_fc2.output_layout

    def forward(self, hidden: Tensor, *, sequence_length: int | None = None) -> Tensor:
        """``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism) to the same shape.

        ``sequence_length`` is ``s``, which sequence parallelism must be told where the ranks do not divide it.
        """
        inner: Tensor = self.linear_fc1(hidden, sequence_length=sequence_length)
        if not self.recomputes_activation:
            output: Tensor = self.linear_fc2(self._activate(inner))
            return output
        recomputation = OutputRecomputation()
        output = self.linear_fc2(recomputation.run(self._activate, inner))
        recomputation.discard_(output)
        return output

    def _activate(self, inner: Tensor) -> Tensor:
        if self.gated and self.activation_func is F.silu:
            return swiglu(inner, at_any_size=self._exact)
        activate = partial(in_blocks, self.activation_func) if self._exact else self.activation_func
        if not self.gated:
            return activate(inner)
        gate, up = inner.chunk(2, dim=-1)
        return activate(gate) * up
