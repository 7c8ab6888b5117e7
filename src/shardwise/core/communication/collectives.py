"""Out-of-place collectives: any device, any dtype, any dimension, shards of any size.

Every function takes its group as a required keyword, returns a new tensor and leaves its input unchanged. In a group of
one rank it returns the input itself. All communication of the hot path goes through this file, and
``transports.choose_transport`` selects the transport.

``exchange`` sends and receives several point-to-point messages at once, asynchronously. gloo matches messages by tag,
in any order. NCCL has no tags, so two ranks must exchange their messages in the same order, and messages that are sent
and received at the same time belong in one call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import Wait
from shardwise.core.communication.context import GlobalMemoryBuffer, context_of, sends_by_tag
from shardwise.core.communication.transports import choose_transport, torch_distributed
from shardwise.core.communication.transports.torch_distributed import Work, named_error
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.errors import ShardingError
from shardwise.core.sharding import checked_dim, checked_sizes


def all_reduce_async(
    tensor: Tensor, *, group: ProcessGroup, op: Any = dist.ReduceOp.SUM, may_overwrite: bool = False
) -> Pending:
    """Start ``all_reduce``; see there."""
    if group.size() == 1:
        return Pending(None, lambda: tensor)
    return choose_transport("all_reduce", tensor, group, op).all_reduce(tensor, group, op, may_overwrite)


def all_reduce(
    tensor: Tensor, *, group: ProcessGroup, op: Any = dist.ReduceOp.SUM, may_overwrite: bool = False
) -> Tensor:
    """Reduce ``tensor`` over the ranks of a group, by summation unless ``op`` is given; all ranks get the result.

    Args:
        tensor: any shape, the same on every rank.
        group: the ranks that take part.
        op: a ``torch.distributed.ReduceOp``.
        may_overwrite: allow the call to overwrite ``tensor``, which saves a copy.

    Returns:
        A tensor of the same shape.

    Raises:
        DesyncError: another rank makes a different call, or makes none within the group's timeout.
        LaunchError: another rank died.
    """
    return all_reduce_async(tensor, group=group, op=op, may_overwrite=may_overwrite).wait()


def reduce_numbers(
    sums: Sequence[tuple[Tensor, Sequence[ProcessGroup]]], largest: Tensor, *, groups: Sequence[ProcessGroup]
) -> tuple[list[Tensor], Tensor]:
    """Sum a few numbers over several groups, and take the maximum of others, with one all-reduce for each group.

    Args:
        sums: vectors of one dtype, each with the groups over which it is summed.
        largest: ``[n]`` finite numbers of the same dtype; the maximum over all groups is returned.
        groups: the groups, in order; the same order on every rank.

    Returns:
        The sums, in order, and the maxima, ``[n]``.
    """
    totals = [total for total, _ in sums]
    assert all(any(group is each for each in groups) for _, over in sums for group in over)
    for group in groups:
        if group.size() == 1:
            continue
        summed = [number for number, (_, over) in enumerate(sums) if any(group is each for each in over)]
        # Each rank has a row of zeros for each other rank, so that the sum of the rows has the numbers of all ranks.
        rows = largest.new_zeros(group.size(), largest.numel())
        rows[group.rank()] = largest
        parts = [totals[number] for number in summed] + [rows.flatten()]
        if not sum(part.numel() for part in parts):
            continue
        reduced = all_reduce(torch.cat(parts), group=group, may_overwrite=True).split([len(part) for part in parts])
        for number, total in zip(summed, reduced, strict=False):
            totals[number] = total
        largest = reduced[-1].view_as(rows).amax(dim=0)
    return totals, largest


def all_gather_async(
    tensor: Tensor,
    *,
    group: ProcessGroup,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    buffer: GlobalMemoryBuffer | Tensor | None = None,
) -> Pending:
    """Start ``all_gather``; see there."""
    t = group.size()
    if t == 1:
        return Pending(None, lambda: tensor)
    if not 0 <= dim < tensor.dim():
        dim = checked_dim(dim, tensor.shape)
    sizes = (tensor.size(dim),) * t if sizes is None else checked_shards(tensor, group, dim, sizes)
    return choose_transport("all_gather", tensor, group).all_gather(tensor, group, dim, sizes, buffer)


def checked_shards(tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int]) -> Sequence[int]:
    """Return ``sizes`` after checking that they are valid shard sizes for an ``all_gather``."""
    t = group.size()
    if len(sizes) != t or sizes[group.rank()] != tensor.size(dim):
        raise ShardingError(
            f"all_gather on rank {group.rank()} of {t}: sizes {list(sizes)} do not fit a shard of "
            f"{tensor.size(dim)} along dimension {dim}; pass one size per rank"
        )
    return sizes


def all_gather(
    tensor: Tensor,
    *,
    group: ProcessGroup,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    buffer: GlobalMemoryBuffer | Tensor | None = None,
) -> Tensor:
    """Concatenate the shards of all ranks along ``dim``, in rank order.

    Args:
        tensor: this rank's shard.
        group: the ranks that take part.
        dim: dimension of the concatenation.
        sizes: every rank's size along ``dim``. None means that all ranks have this rank's size.
        buffer: a reusable buffer, which holds the result until the next gather into it; or a contiguous tensor that
            becomes the result and may contain ``tensor`` as this rank's part. None allocates new memory. Traced code
            ignores the buffer, because the compiler plans memory.

    Returns:
        The whole tensor, the same on every rank.

    Raises:
        ShardingError: ``sizes`` does not have one entry per rank or contradicts this rank's size, or ``dim`` is out of
            range.
    """
    return all_gather_async(tensor, group=group, dim=dim, sizes=sizes, buffer=buffer).wait()


def reduce_scatter_async(
    tensor: Tensor,
    *,
    group: ProcessGroup,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    may_overwrite: bool = False,
) -> Pending:
    """Start ``reduce_scatter``; see there."""
    t = group.size()
    if t == 1:
        return Pending(None, lambda: tensor)
    dim = checked_dim(dim, tensor.shape)
    sizes = checked_sizes(sizes, tensor.size(dim), t, f"dimension {dim} of shape {list(tensor.shape)}")
    transport = choose_transport("reduce_scatter", tensor, group)
    return transport.reduce_scatter(tensor, group, dim, sizes, may_overwrite and dim == 0 and tensor.is_contiguous())


def reduce_scatter(
    tensor: Tensor,
    *,
    group: ProcessGroup,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    may_overwrite: bool = False,
) -> Tensor:
    """Sum ``tensor`` over the ranks and return this rank's shard of the sum along ``dim``.

    Args:
        tensor: a partial sum of the whole tensor, the same shape on every rank.
        group: the ranks that take part.
        dim: dimension that is split.
        sizes: every rank's size along ``dim``; balanced if None.
        may_overwrite: allow the result to overwrite this rank's part of ``tensor``, which saves memory and a copy. The
            other values of ``tensor`` are undefined afterwards.

    Returns:
        A tensor of this rank's size along ``dim``.

    Raises:
        ShardingError: ``sizes`` does not sum to the dimension, or there is no such dimension.
    """
    return reduce_scatter_async(tensor, group=group, dim=dim, sizes=sizes, may_overwrite=may_overwrite).wait()


def split_for_rank(tensor: Tensor, *, group: ProcessGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's shard of a tensor that every rank holds in full, without communication.

    Args:
        tensor: the whole tensor.
        group: the ranks that share it.
        dim: dimension that is split.
        sizes: every rank's size along ``dim``; balanced if None.

    Returns:
        A new contiguous tensor; on one rank the input itself.

    Raises:
        ShardingError: ``sizes`` does not sum to the dimension, or there is no such dimension.
    """
    t = group.size()
    if t == 1:
        return tensor
    dim = checked_dim(dim, tensor.shape)
    sizes = checked_sizes(sizes, tensor.size(dim), t, f"dimension {dim} of shape {list(tensor.shape)}")
    rank = group.rank()
    # A view would keep the whole tensor, and autograd forbids in-place operations on one.
    return tensor.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)


