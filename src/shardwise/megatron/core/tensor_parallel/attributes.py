"""The attributes by which programs written for Megatron know how a parameter is split."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.sharding import ParamLayout
from shardwise.megatron.core import parallel_state
from shardwise.megatron.errors import AssertedConfigError

# Imported by programs in spite of the underscore.
_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS: dict[str, Any] = {
    "expert_tp": False,
    "is_qkv": False,
    "qkv_split_shapes": None,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark how a parameter is split.

    Args:
        tensor: the parameter; gets ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``.
        is_parallel: whether it is split; False for a parameter that every rank holds whole.
        dim: dimension that is split.
        stride: number of sections split by themselves.

    Raises:
        AssertedConfigError: the tensor is marked already; nothing is changed.
    """
    for name in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
        if hasattr(tensor, name):
            raise AssertedConfigError(
                f"the tensor of shape {list(tensor.shape)} is already marked {name}={getattr(tensor, name)}; mark it "
                "once, and delete the attribute first if it is wrong"
            )
    _mark(tensor, is_parallel, dim, stride)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Mark a tensor as one that every rank holds whole, where it is not marked yet."""
    for name, value in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Give ``destination_tensor`` the marks of ``source_tensor``, those that it has."""
    for name in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: ProcessGroup | None = None) -> bool:
    """Whether this rank is the one that counts ``param`` in a sum over the tensor-parallel group, such as a norm.

    Args:
        param: a parameter; one without marks is held whole by every rank.
        tp_group: tensor-parallel group; the ambient one if None.

    Returns:
        True for a part of a split parameter, and on the first rank for a whole one.

    Raises:
        TopologyError: it matters which rank this is, no group was given and none initialised.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    rank = parallel_state.get_tensor_model_parallel_rank() if tp_group is None else tp_group.rank()
    return rank == 0


def mark_parameter(param: Tensor, layout: ParamLayout) -> None:
    """Mark a parameter by its layout, whatever its marks were: as when a layer is given initial values again."""
    _mark(param, layout.dim is not None, -1 if layout.dim is None else layout.dim, layout.stride)


def _mark(tensor: Any, is_parallel: bool, dim: int, stride: int) -> None:
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = is_parallel, dim, stride
