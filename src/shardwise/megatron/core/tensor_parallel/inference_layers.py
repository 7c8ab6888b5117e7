"""Megatron's linear layers for inference, based on ``shardwise.nn.inference``, which describes fused mode.

They need neither Transformer Engine nor a GPU, and split any size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.errors import ConfigError
from shardwise.core.initialization import InitMethod
from shardwise.kernels.norms import rms_norm
from shardwise.megatron.absent import ABSENT, absent_names
from shardwise.megatron.core import symmetric_exchanges
from shardwise.megatron.core.parallel_state import resolve_tensor_model_parallel_group
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel.attributes import HAVE_TE  # noqa: F401
from shardwise.megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig, TransformerConfig
from shardwise.megatron.errors import AssertedConfigError
from shardwise.megatron.surface import given, offer
from shardwise.nn.inference import InferenceColumnLinear, InferenceNormColumnLinear, InferenceRowLinear
from shardwise.nn.norm import NormFunction


class InferenceColumnParallelLinear(ColumnParallelLinear, InferenceColumnLinear):
    """``ColumnParallelLinear`` without gradient; ``gather_output`` also works with sequence parallelism.

    Attributes:
        skip_norm_and_all_gather: whether the previous row-parallel layer is in fused mode and has written the whole
            normalized input into symmetric memory; initially False.

    ``forward(x)`` takes ``[s/t, b, i]`` (``[s, b, i]`` without sequence parallelism) and returns ``[s, b, o/t]`` and
    the bias or None, like ``ColumnParallelLinear``; it needs ``sequence_length``, ``s``, if the ranks do not divide it.

    Raises:
        ConfigError: in ``forward``, the input does not have the weight's dtype, or there is no such previous layer for
            ``skip_norm_and_all_gather``.
        ShardingError: in ``forward``, the input has the wrong shape.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        stride: int = 1,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        ColumnParallelLinear.__init__(self, **given(locals(), but=("gather_output",)))
        self.gather_output = gather_output
        self._finish(config)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """See ``ColumnParallelLinear.forward``, whose first argument is ``x`` here."""
        return super().forward(x, *args, **options)

    def _finish(self, config: ModelParallelConfig) -> None:
        """Make the additional parameters of a subclass."""


class InferenceLayerNormColumnParallelLinear(InferenceColumnParallelLinear, InferenceNormColumnLinear):
    """The norm that the config names, followed by ``InferenceColumnParallelLinear``.

    The arguments are the same as in ``InferenceColumnParallelLinear``; a ``TransformerConfig`` describes the norm.

    Attributes:
        layer_norm_weight: ``[i]``, whole on every rank.
        layer_norm_bias: ``[i]``, or None for RMSNorm.
        eps: epsilon of the norm.

    Raises:
        ConfigError: the config does not describe a norm.
    """

    def _finish(self, config: ModelParallelConfig) -> None:
        if not isinstance(config, TransformerConfig):
            raise ConfigError(f"a layer with a norm needs a TransformerConfig, and config is a {type(config).__name__}")
        self._make_norm(config.normalization, config.layernorm_epsilon, config.layernorm_zero_centered_gamma)


