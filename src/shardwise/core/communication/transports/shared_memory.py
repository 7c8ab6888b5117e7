"""Shared memory as a transport between CPU ranks of one machine.

Even between two processes of one machine, gloo uses sockets and its own threads. A small collective takes hundreds of
microseconds, mostly spent waiting for a thread to wake. With this transport every rank copies its part into a slot of
shared memory, sets a flag, waits for the other ranks' flags and reads their slots (``channel``). The ranks of a group
decide together whether they can share memory (``channel_of``).

Every rank that needs a sum computes it from the same slots in rank order, so that all ranks get the same bits. Sums of
more than two bf16 or fp16 values are computed in fp32 and rounded once.
"""

import contextlib
import os
import platform
import secrets
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.core import processes
from shardwise.core.communication import accounting
from shardwise.core.communication.agreement import gather_objects
from shardwise.core.communication.context import GlobalMemoryBuffer, context_of, gather_buffer, is_gloo, time_limit
from shardwise.core.communication.transports.channel import SLOT_BYTES, Channel, Message, channel_bytes
from shardwise.core.communication.transports.transport import Pending, check_exchange
from shardwise.core.processes import Process, machine, temporary_prefix

T = TypeVar("T")

SWITCH = processes.SHARED_MEMORY
"""Environment variable; 0 leaves everything to gloo."""

MAX_RANKS = 8
"""Largest number of ranks of a group that shares memory."""

_WHAT = "how to share memory"

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


class AllReduce(Message):
    """All-reduce by sum or maximum into ``result``, which is contiguous and may be ``tensor`` itself."""

    __slots__ = ("_maximum",)

    def __init__(self, channel: Channel, tensor: Tensor, result: Tensor, *, maximum: bool) -> None:
        shape, dtype = tensor.shape, tensor.dtype
        call = hash((1 + maximum, _DTYPE_NUMBER[dtype], shape))
        super().__init__(channel, ("all_reduce", shape, dtype), call, tensor, tensor.numel())
        self._maximum = maximum
        self.result = result
        self.start()

    def _read(self, chunk: int, slot: int) -> None:
        result = self.result if self._num_chunks == 1 else self._piece(self.result.view(-1), chunk)
        *parts, stacked = self._channel.rows(slot, result.dtype, result.shape)
        if self._maximum:
            torch.amax(stacked, 0, out=result)
        else:
            _add(parts, stacked, result)


class AllGather(Message):
    """All-gather along ``dim``, into the contiguous buffer ``out`` if it is given."""

    __slots__ = ("_dim", "_out", "_parts", "_shapes", "_tensor")

    def __init__(
        self, channel: Channel, tensor: Tensor, dim: int, sizes: Sequence[int], out: Tensor | None = None
    ) -> None:
        shape, dtype = tensor.shape, tensor.dtype
        before, after = shape[:dim], shape[dim + 1 :]
        self._shapes = [torch.Size((*before, size, *after)) for size in sizes]
        super().__init__(
            channel,
            ("all_gather", shape, dtype, f"along dimension {dim} with sizes {list(sizes)}"),
            hash((3, _DTYPE_NUMBER[dtype], *before, -1, *after, dim, *sizes)),
            tensor,
            max(each.numel() for each in self._shapes),
        )
        self._dim, self._out, self._tensor = dim, out, tensor
        self._parts: list[Tensor] = []
        if self._num_chunks != 1:
            if dim == 0:
                self.result = tensor.new_empty((sum(sizes), *after)) if out is None else out
                self._parts = list(self.result.split(list(sizes)))
            else:
                self._parts = [tensor.new_empty(each) for each in self._shapes]
        self.start()

    def finish(self) -> None:
        super().finish()
        if self._parts and self._dim != 0:
            self._join(self._parts)
            self._parts = []

    def _read(self, chunk: int, slot: int) -> None:
        channel, dtype = self._channel, self._tensor.dtype
        if self._num_chunks == 1:
            self._join([channel.rows(slot, dtype, shape)[rank] for rank, shape in enumerate(self._shapes)])
            return
        for rank, part in enumerate(self._parts):
            # This rank's own part may already be in the output buffer.
            if part.data_ptr() != self._tensor.data_ptr():
                piece = self._piece(part.view(-1), chunk)
                piece.copy_(channel.rows(slot, dtype, piece.shape)[rank])

    def _join(self, parts: list[Tensor]) -> None:
        if self._out is None:
            self.result = torch.cat(parts, self._dim)
        else:
            self.result = torch.cat(parts, self._dim, out=self._out)


