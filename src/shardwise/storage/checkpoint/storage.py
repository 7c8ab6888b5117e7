"""The tensors that torch.distributed.checkpoint is given, and the files for its chunks: one safetensors file per rank.

PyTorch's own ``HuggingFaceStorageWriter`` stores one chunk of a tensor per file (a second interval of one rank
would take the first one's name), has no checksums, and reads every file to know what there is; its other writers keep
their metadata as a pickle.

A checksum of a tensor that ranks compute together, each from the slices that it reads anyway.

Each row (last dimension) is cut into words of 4 bytes, the last filled up with zeros. The checksum is the sum of them
times ``2 * position + 1``, modulo 2**64: the sums of disjoint slices add up to that of the whole, however it was cut,
which CRCs do not. A wrong word never goes unnoticed, nor do two with one flipped bit each.
"""

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardwise.core.errors import CheckpointError
from shardwise.core.sharding import ParamShard, TensorPieces
from shardwise.core.tensor_files import TensorFile
from shardwise.storage.checkpoint.manifest import ChunkRecord, FileRecord

MODULUS = 1 << 64

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_BLOCK_BYTES = 1 << 20


def slice_checksum(part: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> int:
    """What a slice adds to the checksum of a tensor.

    Args:
        part: the slice, of any dtype of at most 8 bytes, on any device.
        offsets: its first index in each dimension of the tensor.
        shape: the tensor's shape.
    """
    if part.dim() == 0:
        return slice_checksum(part.view(1), [0], [1])
    if part.numel() == 0:
        return 0
    bits = part.detach().contiguous().view(_BITS[part.element_size()])
    per_element = bits.size(-1) // part.size(-1)
    bits = bits.view(-1, bits.size(-1))
    per_word = 4 // bits.element_size()
    # These are the words that the slice's rows lie in; other ranks may hold the rest of the first and the last.
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
        # int64 arithmetic wraps around, which is what modulo 2**64 asks for.
        rows = words_of_rows[start : start + num_rows] * words.sum(1)
        total += int(rows.sum() + (words * weights).sum())
    return total % MODULUS


def _row_numbers(part: Sequence[int], offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """``[rows of the part]``: the number of each of its rows among those of the tensor."""
    numbers = torch.zeros((), dtype=torch.int64)
    for dim in range(len(shape) - 1):
        along = torch.arange(offsets[dim], offsets[dim] + part[dim]) * math.prod(shape[dim + 1 : -1])
        numbers = numbers.unsqueeze(-1) + along
    return numbers.flatten()


class FolderStorage:
    """What the reader and the writer of a checkpoint's folder have in common."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between two saves or loads."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """The plan as it is."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Folders only; no URLs."""
        return "://" not in str(checkpoint_id)


@dataclass(frozen=True)
class Part:
    """A box of a tensor that this rank writes.

    Attributes:
        key: name under which it is stored: the tensor's if it is the whole; if not, with the slice behind it, as in
            ``weight[0:51, 0:64]``.
        name: the tensor's.
        offsets: first index of the box in each dimension.
        data: its values.
    """

    key: str
    name: str
    offsets: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class Written:
    """What one rank wrote.

    Attributes:
        file: name of its file; None if there was nothing to write.
        record: of the file.
        chunks: what the file holds, with the names of their tensors.
        note: what is to be said about it; empty if nothing is.
    """

    file: str | None = None
    record: FileRecord | None = None
    chunks: tuple[tuple[str, ChunkRecord], ...] = ()
    note: str = ""


class PartsOfPlan(FolderStorage, StorageWriter):
    """Takes what torch.distributed.checkpoint plans for this rank to write, and writes nothing itself.

    Args:
        take: called with this rank's parts.
    """

    def __init__(self, take: Callable[[list[Part]], None]) -> None:
        self._take = take

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Hand the parts over.

        Raises:
            CheckpointError: two parts have one name.
        """
        parts = []
        for item in plan.items:
            assert item.tensor_data is not None
            offsets = tuple(item.tensor_data.chunk.offsets)
            parts.append(Part(chunk_key(item), item.index.fqn, offsets, cast(Tensor, planner.resolve_data(item))))
        keys = [part.key for part in parts]
        if len(set(keys)) != len(keys):
            raise CheckpointError(f"two tensors would both be stored as {next(k for k in keys if keys.count(k) > 1)!r}")
        self._take(parts)
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing has been written yet."""


def write_parts(folder: Path, rank: int, parts: Sequence[Part], *, go_on: Callable[[], None] = lambda: None) -> Written:
    """Write a rank's parts into ``rank-NNNNN.safetensors``, to the disk itself; read it back for its checksum.

    Args:
        folder: exists, and is shared by the ranks.
        rank: this rank in the group that saves.
        parts: in memory of any device.
        go_on: called before each part; what it raises ends the writing.

    Raises:
        CheckpointError: the file cannot be written; the message has the reason.
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


def chunk_key(item: WriteItem) -> str:
    """The name under which a chunk is stored."""
    data = item.tensor_data
    assert data is not None
    if data.chunk.sizes == data.size:
        return item.index.fqn
    box = zip(data.chunk.offsets, data.chunk.sizes, strict=True)
    return f"{item.index.fqn}[{', '.join(f'{start}:{start + size}' for start, size in box)}]"


def tensors_of(
    state: Mapping[str, ParamShard], stored_shapes: Mapping[str, Sequence[int]] | None = None
) -> dict[str, TensorPieces]:
    """This rank's pieces of each tensor, by key; those of entries that share a key are together.

    Entries that share key and memory, such as tied weights, are one.

    Args:
        state: entries that agree about each tensor (see ``describe_state``).
        stored_shapes: the tensors' shapes in the checkpoint that is to be loaded, for entries that allow another.

    Raises:
        CheckpointError: two entries would be the same part of one tensor.
        ShardingError: the rank holds an index of a tensor twice.
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
