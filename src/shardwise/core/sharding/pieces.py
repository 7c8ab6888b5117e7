"""Rectangular pieces of tensors for torch.distributed.checkpoint, and the parts of exact sums.

Exact sums along a split dimension have the same bits at every layout. At every number of ranks they cut each section of
the dimension into ``exact_parts`` parts by the balanced rule. Rank ``r`` of ``t`` must hold exactly the parts from
``r * exact_parts / t`` up to the next rank's first part, so each shard boundary must be a part boundary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sharding.balanced import Interval, balanced_sizes, intervals_of_sizes
from shardwise.core.sharding.param_layout import ParamLayout


class Box(NamedTuple):
    """A box of indices of an array: the first index and the number of indices in every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def narrowed(self, dim: int, start: int, stop: int) -> Box | None:
        """Return the part of the box between two indices of a dimension; None if it is empty."""
        low, high = max(start, self.offsets[dim]), min(stop, self.offsets[dim] + self.sizes[dim])
        if low >= high:
            return None
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = low, high - low
        return Box(tuple(offsets), tuple(sizes))


def boxes_of_interval(shape: Sequence[int], interval: Interval) -> list[Box]:
    """Return boxes that cover the elements ``interval`` of an array, in row-major order.

    The boxes are part of the first row, whole rows, and part of the last row. A part of a row is divided the same way.
    An array of ``n`` dimensions has at most ``2 * n - 1`` boxes.

    >>> boxes_of_interval((4, 5), (3, 17))
    [Box(offsets=(0, 3), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(2, 5)), Box(offsets=(3, 0), sizes=(1, 2))]
    """
    start, stop = interval
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    rest = tuple(shape[1:])
    row = math.prod(rest)

    def part(index: int, low: int, high: int) -> list[Box]:
        return [Box((index, *box.offsets), (1, *box.sizes)) for box in boxes_of_interval(rest, (low, high))]

    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return part(first, start - first * row, stop - first * row)
    whole_from, whole_to = -(-start // row), stop // row
    boxes = part(first, start - first * row, row) if first < whole_from else []
    if whole_from < whole_to:
        boxes.append(Box((whole_from, *(0 for _ in rest)), (whole_to - whole_from, *rest)))
    return boxes + (part(last, 0, stop - last * row) if whole_to <= last else [])


Piece = tuple[tuple[int, ...], Tensor]
"""Offset of a box in the whole tensor, and the view that holds it."""


class TensorPieces(Tensor):
    """This rank's pieces of a tensor, which ``dcp.save`` stores and ``dcp.load`` fills.

    It is a ``Tensor`` only because PyTorch's planners look for pieces in tensors. It has the shape of the whole tensor,
    the dtype and device of the pieces, and no values; any operation except reading its shape is an error. It follows
    the protocol of ``torch.distributed._checkpointable``, as DTensor does. DTensor supports neither balanced shards nor
    shards of several intervals.

    Args:
        shape: shape of the whole tensor.
        pieces: this rank's pieces. Any two written pieces, of any ranks, are the same box or disjoint.
        written: pieces that this rank may write, while other ranks write the rest; None means all pieces.
    """

    _pieces: list[Piece]
    _written: list[Piece] | None

    def __new__(
        cls,
        shape: Sequence[int],
        pieces: Sequence[Piece],
        *,
        dtype: torch.dtype,
        device: torch.device,
        written: Sequence[Piece] | None = None,
    ) -> TensorPieces:
        self: TensorPieces = shape_only(cls, shape, dtype, device)
        self._pieces, self._written = list(pieces), None if written is None else list(written)
        return self

    def pieces(self) -> list[Piece]:
        """Return the offset in the whole tensor, and the view, of each box that this rank holds."""
        return self._pieces

    def written_pieces(self) -> list[Piece]:
        """Return the pieces that this rank may write."""
        return self.pieces() if self._written is None else self._written

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        """Return the pieces that this rank may write; the planner then chooses one writer for each."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offset), view.shape),
                    properties=TensorProperties(dtype=view.dtype),
                    size=self.shape,
                ),
            )
            for offset, view in self.written_pieces()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Return the boxes to fill."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offset), view.shape) for offset, view in self.pieces()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the view that holds the piece at ``index.offset``."""
        return dict(self.pieces())[tuple(index.offset)]

    # Tensor's method has another parameter, which only PyTorch's printing passes.
    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __eq__(self, other: object) -> Any:
        return self is other

    def __ne__(self, other: object) -> Any:
        return self is not other

    __hash__ = Tensor.__hash__

    # Without this PyTorch would look for an override before every access to a shape. The value replaces a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ShardingError(
            f"{func} of a {cls.__name__}: it says where pieces of a tensor lie and has no values itself; use those of "
            "its pieces"
        )


