"""``ParamShard``: one rank's part of a named parameter, in the form that checkpoints store."""

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
"""``(axis, index, count)``: the tensor is at ``index`` of ``count`` along a new leading ``axis``."""


class ParamShard(TensorPieces):
    """One rank's part of a named parameter; layers return it from ``sharded_state_dict``, and checkpoints store it.

    ``shardwise.storage.checkpoint``, and ``save`` and ``load`` of ``torch.distributed.checkpoint``, accept a dict of
    shards. With the latter, the storage must keep several pieces of one tensor. ``HuggingFaceStorageWriter`` keeps only
    each rank's last piece, which is enough for most parameters, but not for a gated weight that is split.

    Attributes:
        key: name of the parameter in the checkpoint; parameters that ``sharded_offsets`` stack share one name.
        data: this rank's part, shape ``layout.local_shape(rank)``; the parameter itself, not a copy. With an
            ``interval``, the one-dimensional tensor of its elements.
        layout: position of each rank's part in the whole parameter.
        rank: this rank among the ranks of ``layout``.
        sharded_offsets: leading axes, numbered from 0, that stack parameters of one name, such as the layers of a
            model.
        allow_shape_mismatch: whether the stored parameter may have another size along the split dimension on load, such
            as a vocabulary with other padding. Missing elements stay unchanged, and extra elements are dropped.
            ``torch.distributed.checkpoint`` always requires the same shape.
        is_copy: whether an earlier data-parallel rank writes this part; see ``is_copy_by``. If False, the planner of
            the checkpoint chooses a writer among the ranks that hold it.
        interval: interval of the part's elements, in row-major order, that this rank holds when data-parallel ranks
            split the part; None for all elements. The intervals of all ranks cover the part. Each rank of ``layout``
            may have other interval boundaries; the first of several holders writes.
        replicas: axes over which the parameter is replicated.

    Raises:
        ShardingError: the rank is not one of the layout's, ``data`` does not have the shape that the layout assigns to
            it, the interval does not lie in the part, or the offsets' axes are not 0, 1...
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
        """Position of each rank's part in the whole parameter."""
        return self._layout

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, including the leading axes."""
        return tuple(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part, without the leading axes; ``data`` has it unless there is an ``interval``."""
        return self.layout.local_shape(self.rank)

    @property
    def description(self) -> tuple[torch.dtype, tuple[int, ...], ParamLayout]:
        """Dtype, shape and layout, which are the same of all entries of one key, on all ranks."""
        return self.data.dtype, self.global_shape, self.layout

    @property
    def is_replica(self) -> bool:
        """True if an earlier rank holds the same values: for a copy, and for a whole parameter except on rank 0."""
        return self.is_copy or (self.layout.dim is None and self.rank > 0)

    def accepts(self, stored_shape: Sequence[int]) -> bool:
        """True if a parameter of this shape can be loaded: the same, or one that ``allow_shape_mismatch`` allows."""
        stored, here = list(stored_shape), list(self.global_shape)
        # At another size, the sections of a strided dimension would begin elsewhere.
        if self.allow_shape_mismatch and self.layout.dim is not None and self.layout.stride == 1:
            resized = len(self.sharded_offsets) + self.layout.dim
            del stored[resized : resized + 1], here[resized]
        return stored == here

    def pieces(self) -> list[Piece]:
        """Return each piece that this rank holds: its offset in the whole parameter, and its view of ``data``.

        Any two pieces, of any ranks, are the same part of the parameter or disjoint, unless two ranks of the layout
        hold different intervals of a part that both have. Views include the leading axes, with size 1.

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
        """Return the pieces that this rank may write: none of a copy; of an interval, those it holds first."""
        if self.is_copy:
            return []
        if self.interval is None:
            return self.pieces()
        return [piece for piece, is_first in self._pieces_of_interval(self.interval) if is_first]

    def _pieces_of_interval(self, interval: Interval) -> list[tuple[Piece, bool]]:
        """Return the pieces of the interval, each with True if this is the first rank of the layout that holds it."""
        layout, rank = self.layout, self.rank
        shape, dim = layout.local_shape(rank), layout.dim
        lead = tuple(index for _, index, _ in self.sharded_offsets)
        ones = (1,) * len(lead)
        if math.prod(layout.global_shape) == 0:
            # Checkpoints also store tensors without elements.
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
        """Return the same part of the same parameter, with its values in ``data``, which has the same shape."""
        return self._but(data=data)

    def with_interval(self, interval: Interval, data: Tensor, *, is_copy: bool | None = None) -> ParamShard:
        """Return a shard with some of the part's elements, held in ``data``.

        Args:
            interval: ``(start, stop)`` of the elements, in row-major order.
            data: one-dimensional tensor of these elements.
            is_copy: whether another rank writes them; None keeps the current value.
        """
        return self._but(data=data, interval=interval, is_copy=self.is_copy if is_copy is None else is_copy)

    def with_key(self, key: str, *, allow_shape_mismatch: bool | None = None) -> ParamShard:
        """Return the same part under another name, with ``allow_shape_mismatch`` replaced unless it is None."""
        allow = self.allow_shape_mismatch if allow_shape_mismatch is None else allow_shape_mismatch
        return self._but(key=key, allow_shape_mismatch=allow)

    def with_layout(self, key: str, layout: ParamLayout) -> ParamShard:
        """Return this rank's part of another tensor, such as a moment of the parameter, with another layout."""
        return ParamShard(key, self.data, layout, self.rank, self.sharded_offsets, replicas=self.replicas)

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
        return type(self)(**(fields | changes))

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        # torch.distributed.checkpoint stores by the names in the dict. Layers under different names would each become a
        # stack of one layer.
        if self.sharded_offsets and f".{fqn}".removesuffix(f".{self.key}") == f".{fqn}":
            raise ShardingError(
                f"{fqn!r} is one of several tensors stacked under {self.key!r}; torch.distributed.checkpoint stores by "
                f"name, so call it {self.key!r} (one per rank), or use shardwise.storage.checkpoint.save"
            )
        return super().__create_write_items__(fqn, _)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # These let torch.distributed.checkpoint copy a state (`async_save`), and allocate memory for a meta state.
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.zeros_like.default, _aten.empty_like.default):
            return args[0].with_data(func(args[0].data, **kwargs))
        if func is _aten.copy_.default and isinstance(args[1], ParamShard):
            args[0].data.copy_(args[1].data, **kwargs)
            return args[0]
        if func is _aten.new_empty.default:
            # The caller then sets each attribute to a copy of this object's attribute.
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
