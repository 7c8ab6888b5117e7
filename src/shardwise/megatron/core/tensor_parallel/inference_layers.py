"""Megatron's linear layers for inference, on ``shardwise.nn.inference``, which describes fused mode.

They need no Transformer Engine and no GPU, and split any size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.errors import ConfigError
from shardwise.core.initialization import InitMethod
from shardwise.kernels.norms import rms_norm
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
    """``ColumnParallelLinear`` without gradient; ``gather_output`` works with sequence parallelism too.

    Attributes:
        skip_norm_and_all_gather: the row-parallel layer before this one is in fused mode, and has written the whole
            normed input into symmetric memory; False at first.

    ``forward(x)`` takes ``[s/t, b, i]`` (``[s, b, i]`` without sequence parallelism) and returns ``[s, b, o/t]`` and
    the bias or None, as ``ColumnParallelLinear`` does; ``sequence_length`` says ``s`` where the ranks do not divide it.

    Raises:
        ConfigError: in ``forward``, an input of another dtype than the weight, or ``skip_norm_and_all_gather`` without
            such a layer.
        ShardingError: in ``forward``, an input that is not of the shape that the layer takes.
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

    def _finish(self, config: ModelParallelConfig) -> None:
        """Make the additional parameters of a subclass."""


class InferenceLayerNormColumnParallelLinear(InferenceColumnParallelLinear, InferenceNormColumnLinear):
    """The norm that the config names, and ``InferenceColumnParallelLinear``.

    The arguments are those of ``InferenceColumnParallelLinear``, with a ``TransformerConfig`` that describes the norm.

    Attributes:
        layer_norm_weight: ``[i]``, whole on every rank.
        layer_norm_bias: ``[i]``, or None for RMSNorm.
        eps: of the norm.

    Raises:
        ConfigError: a config without a norm.
    """

    def _finish(self, config: ModelParallelConfig) -> None:
        if not isinstance(config, TransformerConfig):
            raise ConfigError(f"a layer with a norm needs a TransformerConfig, and config is a {type(config).__name__}")
        self._make_norm(config.normalization, config.layernorm_epsilon, config.layernorm_zero_centered_gamma)


class InferenceRowParallelLinear(RowParallelLinear, InferenceRowLinear):
    """``RowParallelLinear`` without gradient, which may add the residual and apply the next norm in its one exchange.

    Args:
        input_size, output_size, config, init_method, bias, input_is_parallel, skip_bias_add, is_expert,
            tp_comm_buffer_name, tp_group, name, pg_collection: as ``RowParallelLinear``.

    Attributes:
        next_layer_norm_weights: of the norm after this layer, which makes its mode fused; None at first.
        residual: what ``_set_residual`` has set, until the next call in fused mode.
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
        """Set the weight of the norm after this layer, and for LayerNorm its bias; None unsets it.

        Raises:
            ConfigError: tensors that the config's norm does not take.
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
        """Set what the next call in fused mode adds, ``[s/t, b, o]``."""
        self.residual = residual

    def forward(  # type: ignore[override]  # Megatron's layers return pairs.
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the layer.

        Args:
            x: ``[s, b, i/t]``, or ``[s, b, i]`` without ``input_is_parallel``; not modified.
            residual: like the output, and added to it; in fused mode that of ``_set_residual`` if None.

        Returns:
            The output ``[s/t, b, o]`` (``[s, b, o]`` without sequence parallelism), and the bias with
            ``skip_bias_add``, else None. In fused mode the new residual, bias included, and None; its norm, whole, lies
            in symmetric memory.

        Raises:
            ShardingError: the input or the residual is not of the shape that the layer takes.
            ConfigError: of another dtype, or no residual in fused mode.
        """
        if not self.input_is_parallel and self.tp_size > 1:
            x = self.scatter(x)
        output = self._infer(x, residual, None if self.skip_bias_add else self.bias)
        return output, self.bias if self.skip_bias_add and self.next_norm is None else None


def _te_rms_norm_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x`` over its last dimension."""
    with torch.no_grad():
        return rms_norm(x, weight, eps)


@torch.no_grad()
def inference_all_gather_from_tensor_model_parallel_region(
    x: Tensor, tp_group: ProcessGroup | None = None, config: ModelParallelConfig | None = None
) -> Tensor:
    """``gather_from_tensor_model_parallel_region`` without gradient: all-gather of the last dimension.

    Args:
        x: ``[..., n/t]``, of one size on all ranks.
        tp_group: the ambient tensor-parallel group if None.
        config: accepted for programs that pass it; nothing depends on it.
    """
    return moves.gather(x, dim=-1, group=resolve_tensor_model_parallel_group(tp_group))


@torch.no_grad()
def inference_reduce_scatter_to_sequence_parallel_region(
    x: Tensor, tp_group: ProcessGroup | None = None, config: ModelParallelConfig | None = None
) -> Tensor:
    """``reduce_scatter_to_sequence_parallel_region`` without gradient: this rank's rows of the sum.

    Args:
        x: ``[s, ...]``, a partial sum.
        tp_group: the ambient tensor-parallel group if None.
        config: accepted for programs that pass it; nothing depends on it.
    """
    return moves.reduce_scatter(x, dim=0, group=resolve_tensor_model_parallel_group(tp_group))


def __getattr__(name: str) -> Any:
    # Programs import Megatron's exchanges from here too.
    return getattr(symmetric_exchanges, name)


offer(globals())
