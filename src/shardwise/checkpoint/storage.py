"""Where torch.distributed.checkpoint's chunks are written: one safetensors file per rank.

PyTorch's own ``HuggingFaceStorageWriter`` stores one chunk of a tensor per file (a second interval of one rank
would take the first one's name), has no checksums, and reads every file to know what there is; its other writers keep
their metadata as a pickle.
"""

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardwise.checkpoint.checksum import slice_checksum
from shardwise.checkpoint.manifest import ChunkRecord, FileRecord
from shardwise.errors import CheckpointError
from shardwise.tensor_files import TensorFile


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


class SafetensorsWriter(FolderStorage, StorageWriter):
    """Writes each rank's chunks into ``rank-NNNNN.safetensors`` of one folder, which exists and ranks share.

    A chunk that is a whole tensor has the tensor's name, any other has the slice behind it: ``weight[0:51, 0:64]``.

    Args:
        folder: the folder to write to.
        rank: this rank in the group that saves.
        finish: called on the coordinator once every rank has written: the chunks of each tensor, and the files.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        finish: Callable[[dict[str, list[ChunkRecord]], dict[str, FileRecord]], None],
    ) -> None:
        self.folder = folder
        self.file = f"rank-{rank:05d}.safetensors"
        self._finish = finish

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the folder exists."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, to the disk itself, and read it back for its checksum.

        Raises:
            CheckpointError: the file cannot be written; the message has the reason.
        """
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(plan.items, planner) if plan.items else [])
        return future

    def _write(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        path = self.folder / self.file
        keys = [chunk_key(item) for item in items]
        if len(set(keys)) != len(keys):
            raise CheckpointError(f"two tensors would both be stored as {next(k for k in keys if keys.count(k) > 1)!r}")
        tensors = {key: cast(Tensor, planner.resolve_data(item)) for key, item in zip(keys, items, strict=True)}
        shapes = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
        with contextlib.closing(TensorFile(path, shapes)) as file:
            for key, tensor in tensors.items():
                file.write(key, tensor)
        record = FileRecord.of(path)
        results = []
        for key, item in zip(keys, items, strict=True):
            part, data = tensors[key], item.tensor_data
            assert data is not None
            checksum = slice_checksum(part, [0] * part.dim(), part.shape)
            chunk = ChunkRecord(tuple(data.chunk.offsets), tuple(data.chunk.sizes), self.file, key, checksum)
            results.append(WriteResult(item.index, part.nbytes, (chunk, record)))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Hand the records of what all ranks wrote to the ``finish`` that was given."""
        chunks: dict[str, list[ChunkRecord]] = {}
        files: dict[str, FileRecord] = {}
        for result in itertools.chain.from_iterable(results):
            chunk, record = result.storage_data
            files[chunk.file] = record
            chunks.setdefault(result.index.fqn, []).append(chunk)
        self._finish(chunks, files)


def chunk_key(item: WriteItem) -> str:
    """The name under which a chunk is stored."""
    data = item.tensor_data
    assert data is not None
    if data.chunk.sizes == data.size:
        return item.index.fqn
    box = zip(data.chunk.offsets, data.chunk.sizes, strict=True)
    return f"{item.index.fqn}[{', '.join(f'{start}:{start + size}' for start, size in box)}]"
