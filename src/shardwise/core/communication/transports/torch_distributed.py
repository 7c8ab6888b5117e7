"""Collectives of PyTorch's backends: gloo, NCCL or any other backend of the group.

``collectives`` checks dimensions and sizes before it calls this file. This file handles the differences between
PyTorch's releases and between backends. Shards of different sizes are padded to the largest size for an all-gather,
because gloo does not support uneven sizes. With the balanced rule the padding is at most one row per rank.

The module itself is one transport. ``Traced`` is a second transport, which ``torch.compile`` can trace.
"""

import datetime
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import accounting
from shardwise.core.communication.agreement import Wait, check_same, ended_ranks, gather_objects
from shardwise.core.communication.context import GlobalMemoryBuffer, context_of, gather_buffer, is_gloo, time_limit
from shardwise.core.communication.transports.transport import Pending, check_exchange
from shardwise.core.errors import DesyncError, LaunchError, ShardwiseError

# PyTorch 2.13 renamed these two and warns about the old names.
_all_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# If all shards together have at least this many bytes, gloo gathers them by point-to-point messages.
_BYTES_TO_SEND_DIRECTLY = 1 << 20
# gloo puts the line of its source before a reason.
_SOURCE_LINE = re.compile(r"\[\S+:\d+\] ")


def named_error(error: RuntimeError, wait: Wait) -> ShardwiseError:
    """Return the error of a backend as one that names the call."""
    rank, size, call = dist.get_rank(), dist.get_world_size(), wait.describe()
    if ended := ended_ranks():
        return LaunchError(f"{ended} ended; rank {rank} was waiting for it in {call}")
    found = f"{wait.finding}; " if wait.finding else ""
    return DesyncError(
        f"{found}{call} failed on rank {rank} of {size} after {time.monotonic() - wait.since:.0f} s; "
        f"another rank ended, does not come, or made another call: {_SOURCE_LINE.sub('', str(error))}"
    )


class Work:
    """Wraps a backend's work so that its error names the call. ``peer`` is the group rank of a message's other side."""

    __slots__ = ("_device", "_dtype", "_group", "_name", "_peer", "_shape", "_work")

    def __init__(self, work: Any, name: str, tensor: Tensor, group: ProcessGroup, peer: int | None = None) -> None:
        self._work = work
        self._name = name
        self._shape = tensor.shape
        self._dtype = tensor.dtype
        self._device = tensor.device
        self._group = group
        self._peer = peer

    def wait(self) -> None:
        missing = None if self._peer is None else self._awaited
        with Wait(self._name, self._group, (self._shape, self._dtype), missing) as wait:
            try:
                # gloo's own timeout does not cover every kind of disagreement.
                limit = _limit_of_waiting(self._group, self._device)
                self._work.wait() if limit is None else self._work.wait(limit)
            except RuntimeError as error:
                raise named_error(error, wait) from error

    def _awaited(self) -> list[int]:
        return [dist.get_global_rank(self._group, cast(int, self._peer))]


def _limit_of_waiting(group: ProcessGroup, device: torch.device) -> datetime.timedelta | None:
    """Return the timeout of gloo's work; None if the stream waits instead of the host."""
    limits = context_of(group).time_limits
    if device.type not in limits:
        limits[device.type] = time_limit(group, device) if is_gloo(group, device) else None
    return limits[device.type]


def _is_even(sizes: Sequence[int]) -> bool:
    return min(sizes) == max(sizes)


def _validate(name: str, tensor: Tensor, group: ProcessGroup, *settings: object, but_dim: int | None = None) -> None:
    """Compare the call between the ranks if the group validates calls."""
    if not context_of(group).validates:
        return
    shape = [size if dim != but_dim else "any" for dim, size in enumerate(tensor.shape)]
    dtype = str(tensor.dtype).removeprefix("torch.")
    with accounting.uncounted():
        check_same(" ".join(map(str, (name, shape, dtype, *settings))), "the collective to be made", group=group)


