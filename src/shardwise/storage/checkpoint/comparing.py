"""Differences between two checkpoints, tensor by tensor, at any layouts."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.core.tensor_files import StoredTensor, read_header
from shardwise.storage.checkpoint.manifest import Manifest
from shardwise.storage.checkpoint.storage import read_slice

# Compare at most 8 MiB of each tensor at a time.
_MOST_ELEMENTS = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """Difference between two checkpoints in one tensor.

    ``facts`` describes another dtype, shape or presence. ``first`` is the index of the first element with other bits,
    ``values`` its two values. ``distance`` is the norm of the difference over that of the first checkpoint's tensor,
    NaN if either has NaN.
    """

    name: str
    facts: str | None = None
    num_different: int = 0
    num_elements: int = 0
    first: tuple[int, ...] = ()
    values: tuple[float, float] = (0.0, 0.0)
    distance: float = 0.0


class StoredCheckpoint:
    """Reads boxes of global tensors from a checkpoint of any layout, or raises CheckpointError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._headers: dict[str, dict[str, StoredTensor]] = {}

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read a box of a tensor to the CPU, given by first index and number of indices in each dimension."""
        record = self.manifest.tensors[name]
        result = torch.empty(tuple(sizes), dtype=record.dtype)
        for chunk in record.chunks:
            ends = [
                (max(start, offset), min(start + size, offset + length))
                for start, size, offset, length in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in ends):
                continue
            if chunk.file not in self._headers:
                self._headers[chunk.file] = read_header(self.folder / chunk.file)
            inside = [start - offset for (start, _), offset in zip(ends, chunk.offsets, strict=True)]
            lengths = [stop - start for start, stop in ends]
            place = tuple(
                slice(start - begin, stop - begin) for (start, stop), begin in zip(ends, offsets, strict=True)
            )
            header = self._headers[chunk.file]
            result[place] = read_slice(self.folder, header, chunk, record.dtype, inside, lengths)
        return result


def tensor_differences(one: StoredCheckpoint, other: StoredCheckpoint) -> Iterator[TensorDifference]:
    """Yield the tensors whose bits differ, the optimizer's last. Only some MiB of a tensor are in memory at a time."""
    names = dict.fromkeys([*one.manifest.tensors, *other.manifest.tensors])
    for name in sorted(names, key=lambda name: name.startswith("optimizer.")):
        records = [checkpoint.manifest.tensors.get(name) for checkpoint in (one, other)]
        if records[0] is None or records[1] is None:
            yield TensorDifference(name, f"is in {(one if records[1] is None else other).folder} alone")
        elif (records[0].dtype, *records[0].shape) != (records[1].dtype, *records[1].shape):
            shown = " and ".join(f"{record.dtype} {list(record.shape)}" for record in records if record is not None)
            yield TensorDifference(name, f"is {shown}")
        elif (difference := _compared(name, one, other)) is not None:
            yield difference


def _compared(name: str, one: StoredCheckpoint, other: StoredCheckpoint) -> TensorDifference | None:
    record = one.manifest.tensors[name]
    count, values = 0, (0.0, 0.0)
    first: tuple[int, ...] = ()
    # Sums of squares of the difference, and of the first checkpoint's tensor.
    squares = torch.zeros(2, dtype=torch.float64)
    for offsets, sizes in _boxes(record.shape):
        left, right = one.read(name, offsets, sizes), other.read(name, offsets, sizes)
        different = _bits(left) != _bits(right)
        here = int(different.count_nonzero())
        if here and not count:
            place = int(different.flatten().nonzero()[0])
            inside = torch.unravel_index(torch.tensor(place), left.shape) if left.dim() else ()
            first = tuple(offset + int(index) for offset, index in zip(offsets, inside, strict=True))
            values = left.flatten()[place].item(), right.flatten()[place].item()
        count += here
        if record.dtype.is_floating_point:
            wide = left.double()
            squares[1] += wide.square().sum()
            if here:
                squares[0] += (wide - right.double()).square().sum()
    if not count:
        return None
    distance = float((squares[0] / squares[1]).sqrt()) if record.dtype.is_floating_point else float("nan")
    return TensorDifference(name, None, count, math.prod(record.shape), first, values, distance)


def _boxes(shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    behind = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if not shape:
        yield (), ()
        return
    cut = next(dim for dim, length in enumerate(behind) if length <= _MOST_ELEMENTS)
    step = max(1, _MOST_ELEMENTS // max(1, behind[cut]))
    rest = tuple(shape[cut + 1 :])
    for index in itertools.product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], step):
            yield (*index, start, *(0 for _ in rest)), (*(1 for _ in index), min(step, shape[cut] - start), *rest)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])
