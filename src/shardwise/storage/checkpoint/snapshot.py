"""A copy of what is to be saved in host memory, from which a thread writes while the tensors go on changing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.storage.checkpoint.storage import Part


class Snapshot:
    """Host memory for what this rank writes of a state: as many bytes, kept from one save to the next.

    For tensors of an accelerator it is pinned, and the copies run in the stream of what was launched before them and of
    what will change the tensors: the host waits for them where it writes them, and nowhere else. PyTorch rounds each
    pinned tensor up to a power of two.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that it holds."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, parts: Sequence[Part]) -> list[Part]:
        """The parts with copies of their data, which are there after ``wait``. What an earlier call returned is gone.

        Raises:
            RuntimeError, MemoryError: there is not enough memory, or it cannot be pinned.
        """
        before, self._buffers, self._copied = self._buffers, {}, None
        copies = []
        for part in parts:
            source = part.data.detach()
            buffer = before.pop(part.key, None)
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type != "cpu")
            self._buffers[part.key] = buffer.copy_(source, non_blocking=True)
            copies.append(dataclasses.replace(part, data=buffer))
        device = next((part.data.device for part in parts if part.data.device.type != "cpu"), None)
        if device is not None:
            self._copied = torch.Event(device)
            self._copied.record(torch.accelerator.current_stream(device))
        return copies

    def wait(self) -> None:
        """Return when the copies are there; from any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def release(self) -> None:
        """Give the memory back."""
        self._buffers, self._copied = {}, None
