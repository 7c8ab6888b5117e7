"""Attention of a sequence that context-parallel ranks share, as keys and values arrive one rank after the other.

In step ``i`` a rank has the keys and values of the rank ``i`` places before it, while those of the next step travel.
The gradients of the keys and values go back to their rank as soon as they are computed. A rank never holds more than
the keys and values of two others.

Source: Liu et al. 2023 (arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.core.communication import accounting
from shardwise.core.communication.transports import choose_transport
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.sequence_view import ContextShard
from shardwise.core.sharding import Interval
from shardwise.core.typed import computed_locally
from shardwise.kernels.partial_attention import attend_to_part, differentiate_part, merge
from shardwise.models.transformer.attention_blocks import Block, Part, gradient_of_sinks, with_sinks


def _shift(tensor: Tensor, shard: ContextShard, step: int, counts: Sequence[int]) -> Pending:
    with accounting.uncounted():
        return choose_transport("shift", tensor, shard.group).shift(tensor, shard.group, step, counts, None)


def _arriving(own: Tensor, shard: ContextShard) -> Iterable[tuple[int, Tensor]]:
    """Yield each rank and its keys and values, this rank first; the next ones travel until they are asked for."""
    ranks, rank = shard.group.size(), shard.group.rank()
    accounting.record("all_gather", own, shard.group)
    part = own
    for step in range(ranks):
        following = _shift(own, shard, step + 1, shard.sizes) if step + 1 < ranks else None
        yield (rank - step) % ranks, part
        if following is not None:
            part = following.wait()


def _seen(block: Block, runs: Sequence[Interval]) -> Iterable[tuple[Part, slice]]:
    """Yield the parts of a block among runs of positions, and the indices of their keys among those of the runs."""
    before = 0
    for start, stop in runs:
        for part in block.parts:
            own = part.within(start, stop)
            if own is not None:
                yield own, slice(own.keys.start - start + before, own.keys.stop - start + before)
        before += stop - start


def _keys_and_values(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.permute(1, 2, 0, 3).chunk(2, dim=-1)


class _Ring(Function):
    spmd_typecheck = computed_locally("query", "own", "sinks")

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        own: Tensor,
        sinks: Tensor | None,
        blocks: Sequence[Block],
        shard: ContextShard,
        scale: float,
    ) -> Tensor:
        found: list[tuple[Tensor, Tensor] | None] = [None] * len(blocks)
        for rank, packed in _arriving(own, shard):
            key, value = _keys_and_values(packed)
            for number, block in enumerate(blocks):
                rows = query[block.samples, :, block.queries]
                parts = [
                    attend_to_part(rows, key[block.samples, :, keys], value[block.samples, :, keys],
                                   bias=part.made_bias(), is_causal=part.is_causal, scale=scale)
                    for part, keys in _seen(block, shard.intervals_of_ranks[rank])
                ]  # fmt: skip
                earlier = found[number]
                if parts:
                    found[number] = merge(parts if earlier is None else [earlier, *parts])
        b, heads, s, width = query.shape
        output = query.new_empty(b, s, heads, width).transpose(1, 2)
        sums = query.new_empty(b, heads, s, dtype=torch.promote_types(query.dtype, torch.float32))
        for block, result in zip(blocks, found, strict=True):
            assert result is not None
            at = block.samples, slice(None), block.queries
            output[at], sums[at] = result if sinks is None else with_sinks(*result, sinks)
        ctx.save_for_backward(query, own, output, sums, sinks)
        ctx.blocks, ctx.shard, ctx.scale = blocks, shard, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, own, output, sums, sinks = ctx.saved_tensors
        (gradient,), shard = gradients, ctx.shard
        ranks, own_rank = shard.group.size(), shard.group.rank()
        grad_query = torch.zeros_like(query, dtype=sums.dtype)
        grad_own, travelling = torch.zeros_like(own, dtype=sums.dtype), None
        accounting.record("reduce_scatter", own.numel() // own.size(0) * shard.length * own.element_size(), shard.group)
        for rank, packed in _arriving(own, shard):
            key, value = _keys_and_values(packed)
            of_packed = grad_own if rank == own_rank else torch.zeros_like(packed, dtype=sums.dtype)
            of_key, of_value = _keys_and_values(of_packed)
            for block in ctx.blocks:
                at = block.samples, slice(None), block.queries
                for part, keys in _seen(block, shard.intervals_of_ranks[rank]):
                    of = block.samples, slice(None), keys
                    dq, dk, dv = differentiate_part(
                        gradient[at], query[at], key[of], value[of], output[at], sums[at],
                        bias=part.made_bias(), is_causal=part.is_causal, scale=ctx.scale,
                    )  # fmt: skip
                    grad_query[at] += dq
                    of_key[of] += dk
                    of_value[of] += dv
            if travelling is not None:
                grad_own += travelling.wait()
            if rank != own_rank:
                step = (rank - own_rank) % ranks
                counts = [shard.sizes[(sender + step) % ranks] for sender in range(ranks)]
                travelling = _shift(of_packed.to(own.dtype), shard, step, counts)
        if travelling is not None:
            grad_own += travelling.wait()
        of_sinks = None if sinks is None else gradient_of_sinks(gradient, output, sums, sinks)
        return grad_query.to(query.dtype), grad_own.to(own.dtype), of_sinks, None, None, None


def attend_in_ring(
    query: Tensor,
    own: Tensor,
    blocks: Sequence[Block],
    shard: ContextShard,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of this rank's queries to the keys of all ranks.

    Args:
        query: ``[b, heads, s/c, d]``.
        own: this rank's keys and values, ``[s/c, b, groups, 2 d]``, contiguous.
        blocks: blocks of the queries, whose keys are positions of the whole sequence.
        shard: the positions of each rank.
        scale: factor of the products.
        sinks: ``[heads]``, logits of keys without a value, or None.

    Returns:
        ``[b, heads, s/c, d]``.
    """
    output: Tensor = _Ring.apply(query, own, sinks, blocks, shard, scale)
    return output
