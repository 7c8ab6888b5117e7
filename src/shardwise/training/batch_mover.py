"""Batches on their way from the host to a device, while it computes on others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shardwise.data import Batch


class BatchMover:
    """Copies batches to a device on a stream of its own, from pinned memory, so that neither host nor device waits.

    On a CPU batches stay where they are.

    Args:
        device: where they are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def start(self, batch: Batch) -> Batch:
        """Start to move a batch; what is launched after ``wait`` may use the result."""
        if self._stream is None or not any(tensor.is_cpu for tensor in batch):
            return batch
        computing = torch.accelerator.current_stream(self._device)
        with self._stream:
            return tuple(self._copied(tensor, computing) for tensor in batch)

    def _copied(self, tensor: Tensor, computing: torch.Stream) -> Tensor:
        copied = tensor.pin_memory().to(self._device, non_blocking=True)
        # Its memory is the other stream's, and must not be given away before this one has used it.
        copied.record_stream(computing)
        return copied

    def wait(self) -> None:
        """Let what the device is given from now on wait until every batch that was started is there."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def moved(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Each batch, while the one behind it is on its way."""
        before: Batch | None = None
        for batch in batches:
            started = self.start(batch)
            if before is not None:
                yield before
            self.wait()
            before = started
        if before is not None:
            yield before
