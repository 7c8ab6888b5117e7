"""Megatron's exchanges in symmetric memory.

``symm_mem_hdl`` is the ``handle`` from ``GlobalSymmetricMemoryBuffer.maybe_get_tensor``. With PyTorch's handle, each
rank reads and writes the other ranks' blocks between two barriers. With an ``OrdinaryMemory``, as on a CPU, the ranks
use collectives. A tensor begins at the start of the block unless there is an offset.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.core.communication.collectives import all_gather, reduce_scatter
from shardwise.core.communication.symmetric_memory import OrdinaryMemory
from shardwise.kernels.norms import reduce_norm_
from shardwise.megatron.errors import AssertedShardingError
from shardwise.megatron.surface import offer


def are_tensors_nvls_eligible(*tensors: Tensor) -> bool:
    """True if there is at least one tensor, because any tensor can be exchanged on any device."""
    return bool(tensors)


def multimem_all_gather(
    output_tensor: Tensor,
    input_tensor: Tensor,
    symm_mem_hdl: Any,
    byte_offset: int = 0,
    barrier_before: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Concatenate all ranks' inputs into ``output_tensor`` on each rank.

    Args:
        output_tensor: tensor in symmetric memory with ``t`` times as many elements; overwritten and returned.
        input_tensor: this rank's input; not modified.
        symm_mem_hdl: handle of the memory.
        byte_offset: start of ``output_tensor`` in the block.
        barrier_before: no effect, because a barrier always precedes the writes.
        kwargs: arguments of Megatron's kernel; no effect.

    Raises:
        AssertedShardingError: the numbers of elements do not match.
    """
    _check(output_tensor, input_tensor, symm_mem_hdl)
    if isinstance(symm_mem_hdl, OrdinaryMemory):
        output_tensor.view(-1).copy_(all_gather(input_tensor.reshape(-1), group=symm_mem_hdl.group))
        return output_tensor
    with _blocks(symm_mem_hdl, output_tensor, byte_offset) as blocks:
        for block in blocks:
            block.view(symm_mem_hdl.world_size, -1)[symm_mem_hdl.rank].copy_(input_tensor.reshape(-1))
    return output_tensor


def multimem_reduce_scatter(output_tensor: Tensor, input_tensor: Tensor, symm_mem_hdl: Any, **kwargs: Any) -> Tensor:
    """Sum all ranks' inputs, and give each rank its part of the sum.

    Args:
        output_tensor: this rank's part; overwritten and returned.
        input_tensor: tensor in symmetric memory with ``t`` times as many elements; summed in fp32 (fp64 for fp64).
        symm_mem_hdl: handle of the memory.
        kwargs: arguments of Megatron's kernel; no effect.

    Raises:
        AssertedShardingError: the numbers of elements do not match.
    """
    _check(input_tensor, output_tensor, symm_mem_hdl)
    if isinstance(symm_mem_hdl, OrdinaryMemory):
        output_tensor.view(-1).copy_(reduce_scatter(input_tensor.reshape(-1), group=symm_mem_hdl.group))
        return output_tensor
    wide = torch.promote_types(input_tensor.dtype, torch.float32)
    with _blocks(symm_mem_hdl, input_tensor) as blocks:
        parts = (block.view(symm_mem_hdl.world_size, -1)[symm_mem_hdl.rank].to(wide) for block in blocks)
        output_tensor.view(-1).copy_(sum(parts, start=torch.zeros((), dtype=wide, device=input_tensor.device)))
    return output_tensor


def fused_multimem_rs_add_norm_ag(
    residual_output_tensor: Tensor,
    input_tensor: Tensor,
    symm_mem_hdl: Any,
    residual_input_tensor: Tensor,
    rms_norm_weights: Tensor,
    eps: float,
) -> Tensor:
    """Reduce-scatter, add the residual, apply RMSNorm and all-gather.

    Args:
        residual_output_tensor: ``[s/t, b, h]``, overwritten with the new residual and returned.
        input_tensor: ``[s, b, h]`` in symmetric memory, this rank's partial sum; overwritten with the whole normalized
            tensor, the same on every rank.
        symm_mem_hdl: handle of the memory.
        residual_input_tensor: ``[s/t, b, h]``, this rank's shard of the residual.
        rms_norm_weights: ``[h]``.
        eps: constant added to the mean square.

    Raises:
        AssertedShardingError: the numbers of elements do not match.
    """
    _check(input_tensor, residual_input_tensor, symm_mem_hdl)
    rows = input_tensor.view(-1, input_tensor.size(-1))
    residual = residual_input_tensor.reshape(-1, input_tensor.size(-1))
    if isinstance(symm_mem_hdl, OrdinaryMemory):
        group = symm_mem_hdl.group
        normed = reduce_scatter(rows, group=group)
        new = reduce_norm_([normed], 0, residual, None, rms_norm_weights, None, eps)
        rows.copy_(all_gather(normed, group=group))
    else:
        first = symm_mem_hdl.rank * residual.size(0)
        with _blocks(symm_mem_hdl, rows) as blocks:
            new = reduce_norm_(blocks, first, residual, None, rms_norm_weights, None, eps)
    return residual_output_tensor.copy_(new.view(residual_output_tensor.shape))


def _check(whole: Tensor, part: Tensor, handle: Any) -> None:
    if whole.numel() != part.numel() * handle.world_size:
        raise AssertedShardingError(
            f"{handle.world_size} ranks with {part.numel()} elements each have "
            f"{part.numel() * handle.world_size}, and the tensor in symmetric memory has {whole.numel()}"
        )


@contextlib.contextmanager
def _blocks(handle: Any, like: Tensor, byte_offset: int = 0) -> Iterator[list[Tensor]]:
    """Yield, between two barriers, each rank's tensor of this shape and dtype at the same offset in its block."""
    start = byte_offset // like.element_size()
    handle.barrier(channel=0)
    yield [handle.get_buffer(rank, tuple(like.shape), like.dtype, start) for rank in range(handle.world_size)]
    handle.barrier(channel=0)


offer(globals())
