"""Communication buffers that are kept and used again."""

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

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
