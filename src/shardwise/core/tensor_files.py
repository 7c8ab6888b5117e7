"""Read slices of tensors from safetensors files, and write tensors to them one by one.

Slices are read with ``pread`` and not with the safetensors library, which maps the file into memory. Reading a few
columns of a mapped matrix makes nearly every page resident, so that each rank would read and hold the whole matrix. The
library also writes all tensors of a file at once, which requires all of them in CPU memory.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from shardwise.core.atomic_files import open_regular
from shardwise.core.errors import CheckpointError
from shardwise.core.json_text import MAX_TABLE_BYTES, parse_json, shown

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
"""PyTorch's dtypes, by their names in the format."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_ELEMENTS = (1 << 63) - 1
"""Largest number of elements that PyTorch can count."""

# PyTorch itself has the same limit on the number of dimensions.
_MAX_DIMS = 64
# One system call reads at most this much; Linux itself stops a little below 2 GiB.
_LONGEST_READ = 1 << 30


@dataclass(frozen=True)
class StoredTensor:
    """Position of a tensor in a file; ``dtype`` is the format's name, ``start`` the position of its first byte."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the header of the file at ``path`` and return its tensors by name, after checking the file's size."""
    try:
        with open_regular(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            size = os.fstat(descriptor).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise _damaged(f"{path} is truncated or not a safetensors file: its header is not all there")
            if length > MAX_TABLE_BYTES:
                raise _damaged(
                    f"{path} is not a safetensors file: its header has {length} bytes, more than {MAX_TABLE_BYTES}"
                )
            header = parse_json(file.read(length))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise _damaged(f"{path} is not a safetensors file: of its header, {error}") from error
    header.pop("__metadata__", None)
    tensors = {name: _stored_tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}
    _check_filled(path, tensors.values(), 8 + length, size)
    return tensors


def read_box(stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Read a box of a tensor to the CPU, without reading any other byte."""
    if stored.dtype not in DTYPES:
        raise CheckpointError(
            f"tensor {stored.name!r} of {stored.file} is of dtype {stored.dtype}, which PyTorch lacks"
        )
    result = torch.empty(tuple(sizes), dtype=DTYPES[stored.dtype])
    if result.numel() == 0:
        return result
    target = memoryview(result.view(-1).view(torch.uint8).numpy().data)
    done = 0
    try:
        with open_regular(stored.file) as descriptor:
            for start, length in _contiguous(stored.shape, offsets, sizes):
                begin, stop = stored.start + start * result.itemsize, done + length * result.itemsize
                while done < stop:
                    count = os.preadv(descriptor, [target[done : min(stop, done + _LONGEST_READ)]], begin)
                    if count == 0:
                        raise CheckpointError(f"tensor {stored.name!r} is truncated: {stored.file} became shorter")
                    done, begin = done + count, begin + count
    except OSError as error:
        raise CheckpointError(f"cannot read tensor {stored.name!r}: {stored.file}: {error.strerror}") from error
    return result


def check_finite(values: Tensor, what: str, *, dtype: torch.dtype | None = None) -> None:
    """Check that weights are finite, without a copy of them.

    Args:
        values: the weights, on any device; the host waits for it.
        what: the tensor, for the message.
        dtype: dtype in which the weights will be held; None for their own.

    Raises:
        CheckpointError: a value is NaN or infinite, or ``dtype`` cannot hold it.
    """
    if not values.is_floating_point() or values.numel() == 0:
        return
    # Both are NaN if a value is.
    extremes = torch.stack(torch.aminmax(values.detach()))
    if not extremes.isfinite().all():
        raise CheckpointError(f"{what} has values that are not finite, which are neither loaded nor saved")
    if dtype is not None and not extremes.to(dtype).isfinite().all():
        raise CheckpointError(
            f"{what} has values of up to {float(extremes.abs().max()):.3g}, which {str(dtype).removeprefix('torch.')} "
            "cannot hold; use another dtype"
        )


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(f"{what}; use another copy of it")


def _contiguous(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the first element and the number of elements of each contiguous part of a box, in the box's order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Elements are contiguous from the last cut dimension on.
    cut = max((dim for dim in range(len(shape)) if sizes[dim] != shape[dim]), default=0)
    length = math.prod(sizes[cut:])
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for index in product(*map(range, sizes[:cut])):
        yield base + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


def is_shape(value: Any) -> TypeGuard[list[int]]:
    """True if a value from a file is a list of sizes that a tensor can have."""
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMS
        # isinstance would accept True and False, which are integers too.
        and all(type(length) is int and length >= 0 for length in value)
        and math.prod(length or 1 for length in value) <= MAX_ELEMENTS
    )


def _stored_tensor(path: Path, name: str, entry: Any, begin: int, file_size: int) -> StoredTensor:
    def wrong(field: str, value: object, expected: str) -> CheckpointError:
        return _damaged(f"{path}: {field} of tensor {shown(name)} is {shown(value)}; it must be {expected}")

    if not isinstance(entry, dict):
        raise wrong("the header's entry", entry, "an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not re.fullmatch(r"[A-Z0-9_]{1,16}", dtype):
        raise wrong("dtype", dtype, "the name of a dtype, such as F32")
    if not is_shape(shape):
        raise wrong("shape", shape, f"a list of sizes, of at most {MAX_ELEMENTS} elements")
    if not is_shape(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong("data_offsets", offsets, "where its bytes begin and end")
    start, stop = offsets
    if begin + stop > file_size:
        raise _damaged(
            f"tensor {name!r} is truncated: {path} has {file_size} bytes, and the tensor ends at {begin + stop}"
        )
    if dtype in DTYPES and stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise _damaged(f"{path}: tensor {name!r} of {dtype} and shape {shape} cannot have {stop - start} bytes")
    return StoredTensor(name, path, dtype, tuple(shape), begin + start, stop - start)


def _check_filled(path: Path, tensors: Iterable[StoredTensor], begin: int, file_size: int) -> None:
    """Check that the tensors follow each other without gaps and fill the file."""
    last = "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.num_bytes)):
        if tensor.start != begin:
            raise _damaged(
                f"{path} is not a safetensors file: tensor {tensor.name!r} begins at {tensor.start}, and {last} ends "
                f"at {begin}"
            )
        begin += tensor.num_bytes
        last = f"tensor {tensor.name!r} before it"
    if begin != file_size:
        raise _damaged(f"{path} has {file_size} bytes, and its last tensor ends at {begin}")


class TensorFile:
    """Writes a new safetensors file, which is complete and on disk once its last tensor is written.

    It must not exist. ``tensors`` has dtype and shape of each of its tensors, at least one.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> None:
        self.path = path
        self._starts: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        # Wide dtypes come first, so that each tensor begins at a multiple of its element size.
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
            if dtype not in _NAMES:
                raise CheckpointError(f"cannot write {path}: safetensors has no dtype for the {dtype} of {name!r}")
            start, end = end, end + math.prod(shape) * dtype.itemsize
            self._starts[name] = start
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        # Padding makes the tensors begin at a multiple of 8 bytes.
        text += b" " * (-len(text) % 8)
        self._begin = 8 + len(text)
        with write_errors(path):
            # The file is unbuffered, so that a failed write raises at once.
            self._file = path.open("xb", buffering=0)
            try:
                self._write_all(memoryview(len(text).to_bytes(8, "little") + text))
            except OSError:
                self.close()
                raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors, which may be on any device.

        Raises:
            CheckpointError: the tensor cannot be written, for example because the disk is full.
        """
        plain = tensor.detach().cpu().contiguous()
        with write_errors(self.path):
            self._file.seek(self._begin + self._starts.pop(name))
            if plain.numel():
                self._write_all(plain.view(-1).view(torch.uint8).numpy().data)
            if not self._starts:
                os.fsync(self._file.fileno())
                self._file.close()

    def _write_all(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Close the file, even if it is incomplete."""
        with contextlib.suppress(OSError):
            self._file.close()


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Convert an OSError into a CheckpointError that names ``path`` and the file in it that could not be written."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        raise CheckpointError(f"cannot write {path}: {error.strerror}{where}") from error


def some_tensors(names: Sequence[str]) -> str:
    """Format the first tensor's name and the number of further tensors, for a message."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0]!r}{more}"
