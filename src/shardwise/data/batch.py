"""A batch: what a model and a loss read of some samples, by name; rows become one, and it moves to a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORE_INDEX = -100
"""The label of a position that counts for nothing."""

Row = dict[str, NDArray[Any]]
"""One sample by the names of ``Batch``, without ``b``; or ``k`` samples that stay together, with ``k`` for ``b``."""


@dataclass(frozen=True)
class Batch:
    """Samples of one length.

    Attributes:
        tokens: ``[b, s]``, int64.
        labels: ``[b, s]`` ids to predict, int64, -100 where none counts. Of texts with labels ``[b, 1]`` int64 or
            ``[b, n]`` fp32, of words with labels ``[b, s]`` int64.
        position_ids, document_ids: ``[b, s]``, int64, of rows of several texts.
        lengths: ``[b]``, int64, on request: places that the text of each sample takes.
        tokentype_ids, attention_mask: ``[b, s]``, int64, for a model whose tokens see those behind them.
        reference: ``[b]``, fp64: log-probability of each answer by the model that training begins with.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    lengths: Tensor | None = None
    tokentype_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    reference: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch of ``function`` of each tensor."""
        return Batch(**{name: function(tensor) for name, tensor in self.tensors.items()})


def stack(rows: Iterable[Row], *, with_lengths: bool) -> Batch:
    """Rows of one length as a batch, with the lengths of their texts only if asked for."""
    several = list(rows)
    join = np.stack if several[0]["tokens"].ndim == 1 else np.concatenate
    names = [name for name in several[0] if with_lengths or name != "lengths"]
    return Batch(**{name: torch.from_numpy(join([row[name] for row in several])) for name in names})


class BatchMover:
    """Copies batches to a device on a separate stream, from pinned memory, so that neither host nor device waits.

    On a CPU batches stay where they are.

    Args:
        device: where they are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def start(self, batch: Batch) -> Batch:
        """Start to move a batch; what is launched after ``wait`` may use the result."""
        if self._stream is None or not any(tensor.is_cpu for tensor in batch.tensors.values()):
            return batch
        computing = torch.accelerator.current_stream(self._device)

        def copied(tensor: Tensor) -> Tensor:
            copy = tensor.pin_memory().to(self._device, non_blocking=True)
            # Its memory is the other stream's, and must not be given away before this one has used it.
            copy.record_stream(computing)
            return copy

        with self._stream:
            return batch.map(copied)

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