class ReduceScatter(Message):
    """Reduce-scatter by sum along ``dim``.

    With ``overwrites`` the result is this rank's part of ``tensor``, which is contiguous and split along its first
    dimension. Each chunk is overwritten after it was written to a slot.
    """

    __slots__ = ("_dim", "_own", "_start", "_tensor")

    def __init__(self, channel: Channel, tensor: Tensor, dim: int, sizes: Sequence[int], *, overwrites: bool) -> None:
        shape, dtype = tensor.shape, tensor.dtype
        sent: Tensor | list[Tensor] = tensor
        count = tensor.numel()
        if count > SLOT_BYTES // dtype.itemsize:
            sent = [part.reshape(-1) for part in tensor.split(list(sizes), dim)]
            count = max(part.numel() for part in sent)
        super().__init__(
            channel,
            ("reduce_scatter", shape, dtype, f"along dimension {dim} into sizes {list(sizes)}"),
            hash((4, _DTYPE_NUMBER[dtype], *shape, dim, *sizes)),
            sent,
            count,
        )
        self._tensor, self._dim = tensor, dim
        self._start, self._own = sum(sizes[: channel.rank]), sizes[channel.rank]
        if overwrites:
            self.result = tensor.narrow(0, self._start, self._own)
        else:
            self.result = tensor.new_empty((*shape[:dim], self._own, *shape[dim + 1 :]))
        self.start()

    def _read(self, chunk: int, slot: int) -> None:
        channel, result = self._channel, self.result
        if isinstance(self._sent, list):
            stacked = channel.rows(slot, result.dtype, (channel.t, self._per_chunk))[-1]
            result = self._piece(result.view(-1), chunk)
            mine = stacked[:, channel.rank, : result.numel()]
        else:
            stacked = channel.rows(slot, result.dtype, self._tensor.shape)[-1]
            mine = stacked.narrow(self._dim + 1, self._start, self._own)
        _add(mine.unbind(0), mine, result)


