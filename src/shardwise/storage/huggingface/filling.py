"""One rank's part of a parameter, read from the stored tensors that it is made of."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.core.errors import CheckpointError
from shardwise.core.sharding import Interval, ParamShard
from shardwise.storage.huggingface.mapping import Composition, Piece
from shardwise.storage.huggingface.pretrained_folder import PretrainedFolder
from shardwise.storage.huggingface.tensor_folder import TensorFolder, weight_dtype

# This many rows at both ends of each interval of a copy are compared.
_ROWS = 16


def check_shapes(folder: TensorFolder, composition: Composition, names: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the tensors have the shapes that the model gives them, and a dtype of weights."""
    for name, shape in composition.stored_shapes.items():
        stored = folder.tensors[names[name]]
        if stored.shape != shape:
            raise CheckpointError(
                f"tensor {stored.name!r} of {stored.file} has shape {list(stored.shape)}, but config.json asks for "
                f"{list(shape)}"
            )
        weight_dtype(stored)


@torch.no_grad()
def fill_shard_(shard: ParamShard, composition: Composition, folder: TensorFolder, names: Mapping[str, str]) -> None:
    """Read this rank's part of a parameter into ``shard.data``; at most as much memory again is used.

    Rows that the parameter has beyond the stored ones are 0.
    """
    layout, target = shard.layout, shard.data.detach()
    if layout.global_shape[0] > composition.shape[0]:
        target.zero_()
    rows = _own_rows(shard)
    columns: Sequence[Interval] = [(0, size) for size in composition.shape[1:]]
    if layout.dim == 1:
        columns = layout.intervals[shard.rank]
    for name, intervals in _intervals_by_tensor(composition, rows).items():
        for together in _neighbours(intervals):
            first, count = together[0].start, sum(stored.rows for stored in together)
            # A vector has no columns; one empty interval stands for them.
            place = 0
            for start, stop in columns or [(0, 0)]:
                values = _read(folder, names[name], composition, (first, start), (count, stop - start))
                part = target.narrow(1, place, stop - start) if columns else target
                for stored in together:
                    part[stored.place : stored.place + stored.rows].copy_(values[stored.start - first :][: stored.rows])
                place += stop - start


def _own_rows(shard: ParamShard) -> Sequence[Interval]:
    """The rows of the whole parameter of which this rank holds some columns, or all."""
    layout = shard.layout
    return layout.intervals[shard.rank] if layout.dim == 0 else [(0, layout.global_shape[0])]


def _read(
    folder: TensorFolder, name: str, composition: Composition, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Tensor:
    """Rows and columns of a stored tensor as the parameter has them; of a vector only the rows count."""
    dims = len(composition.shape)
    if composition.turns:
        return folder.read(name, offsets[::-1], sizes[::-1]).t()
    return folder.read(name, offsets[:dims], sizes[:dims])


class _StoredInterval(NamedTuple):
    """Consecutive rows of a tensor, and this rank's row where the first of them goes."""

    start: int
    rows: int
    place: int


def _intervals_by_tensor(composition: Composition, rows: Sequence[Interval]) -> dict[str, list[_StoredInterval]]:
    result: dict[str, list[_StoredInterval]] = {}
    place = 0
    for first, last in rows:
        for start, piece in zip(composition.starts, composition.pieces, strict=True):
            low, high = max(first, start), min(last, start + piece.rows)
            if low < high:
                stored = _StoredInterval(piece.start + low - start, high - low, place + low - first)
                result.setdefault(piece.tensor, []).append(stored)
        place += last - first
    return result


def _neighbours(intervals: Sequence[_StoredInterval]) -> list[list[_StoredInterval]]:
    """Intervals that continue each other in the file, which are read at once."""
    result: list[list[_StoredInterval]] = []
    for stored in sorted(intervals):
        if result and result[-1][-1].start + result[-1][-1].rows == stored.start:
            result[-1].append(stored)
        else:
            result.append([stored])
    return result


def check_copies(
    shard: ParamShard, composition: Composition, source: PretrainedFolder, names: Mapping[str, str]
) -> None:
    """Raise CheckpointError unless what files have twice, a tied weight, is the same both times.

    A few rows of this rank's part are compared: a second copy that was trained on its own differs in all of them, and
    reading it whole would cost as much as the first.
    """
    for copy, original in source.copies().items():
        if names.get(copy) in (None, names.get(original)) or original not in composition.stored_shapes:
            continue
        pieces = tuple(Piece(copy, piece.start, piece.rows) for piece in composition.pieces)
        repeated = Composition(composition.shape, pieces, composition.transposed)
        check_shapes(source.tensors, repeated, names)
        # A weight split by columns is never tied, so there is nothing to compare.
        if shard.layout.dim != 1 and not _same_rows(shard, repeated, source.tensors, names):
            raise CheckpointError(
                f"{source.path} has tensors {names[original]!r} and {names[copy]!r}, which differ, but its config.json "
                "says that they are one (tie_word_embeddings)"
            )


def _same_rows(shard: ParamShard, repeated: Composition, folder: TensorFolder, names: Mapping[str, str]) -> bool:
    data, local = shard.data.detach(), 0
    for first, last in _own_rows(shard):
        for start, stop in ((first, min(last, first + _ROWS)), (max(first + _ROWS, last - _ROWS), last)):
            for name, intervals in _intervals_by_tensor(repeated, [(start, max(start, stop))]).items():
                for stored in intervals:
                    values = _read(folder, names[name], repeated, (stored.start, 0), (stored.rows, *repeated.shape[1:]))
                    place = local + start - first + stored.place
                    if not torch.equal(values.to(data.dtype), data[place : place + stored.rows].cpu()):
                        return False
        local += last - first
    return True
