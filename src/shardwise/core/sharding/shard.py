"""One rank's part of a named parameter: what checkpoints store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import ShardingError
from shardwise.core.sharding.balanced import Interval
from shardwise.core.sharding.param_layout import ParamLayout, Replicas, holders, segments
from shardwise.core.sharding.pieces import Piece, TensorPieces, boxes_of_interval, shape_only

_aten = torch.ops.aten

ShardedOffset = tuple[int, int, int]
"""``(axis, index, count)``: a tensor is number ``index`` of ``count`` along a new leading ``axis``."""


class ParamShard(TensorPieces):
    """One rank's part of a named parameter: what a layer's ``sharded_state_dict`` returns and a checkpoint stores.

    ``shardwise.storage.checkpoint`` takes a dict of them, and so do ``torch.distributed.checkpoint.save`` and
    ``load``, to any storage that keeps several pieces of a tensor. ``HuggingFaceStorageWriter`` does not: it keeps
    each rank's last one, which suffices for most parameters, but not for a gated weight that is split.

    Attributes:
        key: name of the parameter in the checkpoint; parameters that ``sharded_offsets`` stack share it.
        data: this rank's part, shape ``layout.local_shape(rank)``; the parameter itself, not a copy. With an
            ``interval`` one-dimensional: these elements.
        layout: where each rank's part lies in the whole.
        rank: this rank among those that ``layout`` is about.
        sharded_offsets: leading axes that stack parameters of one name, such as the layers of a model; axis numbers
            count from 0.
        allow_shape_mismatch: on load the stored parameter may have another size along the split dimension, such as a
            vocabulary with other padding; missing elements are left alone, others are dropped.
            ``torch.distributed.checkpoint`` always wants the same shape.
        is_copy: a data-parallel rank before this one writes it; see ``is_copy_by``. If False the planner of a
            checkpoint chooses among all that hold it.
        interval: where data-parallel ranks share out a part: the interval of its elements, in row-major order, that
            this one holds. None for all of them. All ranks' intervals together are the part; they may be cut at other
            places on each rank of ``layout``, and the first of several holders writes.
        replicas: the ranks that hold the same.

    Raises:
        ShardingError: the rank is not one of the layout's, ``data`` is not of the shape that the layout gives it, the
            interval does not lie in the part, or the offsets' axes are not 0, 1...
    """

    key: str
    rank: int
    sharded_offsets: tuple[ShardedOffset, ...]
    allow_shape_mismatch: bool
    is_copy: bool
    interval: Interval | None
    replicas: Replicas
    _data: Tensor
    _layout: ParamLayout

    def __new__(
        cls,
        key: str,
        data: Tensor,
        layout: ParamLayout,
        rank: int,
        sharded_offsets: tuple[ShardedOffset, ...] = (),
        allow_shape_mismatch: bool = False,
        is_copy: bool = False,
        interval: Interval | None = None,
        replicas: Replicas = Replicas(),  # noqa: B008  # Frozen.
    ) -> ParamShard:
        if not 0 <= rank < layout.world_size:
            raise ShardingError(f"{key}: rank {rank} is not one of the layout's {layout.world_size}")
        expected = layout.local_shape(rank)
        if interval is not None:
            if not 0 <= interval[0] <= interval[1] <= math.prod(expected):
                raise ShardingError(
                    f"{key}: the interval {list(interval)} does not lie in the {math.prod(expected)} elements of "
                    f"rank {rank}, shape {list(expected)}"
                )
            expected = (interval[1] - interval[0],)
        if tuple(data.shape) != expected:
            raise ShardingError(
                f"{key}: rank {rank} should hold shape {list(expected)} of {list(layout.global_shape)}, "
                f"got {list(data.shape)}"
            )
        for axis, (stated, index, count) in enumerate(sharded_offsets):
            if stated != axis or not 0 <= index < count:
                raise ShardingError(
                    f"{key}: sharded_offsets {list(sharded_offsets)} must be (axis, index, count) with axes "
                    "0, 1, ... and each index under its count"
                )
        shape = (*(count for _, _, count in sharded_offsets), *layout.global_shape)
        self: ParamShard = shape_only(cls, shape, data.dtype, data.device)
        self.key, self.rank = key, rank
        self._data, self._layout = data, layout
        self.sharded_offsets, self.allow_shape_mismatch = sharded_offsets, allow_shape_mismatch
        self.is_copy, self.interval, self.replicas = is_copy, interval, replicas
        return self

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """This rank's part."""
        return self._data

    @property
    def layout(self) -> ParamLayout:  # type: ignore[override]
        """Where each rank's part lies in the whole."""
        return self._layout

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, leading axes included."""
        return tuple(self.shape)

    @property
    def is_replica(self) -> bool:
        """True if a rank before this one holds the same values: a copy, or a whole parameter but on the first rank."""
        return self.is_copy or (self.layout.dim is None and self.rank > 0)

    def accepts(self, stored_shape: Sequence[int]) -> bool:
        """True if a whole parameter of this shape can be loaded: the same, or as ``allow_shape_mismatch`` allows."""
        stored, here = list(stored_shape), list(self.global_shape)
        # The sections of a strided dimension would not lie where they lay.
        if self.allow_shape_mismatch and self.layout.dim is not None and self.layout.stride == 1:
            resized = len(self.sharded_offsets) + self.layout.dim
            del stored[resized : resized + 1], here[resized]
        return stored == here

    def pieces(self) -> list[Piece]:
        """Each interval of indices that this rank holds: its offset in the whole, and the view of ``data`` for it.

        Pieces of any two ranks are the same part of the whole or have nothing in common, but for ranks of the layout
        that hold different intervals of what they both have. Views have the leading axes too, of size 1.

        Raises:
            ShardingError: the rank holds an index twice.
        """
        if self.interval is not None:
            return [piece for piece, _ in self._pieces_of_interval(self.interval)]
        lead = tuple(index for _, index, _ in self.sharded_offsets)
        data = self.data.detach()[(None,) * len(lead)] if lead else self.data.detach()
        dim = self.layout.dim
        if dim is None:
            return [(lead + (0,) * len(self.layout.global_shape), data)]
        return [
            (
                lead + tuple(start if d == dim else 0 for d in range(len(self.layout.global_shape))),
                data.narrow(len(lead) + dim, local_start, length),
            )
            for start, length, local_start in segments(self.layout, self.rank)
        ]

    def written_pieces(self) -> list[Piece]:
        """The pieces that this rank may write: none of a copy; of an interval, those that no earlier rank holds."""
        if self.is_copy:
            return []
        if self.interval is None:
            return self.pieces()
        return [piece for piece, is_first in self._pieces_of_interval(self.interval) if is_first]

    def _pieces_of_interval(self, interval: Interval) -> list[tuple[Piece, bool]]:
        """The pieces of the interval, each with True if this is the layout's first rank that has it."""
        layout, rank = self.layout, self.rank
        shape, dim = layout.local_shape(rank), layout.dim
        lead = tuple(index for _, index, _ in self.sharded_offsets)
        ones = (1,) * len(lead)
        if math.prod(layout.global_shape) == 0:
            # A tensor without elements is stored too.
            return [(((*lead, *(0 for _ in shape)), self.data.detach().view((*ones, *shape))), rank == 0)]
        pieces: list[tuple[Piece, bool]] = []
        taken = 0
        for box in boxes_of_interval(shape, interval):
            count = math.prod(box.sizes)
            view = self.data.detach()[taken : taken + count].view((*ones, *box.sizes))
            taken += count
            if dim is None:
                pieces.append((((*lead, *box.offsets), view), rank == 0))
                continue
            for start, length, local_start in segments(layout, rank):
                part = box.narrowed(dim, local_start, local_start + length)
                if part is None:
                    continue
                offsets = list(part.offsets)
                offsets[dim] += start - local_start
                inside = view.narrow(len(lead) + dim, part.offsets[dim] - box.offsets[dim], part.sizes[dim])
                is_first = holders(layout)[start, start + length][0] == rank
                pieces.append((((*lead, *offsets), inside), is_first))
        return pieces

    def with_data(self, data: Tensor) -> ParamShard:
        """The same part of the same parameter, held in ``data``, of the same shape."""
        return self._but(data=data)

    def with_interval(self, interval: Interval, data: Tensor, *, is_copy: bool | None = None) -> ParamShard:
        """Some of the part's elements, held in ``data``.

        Args:
            interval: first element in row-major order, and the one after the last.
            data: one-dimensional, these elements.
            is_copy: another rank writes them; as it was if None.
        """
        return self._but(data=data, interval=interval, is_copy=self.is_copy if is_copy is None else is_copy)

    def with_key(self, key: str, *, allow_shape_mismatch: bool | None = None) -> ParamShard:
        """The same part under another name, which may allow another size on load."""
        allow = self.allow_shape_mismatch if allow_shape_mismatch is None else allow_shape_mismatch
        return self._but(key=key, allow_shape_mismatch=allow)

    def _but(self, **changes: Any) -> ParamShard:
        fields: dict[str, Any] = {
            "key": self.key,
            "data": self.data,
            "layout": self.layout,
            "rank": self.rank,
            "sharded_offsets": self.sharded_offsets,
            "allow_shape_mismatch": self.allow_shape_mismatch,
            "is_copy": self.is_copy,
            "interval": self.interval,
            "replicas": self.replicas,
        }
        return ParamShard(**(fields | changes))

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        # torch.distributed.checkpoint stores by the dict's names, so that layers under different names would each be a
        # stack with one layer in it.
        if self.sharded_offsets and f".{fqn}".removesuffix(f".{self.key}") == f".{fqn}":
            raise ShardingError(
                f"{fqn!r} is one of several tensors stacked under {self.key!r}; torch.distributed.checkpoint stores by "
                f"name, so call it {self.key!r} (one per rank), or use shardwise.storage.checkpoint.save"
            )
        return super().__create_write_items__(fqn, _)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # By these torch.distributed.checkpoint copies a state (`async_save`), and allocates one of the meta device.
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.zeros_like.default, _aten.empty_like.default):
            return args[0].with_data(func(args[0].data, **kwargs))
        if func is _aten.copy_.default and isinstance(args[1], ParamShard):
            args[0].data.copy_(args[1].data, **kwargs)
            return args[0]
        if func is _aten.new_empty.default:
            # The caller then sets every attribute to a copy of ours.
            return shape_only(cls, args[1], args[0].dtype, kwargs.get("device", args[0].device))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"ParamShard(key={self.key!r}, rank={self.rank}, layout={self.layout}, "
            f"sharded_offsets={self.sharded_offsets}, dtype={self.dtype}, device={self.device})"
        )


def is_copy_by(metadata: Mapping[str, Any] | None) -> bool:
    """True if this rank is not the first of ``metadata["dp_cp_group"]``, whose ranks hold copies of the model."""
    group = None if metadata is None else metadata.get("dp_cp_group")
    return group is not None and group.rank() > 0
