"""Which pieces of a sharded state a rank writes and reads: torch.distributed.checkpoint's plans for ``ParamShard``.

PyTorch's planners look for shards in tensors only, and DTensor can stand for none of ours: it has no balanced shards
and no shards of several runs. These planners take the entries as they are; ``dcp.save`` and ``dcp.load`` accept them
with any storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwise.errors import CheckpointError
from shardwise.sharding import ParamShard


def pieces_of(state: Mapping[str, ParamShard]) -> dict[MetadataIndex, tuple[ParamShard, Tensor]]:
    """Each piece that this rank holds, by key and offset: the entry that it is of, and the view that holds it.

    Entries that share key and memory, such as tied weights, are one.

    Raises:
        CheckpointError: two entries would be the same part of one tensor.
        ShardingError: the rank holds an index of a tensor twice.
    """
    pieces: dict[MetadataIndex, tuple[ParamShard, Tensor]] = {}
    for name, shard in state.items():
        for offset, view in shard.pieces():
            index = MetadataIndex(shard.key, torch.Size(offset))
            _, held = pieces.setdefault(index, (shard, view))
            if (held.data_ptr(), held.shape, held.stride()) != (view.data_ptr(), view.shape, view.stride()):
                raise CheckpointError(
                    f"entry {name!r} and one before it are both the part of tensor {shard.key!r} at {list(offset)}; "
                    "give them different keys or sharded_offsets"
                )
    return pieces


class ShardSavePlanner(DefaultSavePlanner):
    """Plans the writing of ``ParamShard`` entries: each run of each tensor once, whichever ranks hold it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """What this rank could write; the coordinator then chooses one writer for what several ranks hold."""
        self._pieces = pieces_of(self.state_dict)
        self.plan = SavePlan(
            [
                WriteItem(
                    index=index,
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(_offset_of(index), view.shape),
                        properties=TensorProperties(dtype=view.dtype),
                        size=torch.Size(shard.global_shape),
                    ),
                )
                for index, (shard, view) in self._pieces.items()
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The view that holds the piece."""
        return self._pieces[index][1]


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans the reading into ``ParamShard`` entries, in place.

    What an entry holds and the checkpoint does not stays as it is: whether that may be is the caller's to check.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Note what is asked for and what there is."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """The slices of stored chunks that this rank needs."""
        assert self.metadata is not None
        self._pieces = pieces_of(self.state_dict)
        wanted: dict[str, list[ChunkStorageMetadata]] = {}
        for index, (shard, view) in self._pieces.items():
            wanted.setdefault(shard.key, []).append(ChunkStorageMetadata(_offset_of(index), view.shape))
        items = []
        for key, chunks in wanted.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, stored, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The view that is to hold the piece."""
        return self._pieces[index][1]


def _offset_of(index: MetadataIndex) -> torch.Size:
    assert index.offset is not None
    return index.offset
