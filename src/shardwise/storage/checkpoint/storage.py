"""Tensors for torch.distributed.checkpoint, and the reader and the writer of a checkpoint's files.

Each rank writes one safetensors file. PyTorch's ``HuggingFaceStorageWriter`` stores only one chunk of a tensor per file
(a rank's second interval would have the same name), has no checksums, and must read every file to list the tensors.
PyTorch's other writers store metadata as a pickle.

Ranks compute the checksum of a chunk together, from the slices that they read anyway: no rank reads a whole file. Each
row (last dimension) is cut into words of 4 bytes, padded with zeros. The checksum is the sum of each word times
``2 * position + 1``, modulo 2**64. Unlike CRCs, the sums of any disjoint slices add up to the sum of the whole. The
checksum detects every single wrong word, and any two words with one flipped bit each.
"""

import contextlib
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwise.core.errors import CheckpointError
from shardwise.core.json_text import shown
from shardwise.core.sharding import ParamShard, TensorPieces
from shardwise.core.tensor_files import StoredTensor, TensorFile, read_box, read_header
from shardwise.storage.checkpoint.manifest import REMEDY, ChunkRecord, FileRecord, Manifest, damaged, overlap

MODULUS = 1 << 64

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_BLOCK_BYTES = 1 << 20


def slice_checksum(part: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Return the contribution of a slice, on any device, of at most 8 bytes an element, to its tensor's checksum."""
    if part.dim() == 0:
        return slice_checksum(part.view(1), [0], [1])
    if part.numel() == 0:
        return 0
    bits = part.detach().contiguous().view(_BITS[part.element_size()])
    per_element = bits.size(-1) // part.size(-1)
    bits = bits.view(-1, bits.size(-1))
    per_word = 4 // bits.element_size()
    # The words in which the slice's rows lie; other ranks may hold the rest of the first and the last word.
    first, phase = divmod(offsets[-1] * per_element, per_word)
    num_words = -(-(phase + bits.size(1)) // per_word)
    weights = 2 * torch.arange(first, first + num_words) + 1
    words_of_rows = 2 * _row_numbers(part.shape, offsets, shape) * -(-shape[-1] * per_element // per_word)
    num_rows = max(1, _BLOCK_BYTES // (8 * num_words))
    total = 0
    for start in range(0, bits.size(0), num_rows):
        block = bits[start : start + num_rows].cpu()
        padded = block.new_zeros(block.size(0), num_words * per_word)
        padded[:, phase : phase + block.size(1)] = block
        words = padded.view(torch.int32).to(torch.int64)
        # int64 arithmetic wraps around, so it is modulo 2**64.
        rows = words_of_rows[start : start + num_rows] * words.sum(1)
        total += int(rows.sum() + (words * weights).sum())
    return total % MODULUS


def _row_numbers(part: Sequence[int], offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    numbers = torch.zeros((), dtype=torch.int64)
    for dim in range(len(shape) - 1):
        along = torch.arange(offsets[dim], offsets[dim] + part[dim]) * math.prod(shape[dim + 1 : -1])
        numbers = numbers.unsqueeze(-1) + along
    return numbers.flatten()


class FolderStorage:
    """Methods that torch.distributed.checkpoint requires of both readers and writers."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is no state between two saves or loads."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Keep the plan: each rank reads and writes its own tensors."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept folders but not URLs."""
        return "://" not in str(checkpoint_id)


@dataclass(frozen=True)
class BoxData:
    """A box of a tensor that this rank writes; its ``key`` has the slice unless it is whole: ``weight[0:51, 0:64]``."""

    key: str
    name: str
    offsets: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class Written:
    """The file that a rank wrote, if any: name, record, and chunks with their tensors' names."""

    file: str | None = None
    record: FileRecord | None = None
    chunks: tuple[tuple[str, ChunkRecord], ...] = ()


class BoxesToWrite(FolderStorage, StorageWriter):
    """Passes the parts that torch.distributed.checkpoint plans for this rank to ``take``, and writes nothing."""

    def __init__(self, take: Callable[[list[BoxData]], None]) -> None:
        self._take = take

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Pass the parts to ``take``; raise CheckpointError if two have the same name."""
        parts = []
        for item in plan.items:
            assert item.tensor_data is not None
            offsets = tuple(item.tensor_data.chunk.offsets)
            parts.append(BoxData(_chunk_key(item), item.index.fqn, offsets, cast(Tensor, planner.resolve_data(item))))
        keys = [part.key for part in parts]
        if len(set(keys)) != len(keys):
            raise CheckpointError(f"two tensors would both be stored as {next(k for k in keys if keys.count(k) > 1)!r}")
        self._take(parts)
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing, because nothing has been written yet."""


def write_parts(
    folder: Path, rank: int, parts: Sequence[BoxData], *, go_on: Callable[[], None] = lambda: None
) -> Written:
    """Write a rank's parts to ``rank-NNNNN.safetensors`` on disk, and read the file back for its checksum.

    ``go_on`` is called before each part, and may raise an error to stop the writing.
    """
    if not parts:
        return Written()
    path = folder / f"rank-{rank:05d}.safetensors"
    with contextlib.closing(TensorFile(path, {part.key: (part.data.dtype, part.data.shape) for part in parts})) as file:
        for part in parts:
            go_on()
            file.write(part.key, part.data)
    chunks = []
    for part in parts:
        go_on()
        shape = part.data.shape
        checksum = slice_checksum(part.data, [0] * part.data.dim(), shape)
        chunks.append((part.name, ChunkRecord(part.offsets, tuple(shape), path.name, part.key, checksum)))
    return Written(path.name, FileRecord.of(path), tuple(chunks))


def _chunk_key(item: WriteItem) -> str:
    data = item.tensor_data
    assert data is not None
    if data.chunk.sizes == data.size:
        return item.index.fqn
    box = zip(data.chunk.offsets, data.chunk.sizes, strict=True)
    return f"{item.index.fqn}[{', '.join(f'{start}:{start + size}' for start, size in box)}]"


def tensors_of(
    state: Mapping[str, ParamShard], stored_shapes: Mapping[str, Sequence[int]] | None = None
) -> dict[str, TensorPieces]:
    """Return this rank's pieces of each tensor by key. Entries with the same key and memory (tied weights) count once.

    ``stored_shapes`` has the shapes in the checkpoint to load, for entries that allow another shape. Raises
    CheckpointError if two entries are the same part of one tensor.
    """
    pieces: dict[str, dict[tuple[int, ...], Tensor]] = {}
    written: dict[str, dict[tuple[int, ...], Tensor]] = {}
    first: dict[str, ParamShard] = {}
    for name, shard in state.items():
        first.setdefault(shard.key, shard)
        written.setdefault(shard.key, {}).update(shard.written_pieces())
        of_key = pieces.setdefault(shard.key, {})
        for offset, view in shard.pieces():
            held = of_key.setdefault(offset, view)
            if (held.data_ptr(), held.shape, held.stride()) != (view.data_ptr(), view.shape, view.stride()):
                raise CheckpointError(
                    f"entry {name!r} and one before it are both the part of tensor {shard.key!r} at {list(offset)}; "
                    "give them different keys or sharded_offsets"
                )
    shapes = stored_shapes or {key: shard.global_shape for key, shard in first.items()}
    return {
        key: TensorPieces(
            shapes[key],
            list(of_key.items()),
            dtype=first[key].dtype,
            device=first[key].device,
            written=list(written[key].items()),
        )
        for key, of_key in pieces.items()
    }


class Slice(NamedTuple):
    """A box of a stored chunk."""

    chunk: MetadataIndex
    offsets: torch.Size
    sizes: torch.Size


class SafetensorsReader(FolderStorage, StorageReader):
    """Reads the slices that this rank needs; ``sums`` are its contributions to the chunks' checksums."""

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
        """Do nothing."""

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, each with the slices that its rank adds to checksums."""
        slices = share_out_slices([[_slice_of(item) for item in plan.items] for plan in plans], self._place)
        return [dataclasses.replace(plan, storage_data=mine) for plan, mine in zip(plans, slices, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each slice into the state; raise CheckpointError if a file's tensor is not the saved one."""
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
            if not self.folder.exists():
                raise CheckpointError(
                    f"checkpoint {self.folder} was removed while it was read; read a newer one"
                ) from error
            raise damaged(self.folder, f"{error}, or remove the checkpoint to use an older one") from error

    def _read(self, header: Mapping[str, StoredTensor], box: Slice) -> Tensor:
        chunk, dtype = self._place[box.chunk], self._manifest.tensors[box.chunk.fqn].dtype
        part = read_slice(self.folder, header, chunk, dtype, box.offsets, box.sizes)
        self.bytes_read += part.nbytes
        return part

    def check_sums(self, sums_of_ranks: Iterable[Mapping[MetadataIndex, int]]) -> None:
        """Raise CheckpointError unless the sums of all ranks add up to the saved checksums."""
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
    """Read a box of a stored chunk; raise CheckpointError if the file's tensor is not the saved one."""
    stored = header.get(chunk.key)
    if stored is not None and stored.shape == chunk.sizes:
        part = read_box(stored, offsets, sizes)
        if part.dtype == dtype:
            return part
    wanted = f"{shown(chunk.key)} of {dtype} and shape {shown(list(chunk.sizes))}"
    raise damaged(folder, f"{chunk.file} has no {wanted}; {REMEDY}")


def share_out_slices(wanted: list[list[Slice]], chunks: Mapping[MetadataIndex, ChunkRecord]) -> list[set[Slice]]:
    """Choose the slices that each rank adds to the checksums of their chunks; each wanted slice is in one of the sets.

    If a chunk is not wanted as a whole (its vocabulary has other padding), or if slices of it overlap (stages cut
    copies of a weight at different places), the first rank that reads from it gets the whole chunk, and reads the rest
    only for the checksum.
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
        pairs = [(box.offsets, box.sizes) for box in boxes]
        sizes = torch.Size(chunks[chunk].sizes)
        if sum(math.prod(box.sizes) for box in boxes) == math.prod(sizes) and not overlap(pairs):
            for box in boxes:
                shared[first[box]].add(box)
        else:
            shared[first[boxes[0]]].add(Slice(chunk, torch.Size([0] * len(sizes)), sizes))
    return shared


def _slice_of(item: ReadItem) -> Slice:
    return Slice(item.storage_index, item.storage_offsets, item.lengths)
