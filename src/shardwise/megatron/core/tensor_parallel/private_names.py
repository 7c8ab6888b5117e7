"""Private names and globals of Megatron's modules that programs import all the same."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core import sharding
from shardwise.core.errors import ShardingError
from shardwise.core.initialization import InitMethod, initialize_shard_
from shardwise.core.random import EXPERT_PARALLEL_STREAM, TENSOR_PARALLEL_STREAM, streams
from shardwise.core.sharding import ParamLayout
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.tensor_parallel.attributes import set_tensor_model_parallel_attributes
from shardwise.megatron.errors import IndivisibleError, asserting

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
