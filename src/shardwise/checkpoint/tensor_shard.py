"""One rank's part of a global tensor, as torch.distributed.checkpoint sees it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.errors import ShardingError
from shardwise.sharding import Interval, ParamLayout


class Segment(NamedTuple):
    """A run of indices along the split dimension that no rank's boundary cuts.

    Attributes:
        start: first index in the global tensor.
        length: number of indices.
        local_start: where the run begins in the rank's local tensor.
    """

    start: int
    length: int
    local_start: int


def segments(layout: ParamLayout, rank: int) -> list[Segment]:
    """What ``rank`` holds along the split dimension, cut wherever any rank's part begins or ends.

    Two segments, of whichever ranks, are therefore the same run or disjoint, so that "write each run once" needs no
    more than comparing their first indices.

    Args:
        layout: layout with a split dimension.
        rank: rank in the tensor-parallel group.

    Raises:
        ShardingError: the rank holds an index twice.
    """
    assert layout.dim is not None
    if layout.global_shape[layout.dim] == 0:
        return [Segment(0, 0, 0)]
    runs_of_rank = [_merge_adjacent(runs) for runs in layout.intervals]
    cuts = sorted({edge for runs in runs_of_rank for run in runs for edge in run})
    result = []
    local_start = 0
    for start, stop in runs_of_rank[rank]:
        edges = [cut for cut in cuts if start <= cut <= stop]
        result += [Segment(a, b - a, local_start + a - start) for a, b in pairwise(edges)]
        local_start += stop - start
    if len({segment.start for segment in result}) != len(result):
        raise ShardingError(f"rank {rank} holds an index twice: its runs are {list(layout.intervals[rank])}")
    return result


def _merge_adjacent(runs: tuple[Interval, ...]) -> list[Interval]:
    """Runs that continue each other, joined: a tensor that one rank holds is then one segment, whatever its stride."""
    merged: list[Interval] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


class TensorShard(Tensor):
    """This rank's part of one global tensor: a state-dict value that ``dcp.save`` and ``dcp.load`` accept.

    It has the global shape and no data of its own: the data stays in ``local``, which saving reads and loading fills
    in place. DTensor cannot stand here, since it has no balanced shards and no shards of several runs. It is a Tensor
    only because torch.distributed.checkpoint looks for shards in nothing else; every operation on it is refused.

    Implements torch.distributed.checkpoint's ``_Checkpointable`` protocol.

    Attributes:
        local: this rank's part, on any device; shares memory with the tensor that was given.
        param_layout: where each rank's part lies in the whole.
        rank: this rank in the tensor-parallel group that ``param_layout`` is about.
    """

    local: Tensor
    param_layout: ParamLayout
    rank: int

    @staticmethod
    def __new__(cls, local: Tensor, layout: ParamLayout, rank: int) -> TensorShard:
        """Describe ``local`` as what ``rank`` holds by ``layout``.

        Args:
            local: this rank's part, of shape ``layout.local_shape(rank)``; not copied.
            layout: where each rank's part lies in the whole; ``ParamLayout.replicated`` if each holds all of it.
            rank: rank in the tensor-parallel group.

        Raises:
            ShardingError: the rank is not one of the layout, holds an index twice, or ``local`` has another shape.
        """
        if not 0 <= rank < layout.world_size:
            raise ShardingError(f"rank {rank} is not one of the layout's {layout.world_size} ranks")
        expected = layout.local_shape(rank)
        if tuple(local.shape) != expected:
            raise ShardingError(
                f"rank {rank} should hold shape {list(expected)} of a tensor of shape {list(layout.global_shape)}, "
                f"got {list(local.shape)}"
            )
        shard: TensorShard = Tensor._make_wrapper_subclass(
            cls, layout.global_shape, dtype=local.dtype, device=local.device
        )
        shard.local = local.detach()
        shard.param_layout = layout
        shard.rank = rank
        shard._pieces = _pieces(shard.local, layout, rank)
        return shard

    _pieces: list[tuple[ChunkStorageMetadata, Tensor]]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(
            f"{func}: a TensorShard only describes a checkpoint's tensor; compute with its .local"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, local_shape = list(self.param_layout.global_shape), list(self.local.shape)
        return f"TensorShard(shape={shape}, local={local_shape}, dtype={self.dtype}, rank={self.rank})"

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What this rank could write; torch.distributed.checkpoint chooses one writer for what several ranks hold."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk, _ in self._pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank wants to read."""
        return [chunk for chunk, _ in self._pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The view of ``local`` that holds the chunk at ``index.offset``."""
        for chunk, view in self._pieces:
            if chunk.offsets == index.offset:
                return view
        raise ShardingError(f"rank {self.rank} holds no part of {index.fqn} at {index.offset}")


def _pieces(local: Tensor, layout: ParamLayout, rank: int) -> list[tuple[ChunkStorageMetadata, Tensor]]:
    """Each run that ``rank`` holds: where it lies in the whole, and the view of ``local`` that holds it."""
    dim = layout.dim
    if dim is None:
        return [(ChunkStorageMetadata(torch.Size([0] * local.dim()), local.shape), local)]
    pieces = []
    for start, length, local_start in segments(layout, rank):
        view = local.narrow(dim, local_start, length)
        offsets = torch.Size(start if d == dim else 0 for d in range(local.dim()))
        pieces.append((ChunkStorageMetadata(offsets, view.shape), view))
    return pieces
