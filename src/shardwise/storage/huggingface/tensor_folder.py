"""The tensors of a Hugging Face folder: one safetensors file, or several and an index."""

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from shardwise.core import json_files
from shardwise.core.errors import CheckpointError
from shardwise.core.files import can_be_a_name
from shardwise.core.json_files import MAX_CONFIG_BYTES, MAX_TABLE_BYTES
from shardwise.core.tensor_files import DTYPES, StoredTensor, read_box, read_header

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")


def is_weight_dtype(stored: StoredTensor) -> bool:
    """Whether a weight can be of the stored tensor's dtype."""
    return stored.dtype in _WEIGHT_DTYPES


def weight_dtype(stored: StoredTensor) -> torch.dtype:
    """The dtype of a stored weight.

    Raises:
        CheckpointError: it is one that a weight cannot have.
    """
    if not is_weight_dtype(stored):
        raise CheckpointError(
            f"tensor {stored.name!r} of {stored.file} is of dtype {stored.dtype}; weights must be of one of "
            f"{', '.join(_WEIGHT_DTYPES)} (quantized checkpoints are not supported)"
        )
    return DTYPES[stored.dtype]


class TensorFolder:
    """The tensors of a folder with one ``model.safetensors``, or several files and their index.

    Opening it reads the headers of the files and no tensor.

    Args:
        folder: the folder that holds the files.

    Attributes:
        tensors: what there is, by stored name.
        bytes_read: how many bytes of tensors were read so far.

    Raises:
        CheckpointError: a file is missing, truncated, or not of the format; weights are there as a pickle only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self.tensors: dict[str, StoredTensor] = {}
        # If the path exists and is not a regular file, reading it reports so.
        index = None if (folder / WEIGHTS_NAME).exists() else _read_index(folder)
        for file in [WEIGHTS_NAME] if index is None else sorted(set(index.values())):
            for name, tensor in read_header(folder / file).items():
                if index is None or index.get(name, file) == file:
                    self.tensors[name] = tensor
        missing = sorted((index or {}).keys() - self.tensors.keys())
        if missing:
            raise CheckpointError(
                f"tensor {missing[0]!r} is not in {folder / (index or {})[missing[0]]}, where {INDEX_NAME} says it is"
            )

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of a weight, on the CPU, and no other byte of it.

        Args:
            name: the tensor's stored name.
            offsets: first index of the box, in each dimension.
            sizes: number of indices, in each dimension.

        Raises:
            CheckpointError: the file cannot be read.
        """
        box = read_box(self.tensors[name], offsets, sizes)
        self.bytes_read += box.nbytes
        return box


def read_json(path: Path, *, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file; see ``json_files.read_json``.

    Raises:
        CheckpointError: it cannot be read, or is no such object.
    """
    try:
        return json_files.read_json(path, limit=limit)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error


def _read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    path = folder / INDEX_NAME
    if not path.exists():
        raise CheckpointError(_what_is_missing(folder))
    files = read_json(path, limit=MAX_TABLE_BYTES).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path} has no weight_map that names a file for each tensor")
    for name, file in files.items():
        # A name that contains folders could point anywhere on the disk.
        if not isinstance(file, str) or PurePosixPath(file).name != file or not can_be_a_name(file):
            raise CheckpointError(f"{path}: tensor {name!r} cannot be in a file called {file!r}")
        if not os.path.lexists(folder / file):
            raise CheckpointError(f"{folder / file} is missing, which holds tensor {name!r} by {INDEX_NAME}")
    return files


def _what_is_missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}"
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        return f"{folder} has {shards[0]}, but no {INDEX_NAME} that says which tensor is where, and no {WEIGHTS_NAME}"
    if pickles:
        return (
            f"{folder} has weights only in {pickles[0]}, a pickle, which can run code when it is read; convert it to "
            "safetensors (transformers: from_pretrained, then save_pretrained)"
        )
    return f"{folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}"
