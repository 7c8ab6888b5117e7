"""Reading a checkpoint's slices, each by the ranks that need it, and comparing them with what was saved.

No rank reads what it does not need, so none can compare a whole file. Together they do: the checksum of a chunk is the
sum of its slices', and each slice is counted by one of the ranks that read it.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardwise.core.errors import CheckpointError
from shardwise.core.tensor_files import StoredTensor, read_box, read_header
from shardwise.storage.checkpoint.manifest import REMEDY, ChunkRecord, Manifest, damaged
from shardwise.storage.checkpoint.storage import MODULUS, FolderStorage, slice_checksum


class Slice(NamedTuple):
    """A box of a stored chunk."""

    chunk: MetadataIndex
    offsets: torch.Size
    sizes: torch.Size


class SafetensorsReader(FolderStorage, StorageReader):
    """Reads the slices that this rank needs from the checkpoint at ``folder``.

    Attributes:
        sums: after reading, what this rank adds to the checksum of each chunk.
        bytes_read: after reading, how many bytes of tensors that were.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.sums: Counter[MetadataIndex] = Counter()
        self.bytes_read = 0
        self._manifest = manifest
        self._place = {
            MetadataIndex(name, torch.Size(chunk.offsets)): chunk
            for name, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in torch.distributed.checkpoint's terms."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=tensor.dtype),
                    size=torch.Size(tensor.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                        for chunk in tensor.chunks
                    ],
                )
                for name, tensor in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, each with the slices that its rank adds up."""
        slices = share_out_slices([[_slice_of(item) for item in plan.items] for plan in plans], self._place)
        return [dataclasses.replace(plan, storage_data=mine) for plan, mine in zip(plans, slices, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each wanted slice into the state's own tensors.

        Raises:
            CheckpointError: a file cannot be read, or has other tensors in it than were saved.
        """
        counted: set[Slice] = plan.storage_data
        wanted: dict[str, list[tuple[Slice, ReadItem | None]]] = {}
        boxes: list[tuple[Slice, ReadItem | None]] = [(_slice_of(item), item) for item in plan.items]
        boxes += [(box, None) for box in counted - {box for box, _ in boxes}]
        for box, item in boxes:
            wanted.setdefault(self._place[box.chunk].file, []).append((box, item))
        for name, slices in wanted.items():
            header = self._header(name)
            for box, item in slices:
                part = self._read(header, box)
                if box in counted:
                    self.sums[box.chunk] += slice_checksum(part, box.offsets, self._place[box.chunk].sizes)
                    counted.remove(box)
                if item is not None:
                    target = planner.resolve_tensor(item)
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _header(self, name: str) -> dict[str, StoredTensor]:
        try:
            return read_header(self.folder / name)
        except CheckpointError as error:
            raise damaged(self.folder, f"{error}, or remove the checkpoint to use an older one") from error

    def _read(self, header: Mapping[str, StoredTensor], box: Slice) -> Tensor:
        chunk, dtype = self._place[box.chunk], self._manifest.tensors[box.chunk.fqn].dtype
        part = read_slice(self.folder, header, chunk, dtype, box.offsets, box.sizes)
        self.bytes_read += part.nbytes
        return part

    def check_sums(self, sums_of_ranks: Iterable[Mapping[MetadataIndex, int]]) -> None:
        """Raise CheckpointError unless what all ranks read is what was saved."""
        total: Counter[MetadataIndex] = Counter()
        for sums in sums_of_ranks:
            total.update(sums)
        for index, found in total.items():
            chunk = self._place[index]
            if found % MODULUS != chunk.checksum:
                raise damaged(self.folder, f"{chunk.file} has other values of {chunk.key!r} than were saved; {REMEDY}")


def read_slice(
    folder: Path,
    header: Mapping[str, StoredTensor],
    chunk: ChunkRecord,
    dtype: torch.dtype,
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> Tensor:
    """A box of a stored chunk.

    Args:
        folder: of the checkpoint.
        header: of the chunk's file.
        chunk: what the manifest says of it.
        dtype: of its tensor.
        offsets: first index of the box in the chunk, in each dimension.
        sizes: number of indices, in each dimension.

    Raises:
        CheckpointError: the file cannot be read, or has something else there than was saved.
    """
    stored = header.get(chunk.key)
    if stored is not None and stored.shape == chunk.sizes:
        part = read_box(stored, offsets, sizes)
        if part.dtype == dtype:
            return part
    raise damaged(folder, f"{chunk.file} has no {chunk.key!r} of {dtype} and shape {list(chunk.sizes)}; {REMEDY}")


def share_out_slices(wanted: list[list[Slice]], chunks: Mapping[MetadataIndex, ChunkRecord]) -> list[set[Slice]]:
    """Which slices each rank counts towards the checksums of their chunks.

    Args:
        wanted: the slices that each rank reads.
        chunks: the stored chunks.

    Returns:
        For each rank a set: each wanted slice is in one. Of a chunk that is not wanted whole (rows of a vocabulary that
        was padded otherwise), or of which two slices have something in common and are not the same (copies that ranks
        share out at different places), the first rank that reads of it gets all of it, to read only for this.
    """
    first: dict[Slice, int] = {}
    for rank, slices in enumerate(wanted):
        for box in slices:
            first.setdefault(box, rank)
    of_chunk: dict[MetadataIndex, list[Slice]] = {}
    for box in first:
        of_chunk.setdefault(box.chunk, []).append(box)
    shared: list[set[Slice]] = [set() for _ in wanted]
    for chunk, boxes in of_chunk.items():
        sizes = torch.Size(chunks[chunk].sizes)
        if sum(math.prod(box.sizes) for box in boxes) == math.prod(sizes) and not _overlap(boxes):
            for box in boxes:
                shared[first[box]].add(box)
        else:
            shared[first[boxes[0]]].add(Slice(chunk, torch.Size([0] * len(sizes)), sizes))
    return shared


def _overlap(boxes: Sequence[Slice]) -> bool:
    """Whether two boxes of one chunk have something in common."""
    if not boxes[0].sizes:
        return len(boxes) > 1
    active: list[Slice] = []
    for box in sorted(boxes, key=lambda each: each.offsets[0]):
        # Those that end before this one begins are behind all that follow too.
        active = [other for other in active if other.offsets[0] + other.sizes[0] > box.offsets[0]]
        if any(_meet(box, other) for other in active):
            return True
        active.append(box)
    return False


def _meet(a: Slice, b: Slice) -> bool:
    return all(
        max(start, other) < min(start + size, other + length)
        for start, size, other, length in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def _slice_of(item: ReadItem) -> Slice:
    return Slice(item.storage_index, item.storage_offsets, item.lengths)
