"""Collectives that a compiler can trace: functional ones, waited for where their result is first wanted.

``torch.compile`` refuses ``async_op=True``. These are launched by one operator and waited for by another, so that what
lies between them overlaps in compiled code as it does in eager code.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.buffers import GlobalMemoryBuffer
from shardwise.core.communication.transports.torch_distributed import (
    is_even,
    join_gathered,
    packed_by_rank,
    shifted_sizes,
)
from shardwise.core.communication.transports.transport import Pending

_operators = torch.ops._c10d_functional


def _pending(launched: Tensor, finish: Callable[[Tensor], Tensor]) -> Pending:
    return Pending(None, lambda: finish(_operators.wait_tensor(launched)))


def all_reduce(tensor: Tensor, group: ProcessGroup, op: Any, may_overwrite: bool) -> Pending:
    """Start an all-reduce; the compiler plans memory."""
    name = "max" if op == dist.ReduceOp.MAX else "min" if op == dist.ReduceOp.MIN else "sum"
    return _pending(_operators.all_reduce(tensor.contiguous(), name, group.group_name), lambda result: result)


def all_gather(
    tensor: Tensor,
    group: ProcessGroup,
    dim: int,
    sizes: Sequence[int],
    buffer: GlobalMemoryBuffer | Tensor | None = None,
) -> Pending:
    """Start an all-gather of shards with ``sizes`` along ``dim``; the compiler plans memory."""
    shard = tensor.contiguous()
    if not is_even(sizes):
        short = max(sizes) - tensor.size(dim)
        shape = list(tensor.shape)
        shape[dim] = short
        shard = torch.cat([shard, tensor.new_zeros(shape)], dim)
    launched = _operators.all_gather_into_tensor(shard, len(sizes), group.group_name)
    return _pending(launched, lambda gathered: join_gathered(gathered, shard.shape, dim, sizes))


def reduce_scatter(
    tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int], may_overwrite: bool = False
) -> Pending:
    """Start a reduce-scatter into shards with ``sizes`` along ``dim``; the compiler plans memory."""
    if dim == 0 and is_even(sizes) and tensor.device.type != "cpu":
        launched = _operators.reduce_scatter_tensor(tensor.contiguous(), "sum", len(sizes), group.group_name)
        return _pending(launched, lambda result: result)
    packed, received_sizes, sent_sizes = packed_by_rank(tensor, group.rank(), dim, sizes)
    launched = _operators.all_to_all_single(packed, received_sizes, sent_sizes, group.group_name)
    shape = (len(sizes), *tensor.shape[:dim], sizes[group.rank()], *tensor.shape[dim + 1 :])
    return _pending(launched, lambda received: received.view(shape).sum(0, dtype=tensor.dtype))


def all_to_all(tensor: Tensor, group: ProcessGroup, output_sizes: Sequence[int], input_sizes: Sequence[int]) -> Pending:
    """Start an exchange of rows with every rank."""
    launched = _operators.all_to_all_single(
        tensor.contiguous(), list(output_sizes), list(input_sizes), group.group_name
    )
    return _pending(launched, lambda result: result)


def shift(tensor: Tensor, group: ProcessGroup, step: int, counts: Sequence[int], out: Tensor | None) -> Pending:
    """Start sending rows ``step`` places on in the ring, and receiving from as far back; the compiler plans memory."""
    sent, received = shifted_sizes(group, step, counts)
    launched = _operators.all_to_all_single(tensor.contiguous(), received, sent, group.group_name)
    return _pending(launched, lambda result: result)
