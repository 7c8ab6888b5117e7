"""The bias of attention that depends on the distance between two positions: causal masks, windows, and ALiBi."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.models.config import ModelConfig
from shardwise.models.transformer.heads import split_heads


class Rule(NamedTuple):
    """The distances at which a layer forbids attention.

    Attributes:
        causal: whether positions after a token are forbidden.
        before, after: numbers of positions that a token sees before and after itself, -1 for no bound.
        dtype, device: of the bias.
    """

    causal: bool
    before: int
    after: int
    dtype: torch.dtype
    device: torch.device


class _Strip(NamedTuple):
    """Biases ``[1, heads/t or 1, rows, columns]`` of the distances ``row - column + first``."""

    first: int
    bias: Tensor

    def of(self, rows: int, keys: int, first: int) -> Tensor | None:
        """Return the part whose first distance is ``first``; None if the strip is too small."""
        start = self.first - first
        if start < 0 or start + keys > self.bias.size(-1) or rows > self.bias.size(-2):
            return None
        return self.bias[..., :rows, start : start + keys]


class DistanceBias:
    """Makes biases. A block of queries gets a part of a strip, which all layers and blocks share.

    Args:
        slopes: ``[heads/t]``, ALiBi's slopes, or None.
        key_positions: ``[b, keys]``, positions for ALiBi's distances; each key's index if None.
    """

    def __init__(self, slopes: Tensor | None, key_positions: Tensor | None) -> None:
        self._slopes, self._key_positions = slopes, key_positions
        self._strips: dict[Rule, _Strip] = {}

    def of(self, rule: Rule, queries: slice, keys: slice, samples: slice) -> Tensor:
        """Return the bias of positions, ``[b or 1, heads/t or 1, s, keys]`` or a scalar, -inf where it is forbidden."""
        if rule.before < 0 and rule.after < 0 and not rule.causal and self._slopes is None:
            return torch.zeros((), dtype=rule.dtype, device=rule.device)
        if self._slopes is not None and self._key_positions is not None:
            of_queries, of_keys = (torch.arange(each.start, each.stop, device=rule.device) for each in (queries, keys))
            places = self._key_positions[samples, None, None, :]
            between = places[..., queries].transpose(-1, -2) - places[..., keys]
            return self._of_distances(rule, of_queries[:, None] - of_keys, between)
        rows, width, first = queries.stop - queries.start, keys.stop - keys.start, queries.start - keys.start
        strip = self._strips.get(rule)
        found = None if strip is None else strip.of(rows, width, first)
        if found is None:
            strip = self._strip(rule, rows, width, first, strip)
            if not torch.compiler.is_compiling():
                self._strips[rule] = strip
            found = strip.of(rows, width, first)
        assert found is not None
        return found

    def _strip(self, rule: Rule, rows: int, width: int, first: int, before: _Strip | None) -> _Strip:
        after = width - first
        if before is not None:
            # The next blocks are further from their first keys.
            first, after = 2 * max(first, before.first), max(after, before.bias.size(-1) - before.first)
            rows = max(rows, before.bias.size(-2))
        columns = torch.arange(-first, after, device=rule.device)
        distances = torch.arange(rows, device=rule.device)[:, None] - columns
        return _Strip(first, self._of_distances(rule, distances, distances))

    def _of_distances(self, rule: Rule, distances: Tensor, between: Tensor) -> Tensor:
        """Return the bias of distances in a row and, for ALiBi, of distances ``between`` positions."""
        # In the query's dtype. From bools, each layer would create such a tensor, and save it.
        bias = torch.zeros((1, 1, 1, 1), dtype=rule.dtype, device=rule.device)
        if self._slopes is not None:
            wide = torch.promote_types(rule.dtype, torch.float32)
            slopes = self._slopes.to(rule.device, wide)[:, None, None]
            bias = (slopes * -between.abs().to(wide)).to(rule.dtype).view(-1, len(self._slopes), *distances.shape)
        forbidden = torch.zeros_like(distances, dtype=torch.bool)
        if rule.causal:
            forbidden = distances < 0
        if rule.before >= 0:
            forbidden = forbidden | (distances > rule.before)
        if rule.after >= 0:
            forbidden = forbidden | (distances < -rule.after)
        return bias.masked_fill(forbidden, -torch.inf)


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the decrease of each head's scores per position, ``[num_heads]`` in fp64, on the CPU.

    For a power of two, ``2 ** (-8 i / num_heads)`` for ``i`` from 1. For another number, the slopes of the next smaller
    power of two, then every other slope of the next greater one, as in the authors' code and BLOOM.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]

    Source: Press et al. 2021 (arXiv:2108.12409).
    """
    smaller = 1 << (num_heads.bit_length() - 1)
    exponents = [-8 * i / smaller for i in range(1, smaller + 1)]
    exponents += [-8 * i / (2 * smaller) for i in range(1, 2 * (num_heads - smaller), 2)]
    return torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float64, device="cpu")


def local_alibi_slopes(config: ModelConfig, tp_group: ProcessGroup) -> Tensor:
    """Return the slopes of this rank's query heads, for ``AttentionMask``: ``[heads/t]`` in fp64, on the CPU."""
    num_heads, num_groups, _ = config.heads
    start, stop = split_heads(num_heads, num_groups, tp_group.size()).queries[tp_group.rank()]
    return alibi_slopes(num_heads)[start:stop]
