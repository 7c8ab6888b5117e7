"""Where two checkpoints differ: tensor by tensor, whatever the layouts that they were saved at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import Manifest, TensorRecord, damaged
from shardwise.tensor_files import read_box, read_header


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor of two checkpoints differs.

    Attributes:
        name: of the tensor.
        facts: in which dtype and shape, or presence, they differ; None if values do.
        num_different: elements whose bits differ.
        num_elements: of the tensor.
        first: index of the first of them.
        values: of the first of them, in both.
        distance: norm of the difference over the norm of the first checkpoint's; NaN where either has NaN.
    """

    name: str
    facts: str | None = None
    num_different: int = 0
    num_elements: int = 0
    first: tuple[int, ...] = ()
    values: tuple[float, float] = (0.0, 0.0)
    distance: float = 0.0


def tensor_differences(one: Path, other: Path) -> Iterator[TensorDifference]:
    """The tensors that differ in bits, those of the optimizer last; one tensor of each is in memory at a time.

    Args:
        one: folder of a checkpoint.
        other: of another.

    Raises:
        CheckpointError: one of them is damaged.
    """
    manifests = Manifest.read(one), Manifest.read(other)
    names = dict.fromkeys([*manifests[0].tensors, *manifests[1].tensors])
    for name in sorted(names, key=lambda name: (name.startswith("optimizer."), list(names).index(name))):
        records = [manifest.tensors.get(name) for manifest in manifests]
        if records[0] is None or records[1] is None:
            yield TensorDifference(name, f"is in {one if records[1] is None else other} alone")
        elif (records[0].dtype, *records[0].shape) != (records[1].dtype, *records[1].shape):
            shown = " and ".join(f"{record.dtype} {list(record.shape)}" for record in records if record is not None)
            yield TensorDifference(name, f"is {shown}")
        else:
            difference = _compared(name, whole_tensor(one, records[0]), whole_tensor(other, records[1]))
            if difference is not None:
                yield difference


def whole_tensor(folder: Path, record: TensorRecord) -> Tensor:
    """A tensor of a checkpoint, put together from the ranks' parts.

    Args:
        folder: of the checkpoint.
        record: what its manifest says of the tensor.

    Raises:
        CheckpointError: a file of it is damaged.
    """
    whole = torch.empty(record.shape, dtype=record.dtype)
    for chunk in record.chunks:
        stored = read_header(folder / chunk.file).get(chunk.key)
        if stored is None or tuple(stored.shape) != tuple(chunk.sizes):
            raise damaged(folder, f"{chunk.file} has no {chunk.key!r} of shape {list(chunk.sizes)}")
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = read_box(stored, [0] * len(chunk.sizes), chunk.sizes)
    return whole


def _compared(name: str, one: Tensor, other: Tensor) -> TensorDifference | None:
    different = (_bits(one) != _bits(other)).any(dim=-1)
    if not different.any():
        return None
    place = int(different.flatten().nonzero()[0])
    first = tuple(int(index) for index in torch.unravel_index(torch.tensor(place), one.shape)) if one.dim() else ()
    values = float(one.flatten()[place]), float(other.flatten()[place])
    wide = one.double()
    distance = float((wide - other.double()).norm() / wide.norm()) if one.is_floating_point() else float("nan")
    return TensorDifference(name, None, int(different.sum()), one.numel(), first, values, distance)


def _bits(tensor: Tensor) -> Tensor:
    """Each element's bytes, in one more dimension."""
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)
