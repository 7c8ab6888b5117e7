"""Shared memory as a transport: the collectives on top of the slots, and the calls that start them.

Sums are taken in rank order from the same slots by every rank that wants them, so that all have the same bits; those of
more than two bf16 or fp16 values in fp32, rounded once.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import accounting
from shardwise.core.communication.buffers import GlobalMemoryBuffer, gather_buffer
from shardwise.core.communication.transports.shared_memory.channel import SLOT_BYTES, Channel, Message
from shardwise.core.communication.transports.transport import Pending, check_exchange

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SUMMABLE = frozenset(_FLOATS + _INTEGERS)
MOVABLE = SUMMABLE | {torch.bool}
_DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(sorted(MOVABLE, key=str))}


def _add(parts: Sequence[Tensor], stacked: Tensor, out: Tensor) -> None:
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
    else:
        torch.sum(stacked, 0, dtype=out.dtype, out=out)


class _Cut(Message):
    """A message whose tensors are cut into chunks of ``_per_chunk`` elements."""

    __slots__ = ("_per_chunk",)

    _per_chunk: int

    def _piece(self, flat: Tensor, chunk: int) -> Tensor:
        """What a chunk holds of a row of elements, or of whatever goes in one chunk."""
        return flat if self._num_chunks == 1 else flat[chunk * self._per_chunk : (chunk + 1) * self._per_chunk]

    def _put(self, tensor: Tensor, slot: int) -> None:
        channel = self._channel
        channel.rows(slot, tensor.dtype, tensor.shape)[channel.rank].copy_(tensor)

    def _put_lanes(self, parts: Sequence[Tensor], chunk: int, slot: int) -> None:
        """One lane of the slot for what each rank shall get."""
        channel = self._channel
        lanes = channel.rows(slot, parts[0].dtype, (channel.t, self._per_chunk))[channel.rank]
        for lane, part in zip(lanes.unbind(0), parts, strict=True):
            piece = self._piece(part, chunk)
            lane[: piece.numel()].copy_(piece)


class AllReduce(_Cut):
    """The sum, or the maximum, of every rank's tensor; every rank reads all slots.

    Args:
        tensor: this rank's part.
        result: contiguous, of ``tensor``'s shape; may be ``tensor`` itself.
        maximum: the largest value in place of the sum.
    """

    __slots__ = ("_maximum", "_tensor")

    def __init__(self, channel: Channel, tensor: Tensor, result: Tensor, *, maximum: bool = False) -> None:
        shape, dtype = tensor.shape, tensor.dtype
        self._per_chunk = SLOT_BYTES // dtype.itemsize
        num_chunks = -(-tensor.numel() // self._per_chunk)
        super().__init__(
            channel, ("all_reduce", shape, dtype), hash((1 + maximum, _DTYPE_NUMBER[dtype], shape)), num_chunks
        )
        self._maximum = maximum
        self.result = result
        self._tensor = tensor if num_chunks <= 1 else tensor.reshape(-1)
        self.start()

    def _write(self, chunk: int, slot: int) -> None:
        self._put(self._piece(self._tensor, chunk), slot)

    def _read(self, chunk: int, slot: int) -> None:
        result = self.result if self._num_chunks == 1 else self._piece(self.result.view(-1), chunk)
        *parts, stacked = self._channel.rows(slot, result.dtype, result.shape)
        if self._maximum:
            torch.amax(stacked, 0, out=result)
        else:
            _add(parts, stacked, result)


class AllGather(_Cut):
    """Every rank's shard, concatenated.

    Args:
        tensor: this rank's shard.
        dim: dimension of the concatenation.
        sizes: every rank's size along ``dim``.
        out: contiguous, receives the result; new memory if None.
    """

    __slots__ = ("_dim", "_out", "_parts", "_shapes", "_tensor")

    def __init__(
        self, channel: Channel, tensor: Tensor, dim: int, sizes: Sequence[int], out: Tensor | None = None
    ) -> None:
        shape, dtype = tensor.shape, tensor.dtype
        before, after = shape[:dim], shape[dim + 1 :]
        self._shapes = [torch.Size((*before, size, *after)) for size in sizes]
        self._per_chunk = SLOT_BYTES // dtype.itemsize
        num_chunks = -(-max(each.numel() for each in self._shapes) // self._per_chunk)
        super().__init__(
            channel,
            ("all_gather", shape, dtype, f"along dimension {dim} with sizes {list(sizes)}"),
            hash((3, _DTYPE_NUMBER[dtype], *before, -1, *after, dim, *sizes)),
            num_chunks,
        )
        self._dim = dim
        self._out = out
        self._tensor = tensor if num_chunks <= 1 else tensor.reshape(-1)
        self._parts: list[Tensor] = []
        if num_chunks != 1:
            self._parts = [tensor.new_empty(each) for each in self._shapes]
            if dim == 0:
                self.result = tensor.new_empty((sum(sizes), *after)) if out is None else out
                self._parts = list(self.result.split(list(sizes)))
        self.start()

    def finish(self) -> None:
        super().finish()
        if self._parts and self._dim != 0:
            self._join(self._parts)
            self._parts = []

    def _write(self, chunk: int, slot: int) -> None:
        self._put(self._piece(self._tensor, chunk), slot)

    def _read(self, chunk: int, slot: int) -> None:
        channel, dtype = self._channel, self._tensor.dtype
        if self._num_chunks == 1:
            rows = [channel.rows(slot, dtype, shape)[rank] for rank, shape in enumerate(self._shapes)]
            self._join(rows)
            return
        for rank, part in enumerate(self._parts):
            if part.data_ptr() == self._tensor.data_ptr():
                # It is where it shall be.
                continue
            piece = self._piece(part.view(-1), chunk)
            piece.copy_(channel.rows(slot, dtype, piece.shape)[rank])

    def _join(self, parts: list[Tensor]) -> None:
        if self._out is None:
            self.result = torch.cat(parts, self._dim)
        else:
            self.result = torch.cat(parts, self._dim, out=self._out)


class ReduceScatter(_Cut):
    """This rank's shard of the sum of every rank's tensor.

    Args:
        tensor: this rank's part, of the whole shape.
        dim: dimension that is split.
        sizes: every rank's size along ``dim``.
        overwrites: the result is this rank's part of ``tensor``, which is contiguous and split along its first
            dimension. A chunk of it is overwritten after it was put into a slot.
    """

    __slots__ = ("_dim", "_own", "_parts", "_start", "_tensor")

    def __init__(
        self, channel: Channel, tensor: Tensor, dim: int, sizes: Sequence[int], *, overwrites: bool = False
    ) -> None:
        shape, dtype = tensor.shape, tensor.dtype
        per_chunk = SLOT_BYTES // dtype.itemsize
        self._parts: list[Tensor] = []
        if tensor.numel() <= per_chunk:
            num_chunks = min(1, tensor.numel())
        else:
            per_chunk //= channel.t
            self._parts = [part.reshape(-1) for part in tensor.split(list(sizes), dim)]
            num_chunks = -(-max(part.numel() for part in self._parts) // per_chunk)
        self._per_chunk = per_chunk
        super().__init__(
            channel,
            ("reduce_scatter", shape, dtype, f"along dimension {dim} into sizes {list(sizes)}"),
            hash((4, _DTYPE_NUMBER[dtype], *shape, dim, *sizes)),
            num_chunks,
        )
        self._tensor = tensor
        self._dim = dim
        self._start = sum(sizes[: channel.rank])
        self._own = sizes[channel.rank]
        if overwrites:
            self.result = tensor.narrow(0, self._start, self._own)
        else:
            self.result = tensor.new_empty((*shape[:dim], self._own, *shape[dim + 1 :]))
        self.start()

    def _write(self, chunk: int, slot: int) -> None:
        if self._parts:
            self._put_lanes(self._parts, chunk, slot)
        else:
            self._put(self._tensor, slot)

    def _read(self, chunk: int, slot: int) -> None:
        channel, result = self._channel, self.result
        if not self._parts:
            stacked = channel.rows(slot, result.dtype, self._tensor.shape)[-1]
            mine = stacked.narrow(self._dim + 1, self._start, self._own)
        else:
            stacked = channel.rows(slot, result.dtype, (channel.t, self._per_chunk))[-1]
            result = self._piece(result.view(-1), chunk)
            mine = stacked[:, channel.rank, : result.numel()]
        _add(mine.unbind(0), mine, result)


class AllToAll(_Cut):
    """The rows that every rank has for this one, in rank order.

    Ranks tell each other first how many rows they send and expect: one message of a few numbers, so that a disagreement
    is an error, and the same one, on all of them.

    Args:
        tensor: ``[sum(input_sizes), ...]``.
        output_sizes: rows received from each rank.
        input_sizes: rows sent to each rank.

    Raises:
        DesyncError: a rank does not send what another expects.
    """

    __slots__ = ("_own_parts", "_parts")

    def __init__(
        self, channel: Channel, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> None:
        t, row_shape, dtype = channel.t, tensor.shape[1:], tensor.dtype
        asked = AllGather(channel, torch.tensor([[*input_sizes, *output_sizes]]), 0, (1,) * t).wait().tolist()
        sent, expected = [sizes[:t] for sizes in asked], [sizes[t:] for sizes in asked]
        check_exchange(sent, expected)
        self._per_chunk = SLOT_BYTES // dtype.itemsize // t
        most = max(max(sizes) for sizes in sent) * row_shape.numel()
        super().__init__(
            channel,
            ("all_to_all", tensor.shape, dtype),
            hash((5, _DTYPE_NUMBER[dtype], *row_shape)),
            -(-most // self._per_chunk),
        )
        self._own_parts = [part.reshape(-1) for part in tensor.split(list(input_sizes))]
        self.result = tensor.new_empty((sum(output_sizes), *row_shape))
        self._parts = [part.view(-1) for part in self.result.split(list(output_sizes))]
        self.start()

    def _write(self, chunk: int, slot: int) -> None:
        self._put_lanes(self._own_parts, chunk, slot)

    def _read(self, chunk: int, slot: int) -> None:
        channel = self._channel
        *every, _ = channel.rows(slot, self.result.dtype, (channel.t, self._per_chunk))
        for lanes, part in zip(every, self._parts, strict=True):
            piece = self._piece(part, chunk)
            piece.copy_(lanes[channel.rank, : piece.numel()])


class Shift(_Cut):
    """The rows of the rank ``step`` places back in the ring.

    Args:
        tensor: this rank's rows, contiguous.
        step: how far rows go.
        counts: every rank's number of rows.
        out: contiguous, receives the result; new memory if None.
    """

    __slots__ = ("_rows", "_source")

    def __init__(
        self, channel: Channel, tensor: Tensor, step: int, counts: Sequence[int], out: Tensor | None = None
    ) -> None:
        row_shape, dtype = tensor.shape[1:], tensor.dtype
        self._per_chunk = SLOT_BYTES // dtype.itemsize
        super().__init__(
            channel,
            ("shift", tensor.shape, dtype, f"by {step} of {list(counts)} rows"),
            hash((6, _DTYPE_NUMBER[dtype], *row_shape, step, *counts)),
            -(-max(counts) * row_shape.numel() // self._per_chunk),
        )
        self._rows = tensor.reshape(-1)
        self._source = (channel.rank - step) % channel.t
        self.result = tensor.new_empty((counts[self._source], *row_shape)) if out is None else out
        self.start()

    def _write(self, chunk: int, slot: int) -> None:
        self._put(self._piece(self._rows, chunk), slot)

    def _read(self, chunk: int, slot: int) -> None:
        piece = self._piece(self.result.view(-1), chunk)
        piece.copy_(self._channel.rows(slot, piece.dtype, piece.shape)[self._source])


CARRIED = {
    "all_reduce": SUMMABLE,
    "all_gather": MOVABLE,
    "reduce_scatter": SUMMABLE,
    "all_to_all": MOVABLE,
    "shift": MOVABLE,
}
"""The dtypes that each operation takes."""

REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
"""What an all-reduce can do."""


class SharedMemory(Channel):
    """A group's channel with the collectives of ``Transport``; it compares all calls by itself."""

    def all_reduce(self, tensor: Tensor, group: ProcessGroup, op: Any, may_overwrite: bool) -> Pending:
        """As in ``Transport``."""
        accounting.record("all_reduce", tensor)
        own = tensor.detach()
        overwrites = may_overwrite and own.is_contiguous()
        result = own if overwrites else torch.empty_like(own, memory_format=torch.contiguous_format)
        return AllReduce(self, own, result, maximum=op == dist.ReduceOp.MAX)

    def all_gather(
        self,
        tensor: Tensor,
        group: ProcessGroup,
        dim: int,
        sizes: Sequence[int],
        buffer: GlobalMemoryBuffer | Tensor | None,
    ) -> Pending:
        """As in ``Transport``."""
        accounting.record("all_gather", tensor)
        return AllGather(self, tensor.detach(), dim, sizes, gather_buffer(buffer, tensor, dim, sizes))

    def reduce_scatter(
        self, tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int], may_overwrite: bool
    ) -> Pending:
        """As in ``Transport``."""
        accounting.record("reduce_scatter", tensor)
        return ReduceScatter(self, tensor.detach(), dim, sizes, overwrites=may_overwrite)

    def all_to_all(
        self, tensor: Tensor, group: ProcessGroup, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> Pending:
        """As in ``Transport``."""
        accounting.record("all_to_all", tensor)
        return AllToAll(self, tensor.detach(), output_sizes, input_sizes)

    def shift(
        self, tensor: Tensor, group: ProcessGroup, step: int, counts: Sequence[int], out: Tensor | None
    ) -> Pending:
        """As in ``Transport``."""
        accounting.record("all_to_all", tensor)
        return Shift(self, tensor.detach(), step, counts, out)