def all_reduce(tensor: Tensor, group: ProcessGroup, op: Any, may_overwrite: bool) -> Pending:
    _validate("all_reduce", tensor, group, op)
    if may_overwrite and tensor.is_contiguous():
        result = tensor
    else:
        result = tensor.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(result, op=op, group=group, async_op=True)
    return Pending(Work(work, "all_reduce", tensor, group), lambda: result)


def all_gather(
    tensor: Tensor,
    group: ProcessGroup,
    dim: int,
    sizes: Sequence[int],
    buffer: GlobalMemoryBuffer | Tensor | None = None,
) -> Pending:
    _validate("all_gather", tensor, group, dim, list(sizes), but_dim=dim)
    out = gather_buffer(buffer, tensor, dim, sizes)
    if dim == 0 and tensor.is_cpu and is_gloo(group, tensor.device):
        total = sum(sizes) * math.prod(tensor.shape[1:]) * tensor.element_size()
        if total >= _BYTES_TO_SEND_DIRECTLY:
            return _send_to_all(tensor, group, sizes, out)
    t, even = len(sizes), _is_even(sizes)
    shard = tensor.contiguous() if even else _padded(tensor, dim, max(sizes))
    is_result = dim == 0 and even
    gathered = out if is_result and out is not None else shard.new_empty((t * shard.size(0), *shard.shape[1:]))
    # The padding is not counted.
    with accounting.as_one("all_gather", tensor, group):
        work = _all_gather_into(gathered, shard, group=group, async_op=True)
    return Pending(
        Work(work, "all_gather", tensor, group), lambda: _join_gathered(gathered, shard.shape, dim, sizes, out), shard
    )


def _send_to_all(tensor: Tensor, group: ProcessGroup, sizes: Sequence[int], out: Tensor | None) -> Pending:
    """All-gather along the first dimension by point-to-point messages, received directly into the result.

    gloo's own all-gather takes three times as long for large shards, and needs padding for shards of different sizes.
    """
    rank, shard = group.rank(), tensor.detach().contiguous()
    result = shard.new_empty((sum(sizes), *shard.shape[1:])) if out is None else out
    parts = result.split(list(sizes))
    others = [other for other in range(len(sizes)) if other != rank]
    with accounting.as_one("all_gather", tensor, group):
        works = [dist.irecv(parts[other], group=group, group_src=other) for other in others]
        works += [dist.isend(shard, group=group, group_dst=other) for other in others]
    context_of(group).num_messages += len(works)
    if parts[rank].data_ptr() != shard.data_ptr():
        parts[rank].copy_(shard)

    def finish() -> Tensor:
        for work in works:
            Work(work, "all_gather", tensor, group).wait()
        return result

    return Pending(None, finish, shard)


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = size - tensor.size(dim)
    return torch.cat([tensor, tensor.new_zeros(shape)], dim).contiguous()


def _join_gathered(
    gathered: Tensor, shard_shape: Sequence[int], dim: int, sizes: Sequence[int], out: Tensor | None = None
) -> Tensor:
    """Concatenate shards that the backend stacked along the first dimension along ``dim``, without the padding."""
    if dim == 0 and _is_even(sizes):
        return gathered
    stacked = gathered.view(len(sizes), *shard_shape).unbind(0)
    parts = [part.narrow(dim, 0, size) for part, size in zip(stacked, sizes, strict=True)]
    return torch.cat(parts, dim) if out is None else torch.cat(parts, dim, out=out)


