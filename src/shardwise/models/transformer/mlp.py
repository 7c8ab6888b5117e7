"""The MLP of a transformer layer: column-parallel up, row-parallel down.

This file also converts a model's config to the arguments, norms and activations of its layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.layout import Layout
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import Replicas
from shardwise.models.config import LayerConfig, ModelConfig
from shardwise.nn import ColumnLinear, GroupModule, RowLinear, arithmetic_of
from shardwise.nn.norm import NORMS
from shardwise.nn.recompute import OutputRecomputation
from shardwise.nn.replicated import set_replicas_


def layer_arguments(config: LayerConfig, *, group: ProcessGroup, linear: bool = True) -> dict[str, Any]:
    """Return arguments of a model's layers, except for their sizes and initial values.

    Args:
        group: the ranks that share the layer.
        linear: whether the layer is a ColumnLinear or RowLinear, instead of another layer with parameters.
    """
    arguments: dict[str, Any] = {
        "group": group,
        "dtype": config.params_dtype,
        "initialize": config.perform_initialization,
        "init_on_cpu": config.use_cpu_initialization,
    }
    if linear:
        arguments |= {
            "sequence_parallel": config.sequence_parallel,
            "overlap": config.tp_comm_overlap,
            "fuse_weight_gradient": config.gradient_accumulation_fusion,
            "delay_weight_gradient": config.delay_wgrad_compute,
        }
    return arguments


def make_norm(config: ModelConfig, width: int | None = None, eps: float | None = None) -> nn.Module:
    """Create the norm of ``config``, with ``width`` or ``hidden_size`` features, on PyTorch's default device.

    ``eps`` replaces ``layernorm_epsilon`` if it is given.

    Every rank holds the whole parameters. With sequence parallelism each rank sees only a part of the tokens, so
    gradients are partial sums.
    """
    kind = NORMS[config.normalization, config.layernorm_zero_centered_gamma]
    eps = config.layernorm_epsilon if eps is None else eps
    norm = kind(width or config.hidden_size, eps=eps, dtype=config.params_dtype)
    # With exact arithmetic the backward already computes the whole gradient.
    is_partial = config.sequence_parallel and config.exact_parts is None
    set_replicas_(norm, Replicas(summed_over=("tp",) if is_partial else ()))
    return norm


def gelu_tanh(input_: Tensor) -> Tensor:
    """Compute GELU with the normal distribution function approximated by a tanh (GPT-2, BLOOM).

    Source: Hendrycks & Gimpel 2016 (arXiv:1606.08415), section 2.
    """
    return F.gelu(input_, approximate="tanh")


def quick_gelu(input_: Tensor) -> Tensor:
    """Compute GELU with the normal distribution function approximated by ``sigmoid(1.702 x)``; the same source."""
    return input_ * (1.702 * input_).sigmoid()


def squared_relu(input_: Tensor) -> Tensor:
    """Compute ``relu(x) ** 2`` (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(input_).square()


def softcap(input_: Tensor, cap: float) -> Tensor:
    """Compute ``cap * tanh(x / cap)``, which bounds scores and logits by ``cap`` (Gemma 2, arXiv:2408.00118, 2)."""
    return (input_ / cap).tanh() * cap


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
    "relu": F.relu,
    "silu": F.silu,
}
"""Choices of ``ModelConfig.activation_func``. With ``gated_linear_unit``, ``silu`` is SwiGLU and ``gelu`` GeGLU."""


def activated(config: ModelConfig, group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return the function between an MLP's projections; with a gate, the gate's half of the features comes first."""
    activation, function = arithmetic_of(group).activation, config.activation_func
    if not config.gated_linear_unit:
        return partial(activation, function)
    if function is F.silu:
        return activation.swiglu

    def activate(inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return activation(function, gate) * up

    return activate


class MLP(GroupModule):
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` with ``gated_linear_unit``.

    Gate and up are the two sections of one weight (``sections=2``), so every rank holds matching parts of both.

    Args:
        config: sizes, activation and biases.
        tp_group: tensor-parallel group.
        ffn_hidden_size: width, if not that of the config.
        input_size: number of input features, if not ``config.hidden_size``.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp_group: ProcessGroup,
        *,
        ffn_hidden_size: int | None = None,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        width = config.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        assert width is not None
        self.activation_func = config.activation_func
        self.recomputes_activation = config.recompute.recomputes("mlp_act")
        self._activate = activated(config, tp_group)
        self.gated = config.gated_linear_unit
        sections = 2 if self.gated else 1
        arguments = layer_arguments(config, group=tp_group)
        self.linear_fc1 = ColumnLinear(
            config.hidden_size if input_size is None else input_size,
            sections * width,
            bias=config.add_bias_linear,
            init=config.init_method,
            sections=sections,
            **arguments,
        )
        self.linear_fc2 = RowLinear(
            width, config.hidden_size, bias=config.add_bias_linear, init=config.output_layer_init_method, **arguments
        )

    @property
    def input_layout(self) -> Layout:
        """Layout of hidden states, I or V(dim=0)."""
        return self.linear_fc1.input_layout

    @property
    def output_layout(self) -> Layout:
        """Layout of the result, which has the input's shape."""
        return self.linear_fc2.output_layout

    def forward(self, hidden: Tensor, *, sequence: SequenceView | None = None) -> Tensor:
        """Map ``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism) to the same shape.

        ``sequence`` has the positions of ``hidden``; None if all positions are split evenly, or not at all.
        """
        inner: Tensor = self.linear_fc1(hidden, sequence=sequence)
        if not self.recomputes_activation:
            output: Tensor = self.linear_fc2(self._activate(inner), sequence=sequence)
            return output
        recomputation = OutputRecomputation()
        output = self.linear_fc2(recomputation.run(self._activate, inner), sequence=sequence)
        recomputation.discard_(output)
        return output
