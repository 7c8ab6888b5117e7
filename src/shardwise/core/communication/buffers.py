"""Communication buffers that are kept and used again."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_GATHERED = "all_gather"


class GlobalMemoryBuffer:
    """Named scratch memory that grows to the largest request and is handed out again and again.

    What ``get_tensor`` returns is overwritten by whoever asks for the same name and dtype next: use it only for values
    that are dead by then.
    """

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[Any]] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """A tensor with arbitrary values.

        Args:
            tensor_shape: its shape.
            dtype: its dtype.
            name: requests of one name, dtype and device share memory.
            mem_alloc_context: called for a context in which new memory is allocated, such as a CUDA memory pool's.
            device: PyTorch's default device if None.
        """
        numel = math.prod(tensor_shape)
        where = torch.empty(0, device=device).device
        key = (name, dtype, where)
        held = self.buffer.get(key)
        if held is None or held.numel() < numel:
            # Made in inference mode it could not be written to outside of it.
            with torch.inference_mode(False), (mem_alloc_context or contextlib.nullcontext)():
                held = self.buffer[key] = torch.empty(numel, dtype=dtype, device=where, requires_grad=False)
        return held[:numel].view(tuple(tensor_shape))


def gather_buffer(
    buffer: GlobalMemoryBuffer | Tensor | None, tensor: Tensor, dim: int, sizes: Sequence[int]
) -> Tensor | None:
    """Memory for what ranks gather along ``dim``, until the next gather into ``buffer``; None without a buffer."""
    if buffer is None or isinstance(buffer, Tensor):
        return buffer
    shape = (*tensor.shape[:dim], sum(sizes), *tensor.shape[dim + 1 :])
    return buffer.get_tensor(shape, tensor.dtype, _GATHERED, device=tensor.device)


@dataclass(frozen=True)
class OrdinaryMemory:
    """What stands in place of PyTorch's symmetric-memory handle where a block is ordinary memory.

    Attributes:
        rank, world_size: of the group.
        why: why the ranks do not reach each other's memory.
        group: whose ranks exchange by collectives what would lie in symmetric memory.
    """

    rank: int
    world_size: int
    why: str
    group: ProcessGroup


@dataclass(frozen=True, eq=False)
class Left:
    """What a row-parallel layer in fused mode has left for the column-parallel layer after it.

    Attributes:
        normed: ``[s, b, h]``, the whole normed input, in the buffer; None where the buffer is too small for it.
        weight: of the norm.
    """

    normed: Tensor | None
    weight: Tensor


class MemoryBlock:
    """A block of memory that is handed out again and again, whose addresses the ranks of a group may know.

    What ``maybe_get_tensor`` returns is overwritten by the next request.

    Args:
        buffer: the block, one dimension of bytes.
        handle: PyTorch's symmetric-memory handle of the block, or ``OrdinaryMemory``.

    Attributes:
        fused: by dtype and width of what lies in it, whether all ranks have agreed to exchange by one kernel.
    """

    def __init__(self, buffer: Tensor, handle: Any) -> None:
        self.buffer = buffer
        self.handle = handle
        self.fused: dict[tuple[torch.dtype, int], bool] = {}
        self._left: Left | None = None

    @property
    def is_symmetric(self) -> bool:
        """Whether the ranks reach each other's block."""
        return not isinstance(self.handle, OrdinaryMemory)

    @functools.cached_property
    def addresses(self) -> Tensor:
        """Where each rank's block lies in this process: int64 ``[t]``, on the block's device; in symmetric memory."""
        return torch.tensor(list(self.handle.buffer_ptrs), dtype=torch.int64, device=self.buffer.device)

    def maybe_get_tensor(self, tensor_shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
        """The start of the block as a tensor of that shape and dtype.

        Returns:
            ``{"tensor": ..., "handle": ...}``; both are None if the tensor is larger than the block.
        """
        num_bytes = math.prod(tensor_shape) * dtype.itemsize
        if num_bytes > self.buffer.numel():
            return {"tensor": None, "handle": None}
        return {"tensor": self.buffer[:num_bytes].view(dtype).view(tuple(tensor_shape)), "handle": self.handle}

    def leave(self, left: Left | None) -> None:
        """Remember what lies in the block for the next layer; None while it is being overwritten."""
        self._left = left

    def take(self) -> Left | None:
        """What was left since the last call; None if nothing."""
        left, self._left = self._left, None
        return left