def reduce_scatter(
    tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int], may_overwrite: bool = False
) -> Pending:
    _validate("reduce_scatter", tensor, group, dim, list(sizes))
    own = sizes[group.rank()]
    part = tensor.narrow(0, sum(sizes[: group.rank()]), own) if may_overwrite else None
    if is_gloo(group, tensor.device):
        return _exchange_and_sum(tensor, group, dim, sizes, part)
    if dim == 0 and _is_even(sizes):
        packed = tensor.contiguous()
        result = packed.new_empty((own, *packed.shape[1:])) if part is None else part
        work = _reduce_scatter_into(result, packed, group=group, async_op=True)
        return Pending(Work(work, "reduce_scatter", tensor, group), lambda: result, packed)
    shape = list(tensor.shape)
    shape[dim] = max(sizes)
    packed, result = tensor.new_zeros((len(sizes), *shape)), tensor.new_empty(shape)
    for slot, part in zip(packed.unbind(0), tensor.split(list(sizes), dim), strict=True):
        slot.narrow(dim, 0, part.size(dim)).copy_(part)
    with accounting.as_one("reduce_scatter", tensor, group):
        work = _reduce_scatter_into(result, packed.flatten(0, 1), group=group, async_op=True)

    def finish() -> Tensor:
        # Not a view, because ``moves`` returns it from an autograd function and callers may write to it in place.
        return result.narrow(dim, 0, own).contiguous().detach()

    return Pending(Work(work, "reduce_scatter", tensor, group), finish, packed)


def _exchange_and_sum(
    tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int], out: Tensor | None = None
) -> Pending:
    """Reduce-scatter as an all-to-all and a local sum, in rank order.

    gloo's own reduce-scatter costs as much as its all-reduce. This function takes half the time and needs no padding.
    """
    packed, received_sizes, sent_sizes = _packed_by_rank(tensor, group.rank(), dim, sizes)
    received = packed.new_empty(sum(received_sizes))
    with accounting.as_one("reduce_scatter", tensor, group):
        work = dist.all_to_all_single(received, packed, received_sizes, sent_sizes, group=group, async_op=True)
    shape = (len(sizes), *tensor.shape[:dim], sizes[group.rank()], *tensor.shape[dim + 1 :])

    def finish() -> Tensor:
        parts = received.view(shape)
        return parts.sum(0, dtype=tensor.dtype) if out is None else torch.sum(parts, 0, dtype=tensor.dtype, out=out)

    return Pending(Work(work, "reduce_scatter", tensor, group), finish, packed)


def _packed_by_rank(tensor: Tensor, rank: int, dim: int, sizes: Sequence[int]) -> tuple[Tensor, list[int], list[int]]:
    """Pack the parts for all ranks into one row; also return the element counts that ``rank`` receives and sends."""
    if dim == 0:
        packed = tensor.contiguous().view(-1)
    else:
        packed = torch.cat([part.reshape(-1) for part in tensor.split(list(sizes), dim)])
    others = math.prod(tensor.shape[:dim]) * math.prod(tensor.shape[dim + 1 :])
    return packed, [sizes[rank] * others] * len(sizes), [size * others for size in sizes]


def all_to_all(tensor: Tensor, group: ProcessGroup, output_sizes: Sequence[int], input_sizes: Sequence[int]) -> Pending:
    # The numbers of rows may differ between the ranks; they are compared below.
    _validate("all_to_all", tensor, group, but_dim=0)
    if context_of(group).validates:
        with accounting.uncounted():
            asked = gather_objects((input_sizes, output_sizes), "the sizes of an all_to_all", group=group)
        check_exchange([sent for sent, _ in asked], [expected for _, expected in asked])
    tensor = tensor.contiguous()
    result = tensor.new_empty((sum(output_sizes), *tensor.shape[1:]))
    work = dist.all_to_all_single(result, tensor, list(output_sizes), list(input_sizes), group=group, async_op=True)
    return Pending(Work(work, "all_to_all", tensor, group), lambda: result, tensor)


