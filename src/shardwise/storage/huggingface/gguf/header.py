"""The header of a GGUF file: its metadata, and the place of each tensor. Nothing in the file is trusted.

After magic, version and two counts come the entries (key, type, value), then the tensors (name, sizes with the fastest
first, type, offset), then the tensors' blocks without gaps, each at a multiple of the alignment.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import os
import struct
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwise.core.atomic_files import open_regular
from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.json_text import MAX_TABLE_BYTES, shown
from shardwise.core.tensor_files import is_shape

_VERSIONS = (2, 3)
_NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: ``shape`` as in PyTorch, the position of its first byte, and the bytes of a row."""

    name: str
    type: Any
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shape[:-1]) * self.row_bytes


def library() -> Any:
    """Return the library ``gguf``, which knows the types of blocks."""
    try:
        return import_module("gguf")
    except ImportError as error:
        raise ConfigError(
            f"a GGUF file is read with the package gguf ({error}): pip install 'shardwise[gguf]'"
        ) from error


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Return the metadata of a file, with arrays of numbers as NumPy arrays, and its tensors by name.

    Raises:
        CheckpointError: the file is damaged, truncated or of another format, or has blocks of an unknown type.
        ConfigError: the library is missing.
    """
    library()
    try:
        with open_regular(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            return _Reader(path, file, os.fstat(descriptor).st_size).read()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size, self._position = path, file, size, 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._take(4, "magic number") != b"GGUF":
            raise self._damaged("is not a GGUF file: it does not begin with GGUF")
        if (version := self._number(4, "version")) not in _VERSIONS:
            raise self._damaged(f"is of version {version} of the format, or not little-endian; 2 and 3 are read")
        num_tensors, num_entries = self._number(10, "number of tensors"), self._number(10, "number of entries")
        values: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string("key")
            if key in values:
                raise self._damaged(f"has the key {shown(key)} twice")
            values[key] = self._value(self._number(4, f"type of {shown(key)}"), f"value of {shown(key)}")
        # A count that is too large ends with the file.
        return values, self._placed([self._tensor() for _ in range(num_tensors)], values.get("general.alignment", 32))

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {what}; use another copy of it")

    def _take(self, count: int, what: str) -> bytes:
        end = self._position + count
        if end > self._size:
            raise self._damaged(f"is truncated or damaged: its {what} ends at {end}, and the file at {self._size}")
        if end > MAX_TABLE_BYTES:
            raise self._damaged(
                f"is damaged: its {what} ends at {end}, and headers have at most {MAX_TABLE_BYTES} bytes"
            )
        self._position = end
        return self._file.read(count)

    def _number(self, kind: int, what: str) -> Any:
        return np.frombuffer(self._take(np.dtype(_NUMBERS[kind]).itemsize, what), "<" + _NUMBERS[kind])[0].item()

    def _string(self, what: str) -> str:
        try:
            return self._take(struct.unpack("<Q", self._take(8, f"length of a {what}"))[0], what).decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"is damaged: a {what} is not UTF-8 at {self._position}") from error

    def _value(self, kind: int, what: str) -> Any:
        if kind in _NUMBERS:
            return self._number(kind, what)
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY:
            raise self._damaged(f"is damaged: the {what} is of type {kind}")
        kind, count = self._number(4, what), self._number(10, what)
        if kind == _STRING:
            return [self._string(what) for _ in range(count)]
        if kind not in _NUMBERS:
            raise self._damaged(f"cannot be read: the {what} is a list of type {kind}")
        return np.frombuffer(self._take(count * np.dtype(_NUMBERS[kind]).itemsize, what), "<" + _NUMBERS[kind])

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("name of a tensor")
        what = f"entry of tensor {shown(name)}"
        num_dims = self._number(4, what)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._damaged(f"is damaged: tensor {shown(name)} has {num_dims} dimensions; 1 to {_MAX_DIMS} exist")
        shape = [self._number(10, what) for _ in range(num_dims)][::-1]
        if not is_shape(shape) or 0 in shape:
            raise self._damaged(f"is damaged: tensor {shown(name)} cannot have the shape {shape}")
        return name, tuple(shape), self._number(4, what), self._number(10, what)

    def _placed(self, listed: list[tuple[str, tuple[int, ...], int, int]], alignment: Any) -> dict[str, GgufTensor]:
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(f"is damaged: general.alignment is {shown(alignment)}; it must be a power of 2")
        tensors: dict[str, GgufTensor] = {}
        types: dict[int, tuple[Any, int, int]] = {}
        begin = -(-self._position // alignment) * alignment
        expected = 0
        for name, shape, kind, offset in listed:
            if kind not in types:
                types[kind] = self._block_type(name, kind)
            known, length, size = types[kind]
            if shape[-1] % length:
                raise self._damaged(f"is damaged: rows of {shown(name)} have {shape[-1]} values, in blocks of {length}")
            tensor = GgufTensor(name, known, shape, begin + offset, shape[-1] // length * size)
            if name in tensors:
                raise self._damaged(f"has the tensor {shown(name)} twice")
            if offset != expected:
                raise self._damaged(f"is damaged: tensor {shown(name)} begins at {offset}, and its place is {expected}")
            if tensor.start + tensor.num_bytes > self._size:
                end = tensor.start + tensor.num_bytes
                raise self._damaged(f"is truncated: tensor {shown(name)} ends at {end}, and the file at {self._size}")
            tensors[name] = tensor
            expected += -(-tensor.num_bytes // alignment) * alignment
        return tensors

    def _block_type(self, name: str, kind: int) -> tuple[Any, int, int]:
        """Return a type with the number of values and of bytes of a block, after one block of zeros was read."""
        gguf = library()
        try:
            known = gguf.GGMLQuantizationType(kind)
            length, size = gguf.GGML_QUANT_SIZES[known]
            gguf.dequantize(np.zeros((1, size), np.uint8), known)
        except (ValueError, KeyError, NotImplementedError) as error:
            kind_name = next((each.name for each in gguf.GGMLQuantizationType if each == kind), "no known name")
            raise CheckpointError(
                f"{self._path}: tensor {shown(name)} is of type {kind} ({kind_name}), which the installed package gguf "
                "cannot convert to numbers; use a file of another type, such as Q8_0, or a newer gguf"
            ) from error
        return known, length, size
