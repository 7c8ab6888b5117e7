"""A safetensors file written tensor by tensor, so that no more than one of them is in memory.

The safetensors library wants all tensors of a file at once.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.huggingface.mapping import Shape
from shardwise.tensor_files import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorFile:
    """A new safetensors file.

    Args:
        path: of the file, which must not exist.
        tensors: dtype and shape of each tensor that it will hold.

    Raises:
        CheckpointError: it cannot be written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> None:
        self.path = path
        self._missing = dict(tensors)
        self._starts: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (dtype, shape) in tensors.items():
            start, end = end, end + tensor_size(dtype, shape)
            self._starts[name] = start
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        # The tensors begin at a multiple of 8 bytes.
        text += b" " * (-len(text) % 8)
        self._begin = 8 + len(text)
        try:
            # Unbuffered: what cannot be written is known at once.
            self._file = path.open("xb", buffering=0)
            self._write_all(memoryview(len(text).to_bytes(8, "little") + text))
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from error

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors, on any device.

        Raises:
            CheckpointError: it cannot be written (the disk is full).
        """
        expected = self._missing.pop(name)
        assert expected == (tensor.dtype, tuple(tensor.shape)), f"{name}: {tensor.dtype}, {tensor.shape}, {expected}"
        plain = tensor.detach().cpu().contiguous()
        try:
            self._file.seek(self._begin + self._starts[name])
            if plain.numel():
                self._write_all(plain.view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from error

    def _write_all(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]

    @property
    def missing(self) -> bool:
        """Whether a tensor has not been written yet."""
        return bool(self._missing)

    def close(self) -> None:
        """Have all of it reach the disk itself.

        Raises:
            CheckpointError: it does not (the disk is full).
        """
        assert not self._missing, f"{self.path} lacks {list(self._missing)}"
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from error

    def abandon(self) -> None:
        """Close it as it is, after an error."""
        # What is still to be flushed fails again.
        with contextlib.suppress(OSError):
            self._file.close()


def tensor_size(dtype: torch.dtype, shape: Shape) -> int:
    """Bytes of a tensor."""
    return int(torch.Size(shape).numel()) * dtype.itemsize
