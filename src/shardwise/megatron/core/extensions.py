"""Names of Megatron's layers of Transformer Engine: the layers of this library, which need no such package."""

from typing import Any

import torch
from torch import Tensor

from shardwise.megatron.absent import absent_names
from shardwise.megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, checkpoint
from shardwise.megatron.core.transformer.layer_parts import (
    DotProductAttention,
    FusedLayerNorm,
    TELayerNormColumnParallelLinear as TELayerNormColumnParallelLinear,
)
from shardwise.megatron.surface import offer

__getattr__ = absent_names("extensions.transformer_engine")

TENorm = FusedLayerNorm
TEColumnParallelLinear = ColumnParallelLinear
TERowParallelLinear = RowParallelLinear
TEDotProductAttention = DotProductAttention


def te_checkpoint(
    forward_func: Any, distribute_saved_activations: bool, get_rng_state_tracker: Any, tp_group: Any, *args: Any
) -> Any:
    """Recompute ``forward_func(*args)`` in the backward, as ``tensor_parallel.checkpoint`` does.

    Args:
        forward_func: function of tensors.
        distribute_saved_activations: whether to keep the first input split over the tensor-parallel ranks.
        get_rng_state_tracker: no effect; the ambient streams are used.
        tp_group: tensor-parallel group; the ambient one if None.
        args: inputs.
    """
    return checkpoint(forward_func, distribute_saved_activations, *args, tp_group=tp_group)


def SplitAlongDim(mixed_x_layer: Tensor, split_dim: int, split_size_or_sections: Any) -> tuple[Tensor, ...]:  # noqa: N802
    """Split a tensor, as ``torch.split`` does."""
    return torch.split(mixed_x_layer, split_size_or_sections, split_dim)


offer(
    globals(), "TEColumnParallelLinear TEDotProductAttention TELayerNormColumnParallelLinear TENorm TERowParallelLinear"
)