def shift(tensor: Tensor, group: ProcessGroup, step: int, counts: Sequence[int], out: Tensor | None) -> Pending:
    _validate("shift", tensor, group, step, list(counts), but_dim=0)
    sent, received = _shifted_sizes(group, step, counts)
    result = tensor.new_empty((sum(received), *tensor.shape[1:])) if out is None else out
    work = dist.all_to_all_single(result, tensor, received, sent, group=group, async_op=True)
    return Pending(Work(work, "shift", tensor, group), lambda: result, tensor)


def _shifted_sizes(group: ProcessGroup, step: int, counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the rows that this rank sends to and receives from each rank in a shift of ``counts`` by ``step``."""
    t, rank = group.size(), group.rank()
    sent, received = [0] * t, [0] * t
    sent[(rank + step) % t] = counts[rank]
    received[(rank - step) % t] = counts[(rank - step) % t]
    return sent, received


def broadcast_(tensor: Tensor, group: ProcessGroup, group_src: int) -> Tensor:
    """Overwrite ``tensor`` with the source rank's values. Only this transport broadcasts, because only set-up does."""
    _validate("broadcast", tensor, group, group_src)
    # A broadcast copies memory in the order of each rank's strides.
    packed = tensor.contiguous()
    work = dist.broadcast(packed, group=group, group_src=group_src, async_op=True)
    Work(work, "broadcast", tensor, group).wait()
    if packed is not tensor:
        tensor.copy_(packed)
    return tensor


_operators = torch.ops._c10d_functional

_NAMES = {
    getattr(dist.ReduceOp, name): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


class Traced:
    """Collectives that ``torch.compile`` can trace: functional collectives, whose wait comes before the first use.

    ``torch.compile`` does not support ``async_op=True``. A functional collective has one operator for the launch and
    one for the wait, so that compiled code overlaps in the same way as eager code. The compiler plans memory.
    """

    @staticmethod
    def all_reduce(tensor: Tensor, group: ProcessGroup, op: Any, may_overwrite: bool) -> Pending:
        return _traced(_operators.all_reduce(tensor.contiguous(), _NAMES[op], group.group_name))

    @staticmethod
    def all_gather(
        tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int], buffer: GlobalMemoryBuffer | Tensor | None
    ) -> Pending:
        shard = tensor.contiguous() if _is_even(sizes) else _padded(tensor, dim, max(sizes))
        launched = _operators.all_gather_into_tensor(shard, len(sizes), group.group_name)
        return _traced(launched, lambda gathered: _join_gathered(gathered, shard.shape, dim, sizes))

    @staticmethod
    def reduce_scatter(
        tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int], may_overwrite: bool
    ) -> Pending:
        if dim == 0 and _is_even(sizes) and tensor.device.type != "cpu":
            return _traced(_operators.reduce_scatter_tensor(tensor.contiguous(), "sum", len(sizes), group.group_name))
        packed, received_sizes, sent_sizes = _packed_by_rank(tensor, group.rank(), dim, sizes)
        launched = _operators.all_to_all_single(packed, received_sizes, sent_sizes, group.group_name)
        shape = (len(sizes), *tensor.shape[:dim], sizes[group.rank()], *tensor.shape[dim + 1 :])
        return _traced(launched, lambda received: received.view(shape).sum(0, dtype=tensor.dtype))

    @staticmethod
    def all_to_all(
        tensor: Tensor, group: ProcessGroup, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> Pending:
        sizes = list(output_sizes), list(input_sizes)
        return _traced(_operators.all_to_all_single(tensor.contiguous(), *sizes, group.group_name))

    @staticmethod
    def shift(tensor: Tensor, group: ProcessGroup, step: int, counts: Sequence[int], out: Tensor | None) -> Pending:
        sent, received = _shifted_sizes(group, step, counts)
        return _traced(_operators.all_to_all_single(tensor.contiguous(), received, sent, group.group_name))


def _traced(launched: Tensor, finish: Callable[[Tensor], Tensor] = lambda result: result) -> Pending:
    return Pending(None, lambda: finish(_operators.wait_tensor(launched)))
