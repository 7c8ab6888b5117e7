"""Slices of the tensors in a safetensors file, read without the rest of them.

A slice is read with ``pread`` and not through the safetensors library, which maps the file: of a mapped matrix, some
columns make nearly every page resident, so that each rank would hold, and have read, the whole of it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The format's names of the dtypes that PyTorch has."""

# The format's own limit.
_LONGEST_HEADER = 100_000_000
# What one system call reads at most; Linux stops a little under 2 GiB by itself.
_LONGEST_READ = 1 << 30


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file.

    Attributes:
        name: of the tensor, as it is stored.
        file: that holds it.
        dtype: the format's name of its dtype.
        shape: as it is stored.
        start: the first of its bytes in the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the file at ``path``, by name, after checking that all of their bytes are there.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or is not of the format.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(f"{path} is truncated or not a safetensors file: its header is not all there")
            header = json.loads(file.read(length))
        return {
            name: _stored_tensor(path, name, entry, 8 + length, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


def read_box(descriptor: int, stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A box of a tensor, on the CPU, and no other byte of it.

    Args:
        descriptor: of the open file.
        stored: where the tensor lies.
        offsets: first index of the box, in each dimension.
        sizes: number of indices, in each dimension.

    Raises:
        CheckpointError: PyTorch does not have its dtype, or the file became shorter.
        OSError: the file cannot be read.
    """
    if stored.dtype not in DTYPES:
        raise CheckpointError(
            f"tensor {stored.name!r} of {stored.file} is of dtype {stored.dtype}, which PyTorch lacks"
        )
    result = torch.empty(tuple(sizes), dtype=DTYPES[stored.dtype])
    if result.numel() == 0:
        return result
    target = memoryview(result.view(-1).view(torch.uint8).numpy().data)
    done = 0
    for start, length in _runs(stored.shape, offsets, sizes):
        begin, stop = stored.start + start * result.itemsize, done + length * result.itemsize
        while done < stop:
            count = os.preadv(descriptor, [target[done : min(stop, done + _LONGEST_READ)]], begin)
            if count == 0:
                raise CheckpointError(f"tensor {stored.name!r} is truncated: {stored.file} became shorter")
            done, begin = done + count, begin + count
    return result


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read the file at ``path``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First element and number of elements of each run of a box that lies in one piece, in the box's order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Of the dimensions behind the last that is cut, and of that one, everything lies together.
    cut = max((dim for dim in range(len(shape)) if sizes[dim] != shape[dim]), default=0)
    length = math.prod(sizes[cut:])
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for index in product(*map(range, sizes[:cut])):
        yield base + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


def _stored_tensor(path: Path, name: str, entry: Any, begin: int, file_size: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(length) for length in entry["shape"])
        start, stop = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header's entry of tensor {name!r} cannot be read ({error!r})") from error
    if begin + stop > file_size:
        raise CheckpointError(
            f"tensor {name!r} is truncated: {path} has {file_size} bytes, and the tensor ends at {begin + stop}"
        )
    fits = dtype not in DTYPES or stop - start == math.prod(shape) * DTYPES[dtype].itemsize
    if not fits or min((start, *shape)) < 0:
        raise CheckpointError(
            f"{path}: tensor {name!r} of {dtype} and shape {list(shape)} cannot have {stop - start} bytes"
        )
    return StoredTensor(name, path, dtype, shape, begin + start)