class AllToAll(Message):
    """All-to-all: this rank receives its rows from every rank, in rank order.

    The ranks first exchange the numbers of rows that they send and expect, in one small message. If the numbers
    disagree, all ranks raise the same DesyncError.
    """

    __slots__ = ("_parts",)

    def __init__(
        self, channel: Channel, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> None:
        t, row_shape, dtype = channel.t, tensor.shape[1:], tensor.dtype
        asked = AllGather(channel, torch.tensor([[*input_sizes, *output_sizes]]), 0, (1,) * t).wait().tolist()
        sent, expected = [sizes[:t] for sizes in asked], [sizes[t:] for sizes in asked]
        check_exchange(sent, expected)
        super().__init__(
            channel,
            ("all_to_all", tensor.shape, dtype),
            hash((5, _DTYPE_NUMBER[dtype], *row_shape)),
            [part.reshape(-1) for part in tensor.split(list(input_sizes))],
            max(max(sizes) for sizes in sent) * row_shape.numel(),
        )
        self.result = tensor.new_empty((sum(output_sizes), *row_shape))
        self._parts = [part.view(-1) for part in self.result.split(list(output_sizes))]
        self.start()

    def _read(self, chunk: int, slot: int) -> None:
        channel = self._channel
        *every, _ = channel.rows(slot, self.result.dtype, (channel.t, self._per_chunk))
        for lanes, part in zip(every, self._parts, strict=True):
            piece = self._piece(part, chunk)
            piece.copy_(lanes[channel.rank, : piece.numel()])


class Shift(Message):
    """Ring shift: receive the rows of the rank ``step`` places back, into ``out`` if given; both are contiguous."""

    __slots__ = ("_source",)

    def __init__(self, channel: Channel, tensor: Tensor, step: int, counts: Sequence[int], out: Tensor | None) -> None:
        row_shape, dtype = tensor.shape[1:], tensor.dtype
        super().__init__(
            channel,
            ("shift", tensor.shape, dtype, f"by {step} of {list(counts)} rows"),
            hash((6, _DTYPE_NUMBER[dtype], *row_shape, step, *counts)),
            tensor,
            max(counts) * row_shape.numel(),
        )
        self._source = (channel.rank - step) % channel.t
        self.result = tensor.new_empty((counts[self._source], *row_shape)) if out is None else out
        self.start()

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
"""The dtypes that each operation supports."""

REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
"""The reductions that an all-reduce supports."""


class SharedMemory(Channel):
    """A group's channel with the collectives of ``Transport``; it always compares the ranks' calls."""

    def all_reduce(self, tensor: Tensor, group: ProcessGroup, op: Any, may_overwrite: bool) -> Pending:
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
        accounting.record("all_gather", tensor)
        return AllGather(self, tensor.detach(), dim, sizes, gather_buffer(buffer, tensor, dim, sizes))

    def reduce_scatter(
        self, tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int], may_overwrite: bool
    ) -> Pending:
        accounting.record("reduce_scatter", tensor)
        return ReduceScatter(self, tensor.detach(), dim, sizes, overwrites=may_overwrite)

    def all_to_all(
        self, tensor: Tensor, group: ProcessGroup, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> Pending:
        accounting.record("all_to_all", tensor)
        return AllToAll(self, tensor.detach(), output_sizes, input_sizes)

    def shift(
        self, tensor: Tensor, group: ProcessGroup, step: int, counts: Sequence[int], out: Tensor | None
    ) -> Pending:
        accounting.record("all_to_all", tensor)
        return Shift(self, tensor.detach(), step, counts, out)


def why_not_here() -> str | None:
    """Return why this process cannot use shared memory; None if it can."""
    if not processes.is_on(SWITCH):
        return f"{SWITCH}=0"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"on {platform.machine()} stores may become visible out of order"
    if Process.find(os.getpid()) is None or machine() is None:
        return "there is no /proc that shows whether a rank lives"
    return None


def channel_of(group: ProcessGroup) -> SharedMemory | None:
    """Return the group's channel, or None if its ranks do not share memory. The first call of a group is collective.

    A channel is opened for a gloo group of 2 to 8 ranks on one machine, if all of them can map the same memory.
    """
    context = context_of(group)
    if not context.has_tried_to_share:
        # Dispatch modes that intercept operators must not see the set-up.
        with _disable_current_modes(), accounting.uncounted(), torch.inference_mode(False):
            context.channel = _open(group)
        context.has_tried_to_share = True
    return context.channel


def close_channel(group: ProcessGroup) -> None:
    """Unmap the group's memory, if it has any; the next ``channel_of`` tries again."""
    context = context_of(group)
    context.channel, context.has_tried_to_share = None, False


def _open(group: ProcessGroup) -> SharedMemory | None:
    t, rank = group.size(), group.rank()
    if not 2 <= t <= MAX_RANKS or not is_gloo(group, torch.device("cpu")):
        return None
    hellos = gather_objects(None if why_not_here() is not None else _attempt(_where_and_who), _WHAT, group=group)
    if None in hellos or len({where for where, _ in hellos}) > 1:
        return None
    with contextlib.ExitStack() as stack:
        path, token = None, secrets.token_bytes(32)
        if rank == 0:
            path = _attempt(lambda: stack.enter_context(_reserved_file(channel_bytes(t), token)))
        path, token = gather_objects((path, token), _WHAT, group=group)[0]
        memory = None if path is None else _attempt(lambda: _map(path, channel_bytes(t), token))
        if not all(gather_objects(memory is not None, _WHAT, group=group)):
            return None
    assert memory is not None
    # All ranks have read the token before a flag overwrites it.
    if rank == 0:
        memory[: len(token)].zero_()
    gather_objects(True, _WHAT, group=group)
    limit = time_limit(group, torch.device("cpu")).total_seconds()
    return SharedMemory(rank, memory, [process for _, process in hellos], limit, dist.get_process_group_ranks(group))


def _where_and_who() -> tuple[str | None, Process | None]:
    """Identify the machine, as this process sees it, and the process."""
    return machine(), Process.find(os.getpid())


def _attempt(function: Callable[[], T]) -> T | None:
    """Return ``function()``, or None if the operating system refuses the request; gloo is then used instead."""
    try:
        return function()
    except (OSError, RuntimeError, ValueError):
        return None


@contextlib.contextmanager
def _reserved_file(num_bytes: int, token: bytes) -> Any:
    """Create a file of the given size with reserved memory, yield its path, and remove it after the block."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    descriptor, path = tempfile.mkstemp(prefix=temporary_prefix("memory"), dir=folder)
    try:
        try:
            # Writing to a sparse file on a full disk would kill the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, num_bytes)
            os.write(descriptor, token)
        finally:
            os.close(descriptor)
        yield path
    finally:
        os.unlink(path)


def _map(path: str, num_bytes: int, token: bytes) -> Tensor:
    if os.stat(path).st_size != num_bytes:
        raise ValueError(f"{path} has another size than {num_bytes}")
    # PyTorch closes the descriptor once the memory is mapped.
    memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    if bytes(memory[: len(token)].tolist()) != token:
        raise ValueError(f"{path} is not the file that the first rank made")
    return memory
