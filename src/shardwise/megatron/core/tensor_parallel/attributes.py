"""The attributes by which programs know how a parameter is split, and private names of Megatron's that they import."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core import sharding
from shardwise.core.errors import ShardingError
from shardwise.core.initialization import InitMethod, initialize_shard_
from shardwise.core.random import EXPERT_PARALLEL_STREAM, TENSOR_PARALLEL_STREAM, streams
from shardwise.core.sharding import ParamLayout, Replicas
from shardwise.megatron.core import parallel_state
from shardwise.megatron.errors import AssertedConfigError, IndivisibleError, asserting
from shardwise.nn.replicated import set_replicas_

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


def mark_replicas(module: nn.Module) -> None:
    """Mark the parameters of a module, and of those in it, by the replicas that are stated of them."""
    for owner in module.modules():
        for name, replicas in getattr(owner, "param_replicas", {}).items():
            param: Any = getattr(owner, name)
            if param is not None:
                param.sequence_parallel = "tp" in replicas.summed_over
                if "embd" in replicas.summed_over:
                    param.shared_embedding = True
                if replicas.is_copy:
                    param.shared = True


def adopt_marks_(module: nn.Module) -> None:
    """State replicas by the marks that a program has set on parameters of a module, and of those in it.

    What is not marked stays as it was stated.
    """
    for owner in module.modules():
        layouts: dict[str, ParamLayout] = getattr(owner, "param_layouts", {})
        for name, param in owner.named_parameters(recurse=False):
            old: Replicas = getattr(owner, "param_replicas", {}).get(name, Replicas())
            is_split = name in layouts and layouts[name].dim is not None
            differs_over_tp = getattr(param, "tensor_model_parallel", "tp" not in old.same_over) and not is_split
            is_tied = getattr(param, "shared_embedding", "embd" in old.summed_over)
            same = {"tp": not differs_over_tp, "dp": True, "embd": is_tied}
            summed = {"tp": getattr(param, "sequence_parallel", "tp" in old.summed_over), "embd": is_tied}
            if not getattr(param, "allreduce", bool(old.same_over)):
                same = {}
            is_copy = bool(getattr(param, "shared", old.is_copy))
            new = Replicas(tuple(filter(same.get, same)), tuple(filter(summed.get, summed)), is_copy)
            if new != old:
                set_replicas_(owner, new, name)


def _mark(tensor: Any, is_parallel: bool, dim: int, stride: int) -> None:
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = is_parallel, dim, stride


# No extension is needed to accumulate weight gradients in place.
_grad_accum_fusion_available = True

# Transformer Engine is not used, whatever is installed.
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
    """Fill ``weight``, in place, with this rank's part of a whole one that is drawn on the CPU.

    Args:
        weight: this rank's part of ``[output_size, input_size]``; overwritten and marked.
        output_size: rows of the whole weight.
        input_size: its columns.
        per_partition_size: this rank's size along ``partition_dim``.
        partition_dim: dimension that is split.
        init_method: fills the whole weight in place.
        stride: number of sections, each split by itself.
        return_master_weight: return the whole weight, in ``params_dtype``.
        params_dtype: see above.
        rank: this rank in the tensor-parallel group; from the ambient topology, with ``world_size``, if None.
        world_size: number of its ranks.
        skip_set_tensor_parallel_attributes: leave the marks as they are.

    Raises:
        ShardingError: ``weight`` is not of this rank's shape.
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
    whole = ParamLayout.replicated(master_weight.shape, 1)
    initialize_shard_(master_weight, whole, 0, init_method)
    weight.data.copy_(layout.take(master_weight, rank))
    return master_weight.to(params_dtype)


def _initialize_affine_weight_gpu(
    weight: Tensor, init_method: InitMethod, partition_dim: int, stride: int = 1, is_expert: bool = False
) -> None:
    """Fill ``weight``, in place, from this rank's own random stream, and mark it.

    Its values depend on the number of ranks; the layers' own initialisation does not.

    Args:
        weight: this rank's part; overwritten and marked.
        init_method: fills it in place.
        partition_dim: dimension that is split.
        stride: number of sections, each split by itself.
        is_expert: draw from the experts' stream.

    Raises:
        TopologyError: there is no such stream.
    """
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    with torch.no_grad(), streams().fork(EXPERT_PARALLEL_STREAM if is_expert else TENSOR_PARALLEL_STREAM):
        init_method(weight)