class InferenceRowParallelLinear(RowParallelLinear, InferenceRowLinear):
    """``RowParallelLinear`` without gradient; fused mode adds the residual and applies the next norm in one exchange.

    Args:
        input_size, output_size, config, init_method, bias, input_is_parallel: as in ``RowParallelLinear``.
        skip_bias_add, is_expert, tp_comm_buffer_name, tp_group, name, pg_collection: as in ``RowParallelLinear``.

    Attributes:
        next_layer_norm_weights: weight of the norm after this layer, which turns on fused mode; initially None.
        residual: tensor from ``_set_residual``, until the next call in fused mode.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        RowParallelLinear.__init__(self, **given(locals()))

    @property
    def next_layer_norm_weights(self) -> Tensor | None:
        return None if self.next_norm is None else self.next_norm.weight

    def _set_next_layer_norm_weights(self, weights: Tensor | None, bias: Tensor | None = None) -> None:
        """Set the weight of the norm after this layer, and for LayerNorm its bias; None removes the norm.

        Raises:
            ConfigError: the tensors do not fit the config's norm.
        """
        if weights is None:
            self.next_norm = None
            return
        config = self.config
        if not isinstance(config, TransformerConfig):
            raise ConfigError(f"a norm after the layer needs a TransformerConfig, not a {type(config).__name__}")
        if (bias is None) != (config.normalization == "RMSNorm"):
            raise AssertedConfigError(
                f"the config's norm is {config.normalization}, and {'no' if bias is None else 'a'} bias is given; give "
                "layer_norm_weight and, for LayerNorm, layer_norm_bias of the next layer"
            )
        wanted = [self.output_size]
        for name, value in (("weight", weights), ("bias", bias)):
            if value is not None and list(value.shape) != wanted:
                raise ConfigError(f"the next norm's {name} has shape {list(value.shape)}; it needs {wanted}")
        zero_centered = config.layernorm_zero_centered_gamma
        self.next_norm = NormFunction(weights, bias, config.layernorm_epsilon, config.normalization, zero_centered)

    def _set_residual(self, residual: Tensor) -> None:
        """Set the residual that the next call in fused mode adds, ``[s/t, b, o]``."""
        self.residual = residual

    def forward(  # type: ignore[override]  # Megatron's layers return pairs.
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the layer.

        Args:
            x: ``[s, b, i/t]``, or ``[s, b, i]`` without ``input_is_parallel``; not modified.
            residual: tensor of the output's shape, added to the output; in fused mode None means that of
                ``_set_residual``.

        Returns:
            The output ``[s/t, b, o]`` (``[s, b, o]`` without sequence parallelism), and the bias with
            ``skip_bias_add``, else None. In fused mode the new residual, including the bias, and None; symmetric memory
            then holds the whole output of the next norm.

        Raises:
            ShardingError: the input or the residual has the wrong shape.
            ConfigError: the input or the residual has the wrong dtype, or fused mode has no residual.
        """
        if not self.input_is_parallel and self.tp_size > 1:
            x = self.scatter(x)
        output = self._infer(x, residual, None if self.skip_bias_add else self.bias)
        return output, self.bias if self.skip_bias_add and self.next_norm is None else None


def _te_rms_norm_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to ``x`` over its last dimension."""
    with torch.no_grad():
        return rms_norm(x, weight, eps)


@torch.no_grad()
def inference_all_gather_from_tensor_model_parallel_region(
    x: Tensor, tp_group: ProcessGroup | None = None, config: ModelParallelConfig | None = None
) -> Tensor:
    """``gather_from_tensor_model_parallel_region`` without gradient: all-gather along the last dimension.

    Args:
        x: ``[..., n/t]``, the same size on all ranks.
        tp_group: tensor-parallel group; the ambient one if None.
        config: no effect.
    """
    return moves.gather(x, dim=-1, group=resolve_tensor_model_parallel_group(tp_group))


@torch.no_grad()
def inference_reduce_scatter_to_sequence_parallel_region(
    x: Tensor, tp_group: ProcessGroup | None = None, config: ModelParallelConfig | None = None
) -> Tensor:
    """``reduce_scatter_to_sequence_parallel_region`` without gradient: this rank's rows of the sum.

    Args:
        x: ``[s, ...]``, a partial sum.
        tp_group: tensor-parallel group; the ambient one if None.
        config: no effect.
    """
    return moves.reduce_scatter(x, dim=0, group=resolve_tensor_model_parallel_group(tp_group))


_absent = absent_names("tensor_parallel.inference_layers")


def __getattr__(name: str) -> Any:
    # Programs also import Megatron's exchanges from this module.
    return _absent(name) if name in ABSENT["tensor_parallel.inference_layers"] else getattr(symmetric_exchanges, name)


offer(globals())
