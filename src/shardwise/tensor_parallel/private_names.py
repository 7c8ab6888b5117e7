"""Private names of the reference's ``mappings`` and ``layers`` that programs import all the same.

Each calls what does the work. The moves here take no part in autograd. Like all moves they modify nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise import parallel_state
from shardwise.collectives import regions
from shardwise.errors import AssertedTopologyError, ShardingError
from shardwise.initialization import InitMethod, initialize_shard_
from shardwise.random import EXPERT_PARALLEL_STREAM, TENSOR_PARALLEL_STREAM, streams
from shardwise.sharding import ParamLayout
from shardwise.tensor_parallel.attributes import set_tensor_model_parallel_attributes


def _given(group: ProcessGroup | None) -> ProcessGroup:
    if group is None:
        raise AssertedTopologyError(
            "group is None; this function is given its group: pass parallel_state.get_tensor_model_parallel_group()"
        )
    return group


def _reduce(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of every rank's tensor; the argument stays as it is."""
    return regions._ReduceFromModelParallelRegion.symbolic(None, input_, _given(group))


def _split_along_last_dim(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's part of the last dimension."""
    return regions._ScatterToModelParallelRegion.symbolic(None, input_, _given(group))


def _split_along_first_dim(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's part of the first dimension."""
    return regions._ScatterToSequenceParallelRegion.symbolic(None, input_, _given(group))


def _gather_along_last_dim(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """Every rank's tensor, side by side along the last dimension."""
    return regions._GatherFromModelParallelRegion.symbolic(None, input_, _given(group))


def _gather_along_first_dim(
    input_: Tensor,
    group: ProcessGroup | None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Every rank's tensor, one after the other along the first dimension."""
    return _GatherFromSequenceParallelRegion.symbolic(
        None, input_, _given(group), True, output_split_sizes, use_global_buffer
    )


def _reduce_scatter_along_first_dim(
    input_: Tensor,
    group: ProcessGroup | None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """This rank's part, along the first dimension, of the sum of every rank's tensor."""
    return _ReduceScatterToSequenceParallelRegion.symbolic(
        None, input_, _given(group), input_split_sizes, use_global_buffer
    )


def _reduce_scatter_along_last_dim(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's part, along the last dimension, of the sum of every rank's tensor."""
    return regions._ReduceScatterToTensorParallelRegion.symbolic(None, input_, _given(group))


def _buffer(use_global_buffer: regions.Buffer) -> regions.Buffer:
    return parallel_state.get_global_memory_buffer() if use_global_buffer is True else use_global_buffer


class _GatherFromSequenceParallelRegion(regions._GatherFromSequenceParallelRegion):
    """The move of that name, for which ``use_global_buffer=True`` is the ambient topology's buffer."""

    @staticmethod
    def symbolic(
        graph: Any,
        input_: Tensor,
        group: ProcessGroup,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: regions.Sizes = None,
        use_global_buffer: regions.Buffer = False,
    ) -> Tensor:
        return regions._GatherFromSequenceParallelRegion.symbolic(
            graph, input_, group, tensor_parallel_output_grad, output_split_sizes, _buffer(use_global_buffer)
        )

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: ProcessGroup,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: regions.Sizes = None,
        use_global_buffer: regions.Buffer = False,
    ) -> Tensor:
        return regions._GatherFromSequenceParallelRegion.forward(
            ctx, input_, group, tensor_parallel_output_grad, output_split_sizes, _buffer(use_global_buffer)
        )


class _ReduceScatterToSequenceParallelRegion(regions._ReduceScatterToSequenceParallelRegion):
    """The move of that name, for which ``use_global_buffer=True`` is the ambient topology's buffer."""

    @staticmethod
    def symbolic(
        graph: Any,
        input_: Tensor,
        group: ProcessGroup,
        input_split_sizes: regions.Sizes = None,
        use_global_buffer: regions.Buffer = False,
    ) -> Tensor:
        return regions._ReduceScatterToSequenceParallelRegion.symbolic(
            graph, input_, group, input_split_sizes, _buffer(use_global_buffer)
        )

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: ProcessGroup,
        input_split_sizes: regions.Sizes = None,
        use_global_buffer: regions.Buffer = False,
    ) -> Tensor:
        return regions._ReduceScatterToSequenceParallelRegion.forward(
            ctx, input_, group, input_split_sizes, _buffer(use_global_buffer)
        )


# No extension is needed to accumulate weight gradients in place.
_grad_accum_fusion_available = True


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
