"""The attributes by which programs written for Megatron know how a parameter is split."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise import parallel_state
from shardwise.errors import AssertedConfigError
from shardwise.sharding import ParamLayout

_DEFAULTS: dict[str, Any] = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark how a parameter is split.

    Args:
        tensor: the parameter; gets ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``.
        is_parallel: whether it is split; False for a parameter that every rank holds whole.
        dim: dimension that is split.
        stride: number of sections split by themselves.

    Raises:
        AssertedConfigError: the tensor is marked otherwise already; nothing is changed.
    """
    wanted = {"tensor_model_parallel": is_parallel, "partition_dim": dim, "partition_stride": stride}
    for name, value in wanted.items():
        if getattr(tensor, name, value) != value:
            raise AssertedConfigError(
                f"the tensor of shape {list(tensor.shape)} is already marked {name}={getattr(tensor, name)}, which "
                f"cannot become {value}; delete the attribute first if it is wrong"
            )
    for name, value in wanted.items():
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Mark a tensor as one that every rank holds whole, where it is not marked yet."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Give ``destination_tensor`` the marks of ``source_tensor``, those that it has."""
    for name in _DEFAULTS:
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


def mark_parameter(param: Parameter, layout: ParamLayout) -> None:
    """``set_tensor_model_parallel_attributes`` by a layout."""
    is_split = layout.dim is not None
    set_tensor_model_parallel_attributes(param, is_split, -1 if layout.dim is None else layout.dim, layout.stride)
