"""Shared memory as a transport: which calls it takes, and how each begins."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import accounting
from shardwise.core.communication.buffers import GlobalMemoryBuffer, gather_buffer
from shardwise.core.communication.pending import Pending
from shardwise.core.communication.transports.shared_memory.channel import Channel
from shardwise.core.communication.transports.shared_memory.messages import (
    MOVABLE,
    SUMMABLE,
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
    Shift,
)

CARRIED = {
    "all_reduce": SUMMABLE,
    "all_gather": MOVABLE,
    "reduce_scatter": SUMMABLE,
    "all_to_all": MOVABLE,
    "shift": MOVABLE,
}
"""The dtypes that each operation takes."""

REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
"""What an all-reduce can do."""


class SharedMemory(Channel):
    """A group's channel with the collectives of ``Transport``; it compares all calls by itself."""

    def all_reduce(self, tensor: Tensor, group: ProcessGroup, op: Any, may_overwrite: bool) -> Pending:
        """As in ``Transport``."""
        accounting.record("all_reduce", tensor)
        own = tensor.detach()
        overwrites = may_overwrite and own.is_contiguous()
        result = own if overwrites else torch.empty_like(own, memory_format=torch.contiguous_format)
        return AllReduce(self, own, result, maximum=op == dist.ReduceOp.MAX)

    def all_gather(
        self,
        tensor: Tensor,
        group: ProcessGroup,
        dim: int,
        sizes: Sequence[int],
        buffer: GlobalMemoryBuffer | Tensor | None,
    ) -> Pending:
        """As in ``Transport``."""
        accounting.record("all_gather", tensor)
        return AllGather(self, tensor.detach(), dim, sizes, gather_buffer(buffer, tensor, dim, sizes))

    def reduce_scatter(
        self, tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int], may_overwrite: bool
    ) -> Pending:
        """As in ``Transport``."""
        accounting.record("reduce_scatter", tensor)
        return ReduceScatter(self, tensor.detach(), dim, sizes, overwrites=may_overwrite)

    def all_to_all(
        self, tensor: Tensor, group: ProcessGroup, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> Pending:
        """As in ``Transport``."""
        accounting.record("all_to_all", tensor)
        return AllToAll(self, tensor.detach(), output_sizes, input_sizes)

    def shift(
        self, tensor: Tensor, group: ProcessGroup, step: int, counts: Sequence[int], out: Tensor | None
    ) -> Pending:
        """As in ``Transport``."""
        accounting.record("all_to_all", tensor)
        return Shift(self, tensor.detach(), step, counts, out)