def shape_only(cls: type[TensorPieces], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of class ``cls`` with a shape, a dtype and a device, but no memory."""
    return torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)


LocalParts = tuple[tuple[Interval, ...], ...]
"""Intervals of local indices of each part that a rank holds, one interval per section."""


def local_parts(layout: ParamLayout, rank: int, exact_parts: int, *, what: str) -> LocalParts:
    """Return those of ``exact_parts`` parts of a split dimension that ``rank`` holds, in local indices.

    >>> local_parts(ParamLayout.split((16,), 0, 2, stride=2), 1, 4, what="the width")
    (((0, 2), (4, 6)), ((2, 4), (6, 8)))

    If a shard boundary is not a part boundary, or there are fewer indices than parts, ConfigError names the largest
    number of parts that works. ``what`` is the name of the dimension.
    """
    if _fits(layout, exact_parts):
        parts = _parts(layout, rank, exact_parts)
        assert parts is not None
        return parts
    assert layout.dim is not None
    fitting = exact_parts // 2
    while fitting >= layout.world_size and not _fits(layout, fitting):
        fitting //= 2
    shards = [list(runs) for runs in layout.intervals]
    raise ConfigError(
        f"exact: {what}, of {layout.global_shape[layout.dim]} indices, is cut into {exact_parts} parts, and the bounds "
        f"of the shards on {layout.world_size} ranks ({shards}) are not among the cuts; "
        + (
            f"the largest exact_parts that works is {fitting}"
            if fitting >= layout.world_size
            else "no number works: use fewer ranks"
        )
    )


def fitting_ranks(layouts: Iterable[ParamLayout], exact_parts: int) -> list[int]:
    """Return the numbers of ranks, powers of two from 2 to ``exact_parts``, at which all shards are whole parts.

    >>> fitting_ranks([ParamLayout.split((509, 4), 0, 1)], 2), fitting_ranks([ParamLayout.split((509, 4), 0, 1)], 8)
    ([2], [])

    Layouts of any number of ranks serve; those not split by the balanced rule are skipped.
    """
    balanced = {
        (layout.global_shape, layout.dim, layout.stride)
        for layout in layouts
        if layout.dim is not None
        and layout == ParamLayout.split(layout.global_shape, layout.dim, layout.world_size, stride=layout.stride)
    }
    numbers = [1 << power for power in range(1, exact_parts.bit_length())]
    return [
        ranks
        for ranks in numbers
        if all(
            _fits(ParamLayout.split(shape, dim, ranks, stride=stride), exact_parts) for shape, dim, stride in balanced
        )
    ]


@lru_cache(maxsize=4096)
def _fits(layout: ParamLayout, exact_parts: int) -> bool:
    """True if every rank has whole parts. Every rank checks all ranks, so that all raise the same error."""
    return all(_parts(layout, rank, exact_parts) is not None for rank in range(layout.world_size))


def _parts(layout: ParamLayout, rank: int, exact_parts: int) -> LocalParts | None:
    assert layout.dim is not None
    section = layout.global_shape[layout.dim] // layout.stride
    if section < exact_parts or len(layout.intervals[rank]) != layout.stride:
        return None
    per_rank = exact_parts // layout.world_size
    cuts = intervals_of_sizes(balanced_sizes(section, exact_parts))[rank * per_rank : (rank + 1) * per_rank]
    start, stop = cuts[0][0], cuts[-1][1]
    if layout.intervals[rank] != tuple((start + k * section, stop + k * section) for k in range(layout.stride)):
        return None
    width = stop - start
    return tuple(
        tuple((low - start + k * width, high - start + k * width) for k in range(layout.stride)) for low, high in cuts
    )
