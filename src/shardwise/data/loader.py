"""Which samples make up which batch: a pure function of the seed and the step, the same at every layout.

Nothing is remembered between batches, so a run resumes at any step, and on any number of ranks, with the samples that
it would have seen. ``BatchMover`` takes the batches to a device while it computes on others.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.data.tokens import TokenDataset

Batch = tuple[Tensor, ...]
"""``(tokens [b, s], labels [b, s])``, of packed samples also ``position_ids`` and ``document_ids`` ``[b, s]``, and of
others on request ``lengths`` ``[b, 1]``, places that each takes; int64, on the CPU."""


class Windows(Protocol):
    """What is measured on: rows of one length, or several at a time, in which every label counts once."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, index: int) -> Sequence[NDArray[Any]]:
        """A row: tokens, labels, and what else a ``Batch`` has."""

    def text_lengths(self, index: int) -> Sequence[NDArray[Any]]:
        """How many places the text of a row takes, as ``Rows.text_lengths``; nothing if the row says it otherwise."""

    def padding(self) -> Sequence[NDArray[Any]]:
        """A row in which no label counts."""


class TextWindows(Windows, Protocol):
    """What is measured on, of which every token has a share of a text."""

    def bits_per_byte(self, total_nll: float) -> float:
        """Bits that the model spends on a byte of the text, if it spends ``total_nll`` on all labels, in nats."""


# An epoch's numbers are drawn for a purpose each, so that its order and its offset are independent.
_FOR_ORDER = 0
_FOR_OFFSET = 1


def _random_uint64(seed: int, epoch: int, purpose: int, count: int) -> NDArray[np.uint64]:
    # NumPy guarantees a bit generator's raw numbers across versions, but not what Generator derives from them.
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch, purpose)))
    return np.asarray(bits.random_raw(count), dtype=np.uint64)


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    order = np.argsort(_random_uint64(seed, epoch, _FOR_ORDER, num_samples), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def _check_rank(dp_rank: int, dp_size: int, micro_batch_size: int) -> None:
    if dp_size < 1 or micro_batch_size < 1:
        raise ConfigError(f"data-parallel size {dp_size} and micro_batch_size {micro_batch_size} must be at least 1")
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"data-parallel rank {dp_rank} is not one of {dp_size}")


