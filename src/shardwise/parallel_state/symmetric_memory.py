"""Memory of one process group that each of its ranks can reach in the others (CUDA only)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.errors import TopologyError


class GlobalSymmetricMemoryBuffer:
    """A block of symmetric memory that is handed out again and again.

    What ``maybe_get_tensor`` returns is overwritten by whoever asks next. Making one is collective over the group.

    Args:
        size_in_mb: size of the block in MiB.
        process_group: the ranks that share it.

    Raises:
        TopologyError: there is no CUDA device here.
    """

    def __init__(self, size_in_mb: int, process_group: ProcessGroup) -> None:
        if not torch.cuda.is_available():
            raise TopologyError(
                f"symmetric memory exists only between CUDA devices, and rank {process_group.rank()} of the group has "
                "none; use get_global_memory_buffer()"
            )
        from torch.distributed import _symmetric_memory

        device = torch.device("cuda", torch.cuda.current_device())
        self.buffer = _symmetric_memory.empty(size_in_mb * 2**20, dtype=torch.uint8, device=device)
        self.handle = _symmetric_memory.rendezvous(self.buffer, process_group)

    def maybe_get_tensor(self, tensor_shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
        """The start of the block as a tensor of that shape and dtype.

        Returns:
            ``{"tensor": ..., "handle": ...}``, the handle being PyTorch's symmetric-memory handle of the block; both
            are None if the tensor is larger than the block.
        """
        num_bytes = math.prod(tensor_shape) * dtype.itemsize
        if num_bytes > self.buffer.numel():
            return {"tensor": None, "handle": None}
        return {"tensor": self.buffer[:num_bytes].view(dtype).view(tuple(tensor_shape)), "handle": self.handle}
