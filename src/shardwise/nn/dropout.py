"""Dropout of a sharded or replicated tensor, with a mask that can be the same at every number of ranks.

The rule of the random streams (``shardwise.core.random``) determines a shard's mask. With "per_rank", as in Megatron,
each rank draws its mask from its own stream. With "global" the mask is this rank's slice of the whole tensor's mask.
Every rank then draws the whole mask, one bounded block at a time. This needs more random numbers, but makes a run
independent of its layout.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.random import DATA_PARALLEL_STREAM, TENSOR_PARALLEL_STREAM, streams
from shardwise.core.sequence_view import ContextShard
from shardwise.core.sharding import Interval, checked_dim

_BLOCK_ELEMENTS = 1 << 20


def sharded_dropout(
    input_: Tensor,
    p: float,
    *,
    dim: int | None,
    group: ProcessGroup | None,
    sizes: Sequence[int] | None = None,
    training: bool = True,
    layer_number: int | None = None,
    context: ContextShard | None = None,
    context_dim: int = 0,
    part: Interval | None = None,
) -> Tensor:
    """Zero each element with probability ``p`` and scale the others by ``1 / (1 - p)``; no communication.

    Args:
        input_: this rank's shard, or the whole tensor, the same on every rank, if ``dim`` is None; not modified.
        p: from 0 to 1.
        dim: the dimension that the ranks split.
        group: the ranks that share the tensor; may be None if ``dim`` is None.
        sizes: every rank's size along ``dim``. None means that all ranks have this rank's size.
        training: if False, return the input itself.
        layer_number: number of the layer, which has a separate stream under the "global" rule; None for the shared
            stream.
        context: with context parallelism, the positions that this rank holds along ``context_dim``; ``dim`` may be the
            same dimension, split further.
        context_dim: as given, not negative.
        part: the part of this rank's shard along ``dim`` that ``input_`` is; None for the whole shard.

    Returns:
        A tensor with the shape and dtype of ``input_``. A whole tensor gets the same mask on every rank.

    Raises:
        ConfigError: ``p`` is not a probability.
        ShardingError: there is no such dimension, or ``sizes`` does not fit ``input_``.
        TopologyError: the random streams were not seeded.
    """
    if not 0 <= p <= 1:
        raise ConfigError(f"dropout probability {p} is not from 0 to 1")
    if not training or p == 0:
        return input_
    if streams().rule == "per_rank":
        with streams().fork(DATA_PARALLEL_STREAM if dim is None else TENSOR_PARALLEL_STREAM):
            return F.dropout(input_, p)
    keep = global_keep_mask(
        input_.shape,
        p,
        dim=dim,
        group=group,
        sizes=sizes,
        device=input_.device,
        layer_number=layer_number,
        context=context,
        context_dim=context_dim,
        part=part,
    )
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return torch.where(keep, input_ * scale, 0.0)


def global_keep_mask(
    shape: Sequence[int],
    p: float,
    *,
    dim: int | None,
    group: ProcessGroup | None,
    sizes: Sequence[int] | None = None,
    device: torch.device | None = None,
    layer_number: int | None = None,
    context: ContextShard | None = None,
    context_dim: int = 0,
    part: Interval | None = None,
) -> Tensor:
    """Draw the whole tensor's mask from the stream that all ranks share, and return this rank's slice.

    Args:
        shape: shape of this rank's shard, or of a part of it.
        p: probability of dropping an element.
        device: device of the random numbers, which differ between types of devices.
        dim, group, sizes, layer_number, context, context_dim, part: as for ``sharded_dropout``.

    Returns:
        Bools of the given shape, True where the element is kept. Together the ranks' slices are the mask that one rank
        alone would have drawn, for each split dimension.

    Raises:
        ShardingError: there is no such dimension, or ``sizes`` does not fit ``shape``.
        TopologyError: the streams were not seeded with ``rng="global"``.
    """
    if context is not None and dim not in (None, context_dim):
        whole = [*shape[:context_dim], context.length, *shape[context_dim + 1 :]]
        options: dict[str, Any] = {"sizes": sizes, "device": device, "layer_number": layer_number}
        return context.own(global_keep_mask(whole, p, dim=dim, group=group, **options), dim=context_dim)
    is_split = dim is not None
    if not is_split and context is None:
        outer, total, runs, inner = 1, math.prod(shape), [(0, math.prod(shape))], 1
    else:
        dim = checked_dim(context_dim if dim is None else dim, shape)
        first, size, total = 0, shape[dim], shape[dim]
        if is_split:
            assert group is not None
            rank = group.rank()
            sizes = (size,) * group.size() if sizes is None else sizes
            start, stop = part or (0, size)
            if len(sizes) != group.size() or not (size == stop - start and stop <= sizes[rank]):
                raise ShardingError(
                    f"dropout on rank {rank} of {group.size()}: sizes {list(sizes)} do not fit a shard of {size} along "
                    f"dimension {dim}; pass one size per rank"
                )
            total, first = sum(sizes), sum(sizes[:rank]) + start
        runs = [(first, first + size)]
        if context is not None:
            runs, total = context.runs(first, first + size), context.length
        outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    # In memory the whole tensor is [outer, total * inner], and this rank's part is the same columns of each row.
    row = total * inner
    columns = [(start * inner, (stop - start) * inner) for start, stop in runs]
    parts = [torch.empty(outer, width, dtype=torch.bool, device=device) for _, width in columns]
    with streams().fork(streams().global_stream(layer_number)), torch.no_grad():
        for low in range(0, outer * row, _BLOCK_ELEMENTS):
            block = torch.empty(min(_BLOCK_ELEMENTS, outer * row - low), dtype=torch.bool, device=device)
            block.bernoulli_(1 - p)
            for kept, (start, width) in zip(parts, columns, strict=True):
                _copy_columns_(kept, block, low, row, start, width)
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).view(tuple(shape))


def _copy_columns_(keep: Tensor, block: Tensor, low: int, row: int, start: int, width: int) -> None:
    """Fill the part of ``keep`` that ``block`` covers: a run from ``low`` on of the flat matrix of ``row`` columns."""
    high = low + block.numel()
    first_whole, last_whole = -(-low // row), high // row
    if first_whole < last_whole:
        rows = block[first_whole * row - low : last_whole * row - low].view(-1, row)
        keep[first_whole:last_whole].copy_(rows[:, start : start + width])
    # At most one row begins before the block, and at most one ends after it.
    for index in {low // row, (high - 1) // row}:
        if first_whole <= index < last_whole:
            continue
        left, right = max(low, index * row + start), min(high, index * row + start + width)
        if left < right:
            offset = index * row + start
            keep[index, left - offset : right - offset].copy_(block[left - low : right - low])
