"""Out-of-place collectives: any device, any dtype, any dimension, shards of any size.

Every function takes its group as a required keyword, returns a new tensor and leaves its input as it was (on a group of
one rank there is nothing to do, and the input itself comes back). This file is the only one that calls
``torch.distributed`` in the hot path, so what differs between PyTorch releases or backends is settled here.

Shards of different sizes are gathered padded to the largest one, since gloo refuses an all-gather of uneven sizes; by
the balanced rule that is at most one row per rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.errors import ShardingError
from shardwise.sharding import balanced_sizes, checked_dim, checked_sizes

# PyTorch 2.13 renamed these two and warns about the old names.
_all_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective in flight; ``wait()`` returns its result.

    Whatever the collective reads is kept alive until then.
    """

    __slots__ = ("_finish", "_kept", "_work")

    def __init__(self, work: Any, finish: Callable[[], Tensor], *kept: Tensor) -> None:
        self._work = work
        self._finish = finish
        self._kept = kept

    def wait(self) -> Tensor:
        """Wait until the result is there and return it; call once."""
        if self._work is not None:
            self._work.wait()
        return self._finish()


def _sizes_along(size: int, t: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    if sizes is None:
        return balanced_sizes(size, t)
    return checked_sizes(sizes, size, t, f"a dimension of {size}")


def _is_even(sizes: Sequence[int]) -> bool:
    return min(sizes) == max(sizes)


def all_reduce_async(tensor: Tensor, *, group: ProcessGroup, may_overwrite: bool = False) -> Pending:
    """Start ``all_reduce``; see there. ``may_overwrite`` gives up ``tensor``'s memory for the result."""
    if group.size() == 1:
        return Pending(None, lambda: tensor)
    if may_overwrite and tensor.is_contiguous():
        result = tensor
    else:
        result = tensor.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(result, group=group, async_op=True)
    return Pending(work, lambda: result)


def all_reduce(
    tensor: Tensor, *, group: ProcessGroup, op: Any = dist.ReduceOp.SUM, may_overwrite: bool = False
) -> Tensor:
    """The sum (or ``op``) of ``tensor`` over the ranks, the same on each.

    Args:
        tensor: any shape, the same on every rank.
        group: the ranks that take part.
        op: a ``torch.distributed.ReduceOp``.
        may_overwrite: the caller owns ``tensor`` and gives up its values, which saves a copy.

    Returns:
        A tensor of the same shape.
    """
    if group.size() == 1:
        return tensor
    if may_overwrite and tensor.is_contiguous():
        result = tensor
    else:
        result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=op, group=group)
    return result


def all_gather_async(
    tensor: Tensor, *, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None
) -> Pending:
    """Start ``all_gather``; see there."""
    t = group.size()
    if t == 1:
        return Pending(None, lambda: tensor)
    dim = checked_dim(dim, tensor.shape)
    if sizes is None:
        sizes = (tensor.size(dim),) * t
    elif len(sizes) != t or sizes[group.rank()] != tensor.size(dim):
        raise ShardingError(
            f"all_gather on rank {group.rank()} of {t}: sizes {list(sizes)} do not fit a shard of "
            f"{tensor.size(dim)} along dimension {dim}; pass one size per rank"
        )
    even = _is_even(sizes)
    if even:
        shard = tensor.contiguous()
    else:
        shape = list(tensor.shape)
        shape[dim] = max(sizes)
        shard = tensor.new_zeros(shape)
        shard.narrow(dim, 0, tensor.size(dim)).copy_(tensor)
    gathered = shard.new_empty((t * shard.size(0), *shard.shape[1:]))
    work = _all_gather_into(gathered, shard, group=group, async_op=True)

    def finish() -> Tensor:
        if dim == 0 and even:
            return gathered
        parts = gathered.view(t, *shard.shape).unbind(0)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    return Pending(work, finish, shard)


