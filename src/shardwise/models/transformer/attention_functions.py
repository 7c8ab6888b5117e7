"""Masks, ALiBi and soft caps as functions of positions, for ``kernels.flexible_attention``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from shardwise.core.sequence_view import ContextShard
from shardwise.kernels.flexible_attention import Changed, Functions, Sees, blocks_of
from shardwise.models.transformer.distance_bias import Rule

Place = Callable[[Tensor], Tensor]
"""The position of a query, from its index."""


def functions_of(
    query: Tensor,
    num_keys: int,
    rule: Rule,
    *,
    cap: float | None,
    forbidden: Tensor | None,
    document_ids: Tensor | None,
    slopes: Tensor | None,
    key_positions: Tensor | None,
    context: ContextShard | None,
) -> Functions:
    """Return the functions of a layer's attention.

    Args:
        query: ``[b, heads/t, s, d]``.
        num_keys: number of keys. Without context parallelism, queries are at the last ``s`` of their positions.
        rule: restrictions of the layer.
        cap: soft cap of the scores, or None.
        forbidden, document_ids, key_positions, context: as for ``AttentionMask``.
        slopes: its ``alibi_slopes``.
    """
    b, heads, s, _ = query.shape
    place, is_causal, before, after = _places(context, query, num_keys), *rule[:3]
    conditions: list[Sees] = []
    if is_causal:
        conditions.append(lambda sample, head, q, k: k <= place(q))
    if before >= 0:
        conditions.append(lambda sample, head, q, k: place(q) - k <= before)
    if after >= 0 and not is_causal:
        conditions.append(lambda sample, head, q, k: k - place(q) <= after)
    of_samples, of_heads = document_ids is not None, False
    if document_ids is not None:
        conditions.append(lambda sample, head, q, k: document_ids[sample, place(q)] == document_ids[sample, k])
    if forbidden is not None:
        forbidden = forbidden.view((1,) * (4 - forbidden.dim()) + forbidden.shape)
        # Rows are those of this rank's queries, or of all positions.
        conditions.append(_allows(forbidden, _same if context is None else place))
        of_samples, of_heads = of_samples or forbidden.size(0) > 1, forbidden.size(1) > 1
    sizes = (b if of_samples else 1, heads if of_heads else 1, s, num_keys)
    blocks = blocks_of(and_masks(*conditions), sizes, query.device)
    if slopes is not None:
        slopes = slopes.to(query.device, torch.promote_types(query.dtype, torch.float32))
        return Functions(blocks, _biased(slopes, key_positions, place, cap))
    return Functions(blocks, None if cap is None else _capped(cap))


def _same(index: Tensor) -> Tensor:
    return index


def _places(context: ContextShard | None, query: Tensor, num_keys: int) -> Place:
    if context is not None:
        positions = context.positions(query.device)
        return lambda q: positions[q]
    first = num_keys - query.size(2)
    return (lambda q: q + first) if first else _same


def _allows(forbidden: Tensor, row: Place) -> Sees:
    """``forbidden`` is ``[b or 1, heads or 1, rows or 1, keys or 1]``."""
    samples, heads, rows, columns = (int(size > 1) for size in forbidden.shape)
    return lambda sample, head, q, k: ~forbidden[sample * samples, head * heads, row(q) * rows, k * columns]


def _capped(cap: float) -> Changed:
    return lambda score, sample, head, q, k: torch.tanh(score / cap) * cap


def _biased(slopes: Tensor, positions: Tensor | None, place: Place, cap: float | None) -> Changed:
    capped = None if cap is None else _capped(cap)

    def changed(score: Tensor, sample: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if capped is not None:
            score = capped(score, sample, head, q, k)
        if positions is None:
            return score - slopes[head] * (place(q) - k).abs()
        return score - slopes[head] * (positions[sample, place(q)] - positions[sample, k]).abs()

    return changed
