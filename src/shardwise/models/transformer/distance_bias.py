"""The bias of attention that depends on the distance between two positions: causal masks, windows, and ALiBi."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.models.config import ModelConfig
from shardwise.models.transformer.heads import split_heads
from shardwise.models.transformer.visibility import Rectangle, Visibility, hidden


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
    """Makes biases. A block of queries gets a part of a strip, which all layers and blocks share."""

    def __init__(self) -> None:
        self._strips: dict[object, _Strip] = {}

    def of(self, sight: Visibility, pairs: Rectangle, dtype: torch.dtype) -> Tensor:
        """Return the bias, ``[b or 1, heads/t or 1, s, keys]`` or a scalar, -inf where a distance is forbidden."""
        if sight.rule.bounds == (-1, -1) and sight.alibi_slopes is None:
            return torch.zeros((), dtype=dtype, device=pairs.device)
        if sight.alibi_slopes is not None and sight.key_positions is not None:
            return _bias(sight, pairs, dtype)
        (rows, width), first, key = (
            pairs.sizes,
            pairs.queries.start - pairs.keys.start,
            (sight.rule, dtype, pairs.device),
        )
        strip = self._strips.get(key)
        found = None if strip is None else strip.of(rows, width, first)
        if found is None:
            after = width - first
            if strip is not None:
                # The next blocks are further from their first keys.
                first, after = 2 * max(first, strip.first), max(after, strip.bias.size(-1) - strip.first)
                rows = max(rows, strip.bias.size(-2))
            whole = Rectangle(slice(None), slice(0, rows), slice(-first, after), pairs.device)
            strip = _Strip(first, _bias(sight, whole, dtype))
            if not torch.compiler.is_compiling():
                self._strips[key] = strip
            found = strip.of(*pairs.sizes, pairs.queries.start - pairs.keys.start)
        assert found is not None
        return found


def _bias(sight: Visibility, pairs: Rectangle, dtype: torch.dtype) -> Tensor:
    # In the query's dtype. From bools, each layer would create such a tensor, and save it.
    lowered = sight.lowered(pairs)
    bias = torch.zeros((1, 1, 1, 1), dtype=dtype, device=pairs.device) if lowered is None else lowered.to(dtype)
    return hidden(bias, sight.out_of_reach(pairs))


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
