"""Batches: the named inputs of a model and a loss, their collation from rows, and their copy to a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORE_INDEX = -100
"""The label of a position that the loss ignores."""

Row = dict[str, NDArray[Any]]
"""Tensors of a sample by the names of ``Batch``, without dim ``b``; or of a group of ``k`` samples, with dim ``k``."""


@dataclass(frozen=True)
class Batch:
    """A batch of samples of one length.

    Attributes:
        tokens: ``[b, s]``, int64.
        labels: ``[b, s]``, int64, ids to predict; -100 is ignored.
        position_ids: ``[b, s]``, int64, for rows of several texts.
        document_ids: ``[b, s]``, int64, for rows of several texts. They stay on the CPU, where attention reads how long
            each text is.
        lengths: ``[b]``, int64, on request: number of positions that the text of each sample takes.
        reference: ``[b]``, fp64: log-probability of each answer under the reference model.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    lengths: Tensor | None = None
    reference: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return a batch with ``function`` applied to each tensor that a device needs."""
        moved = {name: function(tensor) for name, tensor in self.tensors.items() if name != "document_ids"}
        return Batch(**moved, document_ids=self.document_ids)


def stack(rows: Iterable[Row], *, with_lengths: bool) -> Batch:
    """Collate rows of one length into a batch; ``with_lengths`` includes the lengths of their texts."""
    several = list(rows)
    join = np.stack if several[0]["tokens"].ndim == 1 else np.concatenate
    names = [name for name in several[0] if with_lengths or name != "lengths"]
    return Batch(**{name: torch.from_numpy(join([row[name] for row in several])) for name in names})


class BatchMover:
    """Copies batches to a device on a separate stream, from pinned memory; on a CPU, batches are returned unchanged."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def start(self, batch: Batch) -> Batch:
        """Start to copy a batch; kernels launched after ``wait`` may use the result."""
        if self._stream is None or not batch.tokens.is_cpu:
            return batch
        computing = torch.accelerator.current_stream(self._device)

        def copied(tensor: Tensor) -> Tensor:
            copy = tensor.pin_memory().to(self._device, non_blocking=True)
            # The memory belongs to the copy stream and must not be reused before the current stream has used it.
            copy.record_stream(computing)
            return copy

        with self._stream:
            return batch.map(copied)

    def wait(self) -> None:
        """Make the current stream wait for all copies that were started."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def moved(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield each batch on the device while the next one is copied."""
        before: Batch | None = None
        for batch in batches:
            started = self.start(batch)
            if before is not None:
                yield before
            self.wait()
            before = started
        if before is not None:
            yield before