def all_to_all(
    tensor: Tensor,
    *,
    group: ProcessGroup,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Send a run of rows to every rank and receive one from each, in rank order.

    Args:
        tensor: ``[sum(input_sizes), ...]``.
        group: the ranks that take part.
        output_sizes: rows received from each rank; equal parts if None.
        input_sizes: rows sent to each rank; equal parts if None.

    Returns:
        ``[sum(output_sizes), ...]``.

    Raises:
        ShardingError: the rows do not divide, sizes are not one per rank, or do not sum to the rows.
        DesyncError: a rank does not send the rows that another expects; in shared memory, and under ``validate_calls``.
    """
    t = group.size()
    if t == 1:
        return tensor
    checked_dim(0, tensor.shape)
    rows = tensor.size(0)
    for name, sizes in (("output_sizes", output_sizes), ("input_sizes", input_sizes)):
        if sizes is None and rows % t != 0:
            raise ShardingError(f"all_to_all of {rows} rows over {t} ranks: they do not divide; pass {name}")
    equal = (rows // t,) * t
    sent = equal if input_sizes is None else checked_sizes(input_sizes, rows, t, "all_to_all's rows")
    received = equal if output_sizes is None else tuple(map(int, output_sizes))
    if len(received) != t or min(received) < 0 or received[group.rank()] != sent[group.rank()]:
        raise ShardingError(
            f"all_to_all on rank {group.rank()} of {t}: output_sizes {list(received)} must be {t} counts, and what the "
            f"rank keeps the same as in input_sizes {list(sent)}"
        )
    return choose_transport("all_to_all", tensor, group).all_to_all(tensor, group, received, sent).wait()


def broadcast_(tensor: Tensor, *, group: ProcessGroup, group_src: int = 0) -> Tensor:
    """Overwrite ``tensor`` with that of rank ``group_src`` (counted within the group), and return it."""
    if group.size() > 1:
        torch_distributed.broadcast_(tensor, group, group_src)
    return tensor


class Transfer(NamedTuple):
    """A point-to-point message: a tensor to send, or a buffer to receive into.

    Attributes:
        tensor: contiguous, with the same shape and dtype on both ranks. The sender must not modify it before the
            message has arrived.
        rank: the peer's rank in the group.
        tag: number of the message between the two ranks, the same on both.
    """

    tensor: Tensor
    rank: int
    tag: int = 0


def exchange(
    sends: Sequence[Transfer], receives: Sequence[Transfer], *, group: ProcessGroup
) -> tuple[list[Pending], list[Pending]]:
    """Start sending and receiving point-to-point messages.

    Args:
        sends: messages that this rank sends.
        receives: messages that this rank receives.
        group: the group of this rank and its peers.

    Returns:
        A handle for each of ``sends``, whose ``wait()`` returns once the tensor may be modified, and a handle for each
        of ``receives``, whose ``wait()`` returns the received tensor.

    Raises:
        DesyncError: the peer has exited, or, from ``wait()``, does not arrive within the group's timeout.
    """
    by_tag = all(sends_by_tag(group, transfer.tensor.device) for transfer in (*sends, *receives))
    if by_tag:
        context_of(group).num_messages += len(sends) + len(receives)
    calls = [(dist.isend, "send", each) for each in sends] + [(dist.irecv, "receive", each) for each in receives]
    operations = [
        dist.P2POp(call, each.tensor, group=group, group_peer=each.rank, tag=each.tag) for call, _, each in calls
    ]
    # If the backend matches messages by tag, each message is launched separately, in this order.
    with Wait("exchange", group) as wait:
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise named_error(error, wait) from error
    # The messages of one call may share one ``Work`` object.
    works = works if len(works) == len(calls) else works[:1] * len(calls)
    pending = [
        _pending(work, name if by_tag else "exchange", each, group)
        for work, (_, name, each) in zip(works, calls, strict=True)
    ]
    return pending[: len(sends)], pending[len(sends) :]


def _pending(work: Any, name: str, transfer: Transfer, group: ProcessGroup) -> Pending:
    return Pending(Work(work, name, transfer.tensor, group, transfer.rank), lambda: transfer.tensor)