@dataclass(frozen=True)
class BatchSchedule:
    """The order of samples: each epoch is a new permutation of all of them, and batches follow one another through it.

    Attributes:
        num_samples: samples in an epoch.
        global_batch_size: samples in a step, over all data-parallel ranks. May exceed an epoch.
        seed: not negative.

    Raises:
        ConfigError: a size below 1 or a negative seed.
    """

    num_samples: int
    global_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.global_batch_size < 1 or self.seed < 0:
            raise ConfigError(
                f"num_samples {self.num_samples} and global_batch_size {self.global_batch_size} must be at least 1, "
                f"and seed {self.seed} at least 0"
            )

    def _places(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Epoch, and place in it, of each sample of a step."""
        if step < 0:
            raise ConfigError(f"step {step} must be at least 0")
        first = step * self.global_batch_size
        epochs, places = np.divmod(np.arange(first, first + self.global_batch_size, dtype=np.int64), self.num_samples)
        return epochs, places

    def epochs(self, step: int) -> NDArray[np.int64]:
        """``[global_batch_size]``: the epoch, from 0, of each sample of a step."""
        return self._places(step)[0]

    def global_batch(self, step: int) -> NDArray[np.int64]:
        """``[global_batch_size]``: the samples of a step, in order.

        Args:
            step: the step, from 0.

        Raises:
            ConfigError: ``step`` is negative.
        """
        epochs, places = self._places(step)
        samples = np.empty_like(places)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            samples[of_epoch] = _epoch_order(self.seed, int(epoch), self.num_samples)[places[of_epoch]]
        return samples

    def micro_batches(self, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[slice]:
        """Which parts of a global batch one rank computes on, one after the other.

        A rank has a contiguous part of the global batch: all ranks' parts in order are the whole, at every layout.

        Args:
            dp_rank: data-parallel rank.
            dp_size: number of data-parallel ranks.
            micro_batch_size: samples in one forward pass.

        Raises:
            ConfigError: the global batch does not divide into micro-batches of all ranks.
        """
        _check_rank(dp_rank, dp_size, micro_batch_size)
        together = dp_size * micro_batch_size
        if self.global_batch_size % together:
            near = max(together, self.global_batch_size - self.global_batch_size % together)
            raise ConfigError(
                f"global_batch_size {self.global_batch_size} is not divisible by data-parallel size {dp_size} x "
                f"micro_batch_size {micro_batch_size} = {together}; use a multiple such as {near}"
            )
        of_rank = self.global_batch_size // dp_size
        first = dp_rank * of_rank
        return [slice(start, start + micro_batch_size) for start in range(first, first + of_rank, micro_batch_size)]


class DataLoader:
    """The batches of a dataset. In each epoch all samples are shifted by another offset, so texts are cut anew.

    Args:
        dataset: gives the samples.
        global_batch_size: samples in a step, over all data-parallel ranks.
        seed: seed of the order and the offsets.

    Raises:
        ConfigError: ``global_batch_size`` is less than 1, or the seed negative.
    """

    def __init__(self, dataset: TokenDataset, global_batch_size: int, seed: int) -> None:
        self.dataset = dataset
        self.schedule = BatchSchedule(len(dataset), global_batch_size, seed)

    def num_labels(self, step: int) -> int:
        """Labels that count in a step, over all data-parallel ranks: all of them."""
        return self.num_tokens(step)

    def num_tokens(self, step: int) -> int:
        """Tokens in a step, over all data-parallel ranks."""
        return self.schedule.global_batch_size * self.dataset.sequence_length

    def _offset(self, epoch: int) -> int:
        draw = _random_uint64(self.schedule.seed, epoch, _FOR_OFFSET, 1)[0]
        return int(draw) % self.dataset.sequence_length

    def batch(
        self, step: int, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int | None = None
    ) -> Iterator[Batch]:
        """The micro-batches of one rank in one step.

        Args:
            step: the step, from 0; steps may be asked for in any order.
            dp_rank: data-parallel rank.
            dp_size: number of data-parallel ranks.
            micro_batch_size: ``b``, samples in one forward pass; all that the rank has if None.

        Returns:
            ``global_batch_size / (dp_size * b)`` pairs ``(tokens [b, s], labels [b, s])``, int64, made as they are
            asked for.

        Raises:
            ConfigError: the global batch does not divide into micro-batches of all ranks, no such rank, or a negative
                step. At the call, before anything is asked for.
        """
        if micro_batch_size is None:
            micro_batch_size = max(1, self.schedule.global_batch_size // max(1, dp_size))
        slices = self.schedule.micro_batches(dp_rank, dp_size, micro_batch_size)
        samples = self.schedule.global_batch(step)
        epochs = self.schedule.epochs(step)
        offsets = {epoch: self._offset(epoch) for epoch in set(epochs.tolist())}
        return (
            stack(
                self.dataset.sample(index, offsets[epoch])
                for index, epoch in zip(samples[part].tolist(), epochs[part].tolist(), strict=True)
            )
            for part in slices
        )


def evaluation_batches(
    windows: Windows, micro_batch_size: int, dp_rank: int = 0, dp_size: int = 1, *, with_lengths: bool = False
) -> Iterator[Batch]:
    """The evaluation windows of one rank, in batches of one size.

    Every rank gets the same number of batches, filled up with windows in which no label counts. Over all ranks, every
    token is a label exactly once.

    Args:
        windows: all windows.
        micro_batch_size: ``b``, windows in one forward pass.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
        with_lengths: a batch of windows that have lengths of their own ends with these, ``[b, 1]``.

    Returns:
        Pairs ``(tokens [b, s], labels [b, s])``, int64, made as they are asked for.

    Raises:
        ConfigError: ``micro_batch_size`` is less than 1, or no such rank.
    """
    _check_rank(dp_rank, dp_size, micro_batch_size)
    together = dp_size * micro_batch_size
    firsts = range(dp_rank * micro_batch_size, -(-len(windows) // together) * together, together)

    def row(index: int) -> Sequence[NDArray[Any]]:
        values = windows[index] if index < len(windows) else windows.padding()
        # What only fills a batch has a length, too, that of the last window.
        return (*values, *windows.text_lengths(min(index, len(windows) - 1))) if with_lengths else values

    return (stack(map(row, range(first, first + micro_batch_size))) for first in firsts)


def stack(rows: Iterable[Sequence[NDArray[Any]]]) -> Batch:
    """Rows of one length as a batch; arrays ``[k, s]`` are ``k`` rows each."""
    return tuple(
        torch.from_numpy(np.stack(arrays) if arrays[0].ndim == 1 else np.concatenate(arrays))
        for arrays in zip(*rows, strict=True)
    )


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
