"""Megatron's attributes of split parameters, and private names of Megatron that programs import."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core import sharding
from shardwise.core.errors import ShardingError
from shardwise.core.initialization import InitMethod, initialize_shard_
from shardwise.core.random import EXPERT_PARALLEL_STREAM, TENSOR_PARALLEL_STREAM, streams
from shardwise.core.sharding import ParamLayout
from shardwise.megatron.core import parallel_state
from shardwise.megatron.errors import AssertedConfigError, IndivisibleError, asserting
from shardwise.megatron.surface import offer

# Programs import it despite the underscore.
_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS: dict[str, Any] = {
    "expert_tp": False,
    "is_qkv": False,
    "qkv_split_shapes": None,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Set the attributes that describe how a parameter is split.

    Args:
        tensor: the parameter; gets ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``.
        is_parallel: whether it is split; False for a parameter that every rank holds whole.
        dim: split dimension.
        stride: number of sections, each split separately.

    Raises:
        AssertedConfigError: the tensor has marks already; nothing is changed.
    """
    for name in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
        if hasattr(tensor, name):
            raise AssertedConfigError(
                f"the tensor of shape {list(tensor.shape)} is already marked {name}={getattr(tensor, name)}; mark it "
                "once, and delete the attribute first if it is wrong"
            )
    _mark(tensor, is_parallel, dim, stride)


def _mark(tensor: Any, is_parallel: bool, dim: int, stride: int) -> None:
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = is_parallel, dim, stride


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Set the missing marks of a tensor to those of a tensor that every rank holds whole."""
    for name, value in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copy the existing marks of ``source_tensor`` to ``destination_tensor``."""
    for name in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: ProcessGroup | None = None) -> bool:
    """True if this rank counts ``param`` in a sum over the tensor-parallel group, such as a norm.

    Args:
        param: a parameter; without marks, it counts as whole on every rank.
        tp_group: tensor-parallel group; the ambient one if None.

    Returns:
        True for a part of a split parameter, and on the first rank for a whole parameter.

    Raises:
        TopologyError: the parameter is whole, no group is given and none is initialised.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    rank = parallel_state.get_tensor_model_parallel_rank() if tp_group is None else tp_group.rank()
    return rank == 0


# Accumulating weight gradients in-place needs no extension.
_grad_accum_fusion_available = True

# Transformer Engine is not used, even if it is installed.
HAVE_TE = False

custom_fwd = partial(torch.amp.custom_fwd, device_type="cuda")
custom_bwd = partial(torch.amp.custom_bwd, device_type="cuda")
dist_all_gather_func = dist.all_gather_into_tensor
dist_reduce_scatter_func = dist.reduce_scatter_tensor
divide = asserting(IndivisibleError)(sharding.divide)
ensure_divisibility = asserting(IndivisibleError)(sharding.ensure_divisibility)


def _initialize_affine_weight_cpu(
    weight: Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: InitMethod,
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    params_dtype: torch.dtype = torch.float32,
    rank: int | None = None,
    world_size: int | None = None,
    skip_set_tensor_parallel_attributes: bool = False,
) -> Tensor | None:
    """Fill ``weight`` in-place with this rank's part of a whole weight that is drawn on the CPU.

    Args:
        weight: this rank's part of ``[output_size, input_size]``; overwritten and marked.
        per_partition_size: this rank's size along ``partition_dim``, the split dimension.
        init_method: function that fills the whole weight in-place.
        stride: number of sections, each split separately.
        return_master_weight: whether to return the whole weight, in ``params_dtype``.
        rank, world_size: rank in the tensor-parallel group, and its size; those of the ambient group if None.
        skip_set_tensor_parallel_attributes: whether to leave ``weight`` unmarked.

    Raises:
        ShardingError: ``weight`` does not have this rank's shape.
    """
    if rank is None or world_size is None:
        rank = parallel_state.get_tensor_model_parallel_rank()
        world_size = parallel_state.get_tensor_model_parallel_world_size()
    divide((output_size, input_size)[partition_dim], stride)
    layout = ParamLayout.split((output_size, input_size), partition_dim, world_size, stride=stride)
    own = layout.local_shape(rank)
    if tuple(weight.shape) != own or own[partition_dim] != per_partition_size:
        raise ShardingError(
            f"weight has shape {list(weight.shape)} and per_partition_size is {per_partition_size}; rank {rank} of "
            f"{world_size} holds {list(own)} of [{output_size}, {input_size}]"
        )
    if not skip_set_tensor_parallel_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    if not return_master_weight:
        initialize_shard_(weight.data, layout, rank, init_method, on_cpu=True)
        return None
    master_weight = torch.empty(output_size, input_size, dtype=torch.float32, device="cpu")
    return _initialize_whole_(master_weight, weight, layout, rank, init_method).to(params_dtype)


def _initialize_whole_(
    whole: Tensor, shard: Tensor, layout: ParamLayout, rank: int, init_method: InitMethod, *, on_cpu: bool = False
) -> Tensor:
    """Fill ``whole`` with the values that any number of ranks would get, and ``shard`` with the part of ``rank``."""
    alone = ParamLayout(layout.global_shape, layout.dim, (((0, layout.global_shape[layout.dim or 0]),),), 1)
    initialize_shard_(whole, alone, 0, init_method, on_cpu=on_cpu)
    with torch.no_grad():
        shard.copy_(layout.take(whole, rank))
    return whole


def _initialize_affine_weight_gpu(
    weight: Tensor, init_method: InitMethod, partition_dim: int, stride: int = 1, is_expert: bool = False
) -> None:
    """Fill ``weight`` in-place from this rank's random stream, and mark it.

    The values depend on the number of ranks, unlike the layers' own initialisation.

    ``is_expert`` selects the experts' stream. Raises TopologyError if there is no such stream.
    """
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    with torch.no_grad(), streams().fork(EXPERT_PARALLEL_STREAM if is_expert else TENSOR_PARALLEL_STREAM):
        init_method(weight)


offer(globals())
