"""Folders with experts in MXFP4, which are read as bf16; that holds every value exactly.

The matrix ``[out, in]`` of each expert is stored in blocks of 32 columns. ``NAME_blocks`` is of shape ``[experts, out,
in/32, 16]``, and each byte has two values of four bits, the first in the lower bits. ``NAME_scales``, ``[experts, out,
in/32]``, has the exponent of 2 of each block, plus 127.

Source: Rouhani et al. 2023, "OCP Microscaling Formats (MX) Specification", version 1.0, section 5.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardwise.core.errors import CheckpointError
from shardwise.core.tensor_files import StoredTensor, read_box
from shardwise.storage.huggingface.tensor_folder import TensorFolder

_BLOCKS, _SCALES = "_blocks", "_scales"
_WIDTH = 32
# By the four bits: a sign, two bits of the exponent, one of the fraction.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], dtype=torch.bfloat16, device="cpu")


class Mxfp4Folder(TensorFolder):
    """A ``TensorFolder`` whose ``NAME_blocks`` and ``NAME_scales`` are one tensor ``NAME``, ``[experts, in, out]``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._parts: dict[str, tuple[StoredTensor, StoredTensor]] = {}
        for name in [name.removesuffix(_BLOCKS) for name in self.tensors if name.endswith(_BLOCKS)]:
            blocks, scales = self.tensors.pop(name + _BLOCKS), self.tensors.pop(name + _SCALES, None)
            if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[-1] != _WIDTH // 2:
                raise CheckpointError(
                    f"tensor {blocks.name!r} of {blocks.file} is of dtype {blocks.dtype} and shape "
                    f"{list(blocks.shape)}; blocks of MXFP4 are of dtype U8 and shape [experts, out, in/32, 16]"
                )
            num, out, count, _ = blocks.shape
            if scales is None or (scales.dtype, scales.shape) != ("U8", (num, out, count)):
                raise CheckpointError(
                    f"tensor {blocks.name!r} of {blocks.file} has shape {list(blocks.shape)}, and needs a tensor "
                    f"{name + _SCALES!r} of dtype U8 and shape {[num, out, count]}"
                )
            self._parts[name] = blocks, scales
            self.tensors[name] = replace(blocks, name=name, dtype="BF16", shape=(num, count * _WIDTH, out))

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Like ``TensorFolder.read``; of a tensor in MXFP4, only blocks with columns of the box are read."""
        if name not in self._parts:
            return super().read(name, offsets, sizes)
        (expert, column, row), (num, columns, rows) = offsets, sizes
        first, stop = column // _WIDTH, -(-(column + columns) // _WIDTH)
        offsets, sizes = (expert, row, first), (num, rows, stop - first)
        blocks = read_box(self._parts[name][0], (*offsets, 0), (*sizes, _WIDTH // 2))
        scales = read_box(self._parts[name][1], offsets, sizes)
        self.bytes_read += blocks.nbytes + scales.nbytes
        return dequantized(blocks, scales)[:, column - first * _WIDTH :][:, :columns]


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values of blocks ``[e, out, n, 16]`` with scales ``[e, out, n]``: ``[e, 32 n, out]`` in bf16."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()
    values = torch.ldexp(_VALUES[codes], scales.int().unsqueeze(-1) - 127).bfloat16()
    return values.flatten(2).transpose(1, 2)
