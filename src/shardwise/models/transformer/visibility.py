"""Who sees whom: the keys that a query may attend to, and by how much their distance lowers its scores.

The conditions are written once, for pairs of a query and a key. A bias asks for a rectangle of pairs (``Rectangle``),
``kernels.flexible_attention`` for single ones (``_Pair``).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.core.sequence_view import ContextShard
from shardwise.core.sharding import Interval
from shardwise.kernels.flexible_attention import Functions, blocks_of


class Rule(NamedTuple):
    """The distances at which a layer forbids attention.

    Attributes:
        causal: whether positions after a token are forbidden.
        window: numbers of positions that a token sees before and after itself, -1 for no bound; None without a window.
    """

    causal: bool
    window: tuple[int, int] | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        """The window, -1 for no bound, in which a causal layer sees no position after a token."""
        before, after = self.window or (-1, -1)
        return before, 0 if self.causal else after

    def keys_of(self, queries: Interval, keys: Interval) -> Interval:
        """Return the positions among ``keys`` that some of the queries see."""
        (start, stop), (first, last), (before, after) = queries, keys, self.bounds
        return first if before < 0 else max(first, start - before), last if after < 0 else min(last, stop + after)

    def within(self, queries: Interval, keys: Interval) -> Rule:
        """Return the rule of some positions, without a window that contains all of them."""
        (start, stop), (first, last), (before, after) = queries, keys, self.window or (-1, -1)
        before = before if before < stop - 1 - first else -1
        after = after if after < last - 1 - start and not self.causal else -1
        return Rule(self.causal, None if before == after == -1 else (before, after))


class Visibility(NamedTuple):
    """Restrictions of the attention of a layer in one forward pass.

    Attributes:
        rule: restrictions by distance.
        forbidden: bools, True where a token may not see another, ``[b or 1, heads or 1, rows or 1, keys or 1]``; or
            None. Rows are those of this rank's queries or, with context parallelism, of all positions.
        document_ids, alibi_slopes, key_positions: see ``masks.AttentionMask``.
    """

    rule: Rule
    forbidden: Tensor | None = None
    document_ids: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_positions: Tensor | None = None

    def out_of_reach(self, pairs: Rectangle | _Pair) -> list[Tensor]:
        """Return bools, True where a distance forbids attention."""
        before, after = self.rule.bounds
        if before == after == -1:
            return []
        distance = pairs.distance
        found = [] if before < 0 else [distance > before]
        return found if after < 0 else [*found, distance < -after]

    def apart(self, pairs: Rectangle | _Pair) -> list[Tensor]:
        """Return bools, True where documents or the mask forbid attention."""
        found, ids = [], self.document_ids
        if ids is not None:
            found.append(pairs.of_query(ids) != pairs.of_key(ids))
        return found if self.forbidden is None else [*found, pairs.of_both(self.forbidden)]

    def lowered(self, pairs: Rectangle | _Pair) -> Tensor | None:
        """Return what ALiBi adds to the scores; None without ALiBi."""
        if self.alibi_slopes is None:
            return None
        places = self.key_positions
        between = pairs.distance if places is None else pairs.of_query(places) - pairs.of_key(places)
        return pairs.of_head(self.alibi_slopes) * -between.abs()

    def functions(self, query: Tensor, num_keys: int, *, cap: float | None, context: ContextShard | None) -> Functions:
        """Return the mask and the changes of scores as functions of single pairs.

        Args:
            query: ``[b, heads/t, s, d]``.
            num_keys: number of keys. Without context parallelism, queries are at the last ``s`` of their positions.
            cap: soft cap of the scores, or None.
            context: see ``masks.AttentionMask``.
        """
        b, heads, s, _ = query.shape
        positions = None if context is None else context.positions(query.device)
        first = num_keys - s

        def pair(sample: Tensor, head: Tensor, q: Tensor, k: Tensor) -> _Pair:
            if positions is None:
                return _Pair(sample, head, q + first if first else q, k, row=q)
            return _Pair(sample, head, positions[q], k, row=positions[q])

        def sees(sample: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            one, nothing = pair(sample, head, q, k), sample.new_zeros((), dtype=torch.bool)
            return ~reduce(operator.or_, [*self.out_of_reach(one), *self.apart(one)], nothing)

        def changed(score: Tensor, sample: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if cap is not None:
                score = torch.tanh(score / cap) * cap
            lowered = self.lowered(pair(sample, head, q, k))
            return score if lowered is None else score + lowered

        forbidden = self.forbidden
        of_samples = self.document_ids is not None or (forbidden is not None and forbidden.size(0) > 1)
        of_heads = forbidden is not None and forbidden.size(1) > 1
        sizes = b if of_samples else 1, heads if of_heads else 1, s, num_keys
        is_changed = cap is not None or self.alibi_slopes is not None
        return Functions(blocks_of(sees, sizes, query.device), changed if is_changed else None)


class Rectangle:
    """Successive queries, each with the same successive keys.

    Args:
        samples: samples of the batch.
        queries, keys: positions.
        device: device of the distances.
        offset: position of a query less its row in a mask.
    """

    def __init__(self, samples: slice, queries: slice, keys: slice, device: torch.device, *, offset: int = 0) -> None:
        self._samples, self.queries, self.keys, self.device = samples, queries, keys, device
        self._rows = slice(queries.start - offset, queries.stop - offset)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of queries and of keys."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    @property
    def distance(self) -> Tensor:
        """``[s, keys]``."""
        queries, keys = (torch.arange(each.start, each.stop, device=self.device) for each in (self.queries, self.keys))
        return queries[:, None] - keys

    def of_query(self, table: Tensor) -> Tensor:
        """``[b, 1, s, 1]``."""
        return table[self._samples, None, self.queries, None]

    def of_key(self, table: Tensor) -> Tensor:
        """``[b, 1, 1, keys]``."""
        return table[self._samples, None, None, self.keys]

    def of_head(self, table: Tensor) -> Tensor:
        """``[1, heads, 1, 1]``."""
        return table[None, :, None, None]

    def of_both(self, table: Tensor) -> Tensor:
        """``[b or 1, heads or 1, s or 1, keys or 1]``."""
        whole, (b, _, rows, keys) = slice(None), table.shape
        samples = self._samples if b > 1 else whole
        return table[samples, :, self._rows if rows > 1 else whole, self.keys if keys > 1 else whole]


class _Pair:
    """One pair, from the indices of sample and head, the positions of query and key, and the query's row in a mask."""

    def __init__(self, sample: Tensor, head: Tensor, query: Tensor, key: Tensor, *, row: Tensor) -> None:
        self._sample, self._head, self._query, self._key, self._row = sample, head, query, key, row
        self.distance = query - key

    def of_query(self, table: Tensor) -> Tensor:
        return table[self._sample, self._query]

    def of_key(self, table: Tensor) -> Tensor:
        return table[self._sample, self._key]

    def of_head(self, table: Tensor) -> Tensor:
        return table[self._head]

    def of_both(self, table: Tensor) -> Tensor:
        # An index of a dimension of size 1 is 0.
        samples, heads, rows, keys = (int(size > 1) for size in table.shape)
        return table[self._sample * samples, self._head * heads, self._row * rows, self._key * keys]


def hidden(bias: Tensor, conditions: Sequence[Tensor]) -> Tensor:
    """Return the bias, -inf where a condition forbids attention."""
    return bias.masked_fill(reduce(operator.or_, conditions), -torch.inf) if conditions else bias