def all_gather(tensor: Tensor, *, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """The shards of all ranks, concatenated along ``dim`` in rank order.

    Args:
        tensor: this rank's shard.
        group: the ranks that take part.
        dim: dimension of the concatenation.
        sizes: every rank's size along ``dim``; all the same as this rank's if None.

    Returns:
        The whole tensor, the same on every rank.

    Raises:
        ShardingError: ``sizes`` does not have one entry per rank, or not this rank's size; no such dimension.
    """
    return all_gather_async(tensor, group=group, dim=dim, sizes=sizes).wait()


def reduce_scatter_async(
    tensor: Tensor, *, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None
) -> Pending:
    """Start ``reduce_scatter``; see there."""
    t = group.size()
    if t == 1:
        return Pending(None, lambda: tensor)
    dim = checked_dim(dim, tensor.shape)
    sizes = _sizes_along(tensor.size(dim), t, sizes)
    own = sizes[group.rank()]
    if dist.get_backend(group) == "gloo":
        return _exchange_and_sum_async(tensor, group=group, dim=dim, sizes=sizes)
    if dim == 0 and _is_even(sizes):
        packed = tensor.contiguous()
        result = packed.new_empty((own, *packed.shape[1:]))
        work = _reduce_scatter_into(result, packed, group=group, async_op=True)
        return Pending(work, lambda: result, packed)
    shape = list(tensor.shape)
    shape[dim] = max(sizes)
    packed = tensor.new_zeros((t, *shape))
    for slot, part in zip(packed.unbind(0), tensor.split(list(sizes), dim), strict=True):
        slot.narrow(dim, 0, part.size(dim)).copy_(part)
    result = packed.new_empty(shape)
    work = _reduce_scatter_into(result, packed.flatten(0, 1), group=group, async_op=True)
    return Pending(work, lambda: result.narrow(dim, 0, own).contiguous(), packed)


def _exchange_and_sum_async(tensor: Tensor, *, group: ProcessGroup, dim: int, sizes: Sequence[int]) -> Pending:
    """Reduce-scatter as an all-to-all and a local sum, in rank order.

    gloo's own reduce-scatter costs as much as its all-reduce; this sends each element once, to the rank that wants it,
    takes half the time, and needs no padding.
    """
    own = sizes[group.rank()]
    if dim == 0:
        packed = tensor.contiguous().view(-1)
    else:
        packed = torch.cat([part.reshape(-1) for part in tensor.split(list(sizes), dim)])
    shape = [*tensor.shape[:dim], own, *tensor.shape[dim + 1 :]]
    others = math.prod(shape[:dim] + shape[dim + 1 :])
    received = packed.new_empty(len(sizes) * own * others)
    work = dist.all_to_all_single(
        received, packed, [own * others] * len(sizes), [size * others for size in sizes], group=group, async_op=True
    )
    return Pending(work, lambda: received.view(len(sizes), *shape).sum(0, dtype=tensor.dtype), packed)


def reduce_scatter(tensor: Tensor, *, group: ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's shard, along ``dim``, of the sum of ``tensor`` over the ranks.

    Args:
        tensor: a partial sum of the whole tensor, the same shape on every rank.
        group: the ranks that take part.
        dim: dimension that is split.
        sizes: every rank's size along ``dim``; balanced if None.

    Returns:
        A new tensor of this rank's size along ``dim``.

    Raises:
        ShardingError: ``sizes`` does not sum to the dimension, or there is no such dimension.
    """
    return reduce_scatter_async(tensor, group=group, dim=dim, sizes=sizes).wait()


def split_for_rank(tensor: Tensor, *, group: ProcessGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's shard of a tensor that every rank holds whole; no communication.

    Args:
        tensor: the whole tensor.
        group: the ranks that share it.
        dim: dimension that is split.
        sizes: every rank's size along ``dim``; balanced if None.

    Returns:
        A contiguous tensor (the input itself on one rank).

    Raises:
        ShardingError: ``sizes`` does not sum to the dimension, or there is no such dimension.
    """
    t = group.size()
    if t == 1:
        return tensor
    dim = checked_dim(dim, tensor.shape)
    sizes = _sizes_along(tensor.size(dim), t, sizes)
    rank = group.rank()
    return tensor.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous()


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
    """
    if group.size() == 1:
        return tensor
    tensor = tensor.contiguous()
    rows = tensor.size(0) if output_sizes is None else sum(output_sizes)
    result = tensor.new_empty((rows, *tensor.shape[1:]))
    dist.all_to_all_single(
        result,
        tensor,
        None if output_sizes is None else list(output_sizes),
        None if input_sizes is None else list(input_sizes),
        group=group,
    )
    return result


def broadcast_(tensor: Tensor, *, group: ProcessGroup, group_src: int = 0) -> Tensor:
    """Overwrite ``tensor`` with that of rank ``group_src`` (counted within the group), and return it."""
    if group.size() > 1:
        # What travels is memory, in whatever order each rank's strides put it.
        packed = tensor.contiguous()
        dist.broadcast(packed, group=group, group_src=group_src)
        if packed is not tensor:
            tensor.copy_(packed)
    return tensor
