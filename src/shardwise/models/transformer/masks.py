"""Attention masks, ALiBi's slopes, and sinks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import causal_lower_right

from shardwise.core.errors import ShardingError
from shardwise.core.initialization import CounterNormal
from shardwise.core.sequence_view import ContextShard
from shardwise.core.sharding import ParamLayout
from shardwise.kernels.planning import device_type_of, outside_of_plans
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.attention_blocks import Block, Part, Run, runs_of_documents
from shardwise.models.transformer.heads import HeadSplit, split_heads
from shardwise.models.transformer.mlp import layer_arguments
from shardwise.nn.module import ShardedModule


class AttnMaskType(Enum):
    """Positions that attention forbids in addition to a mask. Names are those of Megatron."""

    causal = "causal"
    """A token sees only itself and earlier tokens."""
    padding_causal = "padding_causal"
    """Same as ``causal``; the mask hides padding."""
    padding = "padding"
    """Forbids nothing; the mask hides padding (BERT)."""
    arbitrary = "arbitrary"
    """Forbids nothing; the mask is arbitrary."""
    no_mask = "no_mask"
    """Forbids nothing."""
    causal_bottom_right = "causal_bottom_right"
    """Same as ``causal``. Queries are at the last of the keys' positions, even if there are fewer queries than keys."""

    @property
    def is_causal(self) -> bool:
        """True if a token does not see later tokens."""
        return self in (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


# Queries of a block with a bias, which has as many rows.
_ROWS = 512


class _Rule(NamedTuple):
    """What a layer forbids by distance, -1 for no bound, and the kind of tensor that a bias is."""

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


class AttentionMask:
    """Restrictions and biases of the attention in one forward pass, in addition to those of each layer.

    It caches the bias tensor for all layers. Create a new object for each forward pass.

    Args:
        forbidden: bools, True where a token may not see another, broadcast to ``[b, heads/t, s, keys]``. The output for
            a token that sees nothing is 0.
        document_ids: ``[b, s]`` integers, for several texts packed into one row, without a cache: a token sees only
            tokens with the same number.
        alibi_slopes: ``[heads/t]``, decrease of this rank's scores per position of distance.
        key_positions: ``[b, keys]`` integers, positions for ALiBi's distances; each key's index if None.
        query_position: int64 ``[1]``, position of a single query whose keys are a whole cache; later positions are
            forbidden. ALiBi is the only other restriction that it supports.
        context: with context parallelism, the positions that this rank's queries have; masks and ids are of whole
            sequences.

    Raises:
        ShardingError: ``forbidden`` is not bools.
    """

    def __init__(
        self,
        forbidden: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_positions: Tensor | None = None,
        query_position: Tensor | None = None,
        context: ContextShard | None = None,
    ) -> None:
        if forbidden is not None and forbidden.dtype != torch.bool:
            raise ShardingError(
                f"the attention mask is of {forbidden.dtype}; it must be of bools, True where attention is forbidden"
            )
        self.forbidden = forbidden
        self.document_ids = document_ids
        self.alibi_slopes = alibi_slopes
        self.key_positions = key_positions
        self.query_position = query_position
        self.context = context
        self._is_plain = forbidden is None and document_ids is None and alibi_slopes is None
        self._made: dict[object, Tensor] = {}
        self._strips: dict[_Rule, _Strip] = {}
        self._ends: list[list[int]] | None = None
        self._of_heads: AttentionMask | None = None

    def of_heads(self, start: int, stop: int) -> AttentionMask:
        """Return the mask of an interval of this rank's heads at all positions, the same object for all layers."""
        if self._of_heads is None:
            forbidden, slopes = self.forbidden, self.alibi_slopes
            if forbidden is not None and forbidden.dim() > 2 and forbidden.size(-3) > 1:
                forbidden = forbidden[..., start:stop, :, :]
            self._of_heads = AttentionMask(
                forbidden,
                document_ids=self.document_ids,
                alibi_slopes=None if slopes is None else slopes[start:stop],
                key_positions=self.key_positions,
            )
        return self._of_heads

    def blocks(
        self,
        query: Tensor,
        num_keys: int,
        *,
        causal: bool,
        window: tuple[int, int] | None,
        rows: int | None = None,
        has_parts: bool = False,
        for_kernels: bool = False,
    ) -> list[Block]:
        """Cut queries into blocks, each with the keys that it needs.

        Args:
            query: ``[b, heads/t, s, d]``.
            num_keys: number of keys. Without context parallelism, queries are at the last ``s`` of their positions.
            causal: whether keys after a token are forbidden.
            window: number of positions that a token sees before and after itself, -1 for no bound.
            rows: maximum number of queries of a block; with ``has_parts``, of one with a bias.
            has_parts: whether a block may have several parts, and whether the block of a document needs no bias.
            for_kernels: whether only PyTorch's kernels read a bias; on CUDA it may then be a ``CausalBias``.

        Returns:
            Blocks in the order of the queries. A bias has the query's dtype, is -inf where attention is forbidden, and
            broadcasts to the scores of its block.

        Raises:
            ShardingError: the mask or ``document_ids`` have the wrong shape, or ``document_ids`` come with a cache.
        """
        rows = rows or _ROWS
        self._check(query, num_keys)
        new, first_row, blocks = query.size(2), 0, []
        ends = self._ends_of_documents() if has_parts and num_keys > rows else None
        on_cuda = for_kernels and device_type_of(query) == "cuda"
        rule = _Rule(causal, *(window or (-1, -1)), query.dtype, query.device)
        for start, stop in ((num_keys - new, num_keys),) if self.context is None else self.context.intervals:
            whole = Run(slice(None), (start, stop), (0, num_keys), self.document_ids is not None)
            for run in [whole] if ends is None else runs_of_documents(ends, (start, stop), rows):
                blocks += self._blocks_of(run, rule, start - first_row, rows, has_parts, on_cuda)
            first_row += stop - start
        return blocks

    def _blocks_of(self, run: Run, rule: _Rule, offset: int, rows: int, has_parts: bool, on_cuda: bool) -> list[Block]:
        """``offset`` is the position of a query less its index."""
        samples, (start, stop), (first_key, last_key), is_mixed = run
        # A window that contains all positions restricts nothing.
        before = rule.before if rule.before < stop - 1 - first_key else -1
        after = rule.after if rule.after < last_key - 1 - start and not rule.causal else -1
        rule = rule._replace(before=before, after=after)
        queries, by_distance = slice(start - offset, stop - offset), before >= 0 or after >= 0
        is_plain = not (is_mixed or by_distance or self.forbidden is not None or self.alibi_slopes is not None)
        if is_plain and (has_parts or stop - start <= rows):
            if not rule.causal or stop - start == 1:
                return [Block(samples, queries, (Part(slice(first_key, stop if rule.causal else last_key)),))]
            own = Part(slice(start, stop), is_causal=True)
            if start == first_key:
                return [Block(samples, queries, (own,))]
            if has_parts:
                return [Block(samples, queries, (Part(slice(first_key, start)), own))]
            if on_cuda:
                # Flash attention aligns the last query with the last key.
                with outside_of_plans():
                    lower_right = causal_lower_right(stop - start, stop - first_key)
                bias = functools.partial(_itself, lower_right)
                return [Block(samples, queries, (Part(slice(first_key, stop), bias=bias),))]
        blocks = []
        for low in range(start, stop, rows):
            high = min(low + rows, stop)
            last = high if rule.causal else last_key if after < 0 else min(last_key, high + after)
            keys = slice(first_key if before < 0 else max(first_key, low - before), last)
            bias = functools.partial(self._bias, rule, slice(low, high), keys, offset, samples, is_mixed)
            if stop - start <= rows:
                bias = functools.partial(_itself, self._kept(bias))
            blocks.append(Block(samples, slice(low - offset, high - offset), (Part(keys, bias=bias),)))
        return blocks

    def _ends_of_documents(self) -> Sequence[Sequence[int]] | None:
        """Return, for each sample, the end of each document; None if reading them needs a wait, or one is in pieces."""
        ids = self.document_ids
        if ids is None or type(ids) is not Tensor or ids.device.type != "cpu":
            return None
        if self._ends is None:
            is_last = torch.cat([ids[:, 1:] != ids[:, :-1], torch.ones_like(ids[:, :1], dtype=torch.bool)], dim=1)
            ends = [(of_sample.nonzero().flatten() + 1).tolist() for of_sample in is_last]
            in_pieces = any(len(each) != len(sample.unique()) for each, sample in zip(ends, ids, strict=True))
            self._ends = [] if in_pieces else ends
        return self._ends or None

    def _kept(self, bias: functools.partial[Tensor]) -> Tensor:
        """Make a bias once for all layers."""
        key = tuple((each.start, each.stop) if isinstance(each, slice) else each for each in bias.args)
        if key not in self._made:
            self._made[key] = bias()
        return self._made[key]

    def _bias(self, rule: _Rule, queries: slice, keys: slice, offset: int, samples: slice, by_document: bool) -> Tensor:
        """Make the bias of positions ``queries`` on ``keys``; ``offset`` is the position of a query less its index."""
        bias = self._by_distance(rule, queries, keys, samples)
        forbidden = []
        if self.document_ids is not None and by_document:
            ids = self.document_ids[samples]
            forbidden.append((ids[:, queries, None] != ids[:, None, keys]).unsqueeze(1))
        if self.forbidden is not None:
            own, sizes = self.forbidden, self.forbidden.shape
            own = own if sizes[-1] == 1 else own[..., keys]
            if len(sizes) > 1 and sizes[-2] > 1:
                # Rows are those of this rank's queries, or of all positions.
                moved = 0 if self.context is not None else offset
                own = own[..., queries.start - moved : queries.stop - moved, :]
            forbidden.append(own[samples] if len(sizes) == 4 and sizes[0] > 1 else own)
        return bias.masked_fill(functools.reduce(torch.logical_or, forbidden), -torch.inf) if forbidden else bias

    def _by_distance(self, rule: _Rule, queries: slice, keys: slice, samples: slice) -> Tensor:
        """Return what depends on distances alone, ``[1, heads/t or 1, s, keys]`` or a scalar."""
        if rule.before < 0 and rule.after < 0 and not rule.causal and self.alibi_slopes is None:
            return torch.zeros((), dtype=rule.dtype, device=rule.device)
        of_queries = torch.arange(queries.start, queries.stop, device=rule.device)[:, None]
        of_keys = torch.arange(keys.start, keys.stop, device=rule.device)
        if self.alibi_slopes is not None and self.key_positions is not None:
            places = self.key_positions[samples, None, None, :]
            between = places[..., queries].transpose(-1, -2) - places[..., keys]
            return self._of_distances(rule, of_queries - of_keys, between)
        rows, first = len(of_queries), queries.start - keys.start
        strip = self._strips.get(rule)
        found = None if strip is None else strip.of(rows, len(of_keys), first)
        if found is None:
            after = len(of_keys) - first
            if strip is not None:
                # The next blocks are further from their first keys.
                first, after = 2 * max(first, strip.first), max(after, strip.bias.size(-1) - strip.first)
                rows = max(rows, strip.bias.size(-2))
            distances = torch.arange(rows, device=rule.device)[:, None] - torch.arange(
                -first, after, device=rule.device
            )
            strip = _Strip(first, self._of_distances(rule, distances, distances))
            if not torch.compiler.is_compiling():
                self._strips[rule] = strip
            found = strip.of(len(of_queries), len(of_keys), queries.start - keys.start)
        assert found is not None
        return found

    def _of_distances(self, rule: _Rule, distances: Tensor, between: Tensor) -> Tensor:
        """Return the bias of distances in a row and, for ALiBi, of distances ``between`` positions."""
        # In the query's dtype. From bools, each layer would create such a tensor, and save it.
        bias = torch.zeros((1, 1, 1, 1), dtype=rule.dtype, device=rule.device)
        if self.alibi_slopes is not None:
            wide = torch.promote_types(rule.dtype, torch.float32)
            slopes = self.alibi_slopes.to(rule.device, wide)[:, None, None]
            bias = (slopes * -between.abs().to(wide)).to(rule.dtype).view(-1, len(self.alibi_slopes), *distances.shape)
        forbidden = torch.zeros_like(distances, dtype=torch.bool)
        if rule.causal:
            forbidden = distances < 0
        if rule.before >= 0:
            forbidden = forbidden | (distances > rule.before)
        if rule.after >= 0:
            forbidden = forbidden | (distances < -rule.after)
        return bias.masked_fill(forbidden, -torch.inf)

    def _check(self, query: Tensor, num_keys: int) -> None:
        b, heads, new, _ = query.shape
        length = num_keys if self.context is None else self.context.length
        if self.forbidden is not None:
            wanted = (b, heads, new if self.context is None else length, length)
            sizes = self.forbidden.shape
            missing = len(wanted) - len(sizes)
            if missing < 0 or any(size not in (1, want) for size, want in zip(sizes, wanted[missing:], strict=True)):
                raise ShardingError(
                    f"attention_mask has shape {list(sizes)}; it must broadcast to [batch, query heads of this rank, "
                    f"queries, keys], here {list(wanted)}"
                )
        ids = self.document_ids
        if ids is not None and (ids.shape != (b, length) or (self.context is None and new != length)):
            raise ShardingError(
                f"document_ids have shape {list(ids.shape)}; attention is of {b} sequences, with {new} queries on "
                f"{length} keys, and needs a number for each of as many keys as queries"
            )


def _itself(bias: Tensor) -> Tensor:
    return bias


def document_lengths(document_ids: Tensor) -> Tensor:
    """Return the number of tokens in each token's document, ``[b, s]``, from the documents' numbers ``[b, s]``.

    >>> document_lengths(torch.tensor([[0, 0, 1, 1, 1, -1]]))
    tensor([[2, 2, 3, 3, 3, 1]])
    """
    # By sorting, because a count of each number would need a synchronization for the size of the result.
    ids = document_ids.contiguous()
    ordered = ids.sort(dim=1).values
    return torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)


def document_ids_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the document of each token of one packed row, ``[1, length]``, for ``AttentionMask``.

    >>> document_ids_of(torch.tensor([0, 2, 5]), 6)
    tensor([[0, 0, 1, 1, 1, 2]])

    Args:
        cu_seqlens: ``[documents + 1]``, start of each document, and end of the last one. The rest of the row is
            padding, with a separate number.
        length: length of the row.
    """
    positions = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True).unsqueeze(0)


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


class AttentionSinks(ShardedModule):
    """A learned logit of each query head that takes a share of the attention weights, and has no value.

    Args:
        config: config of the model.
        split: the heads of each rank.
        group: tensor-parallel group.

    Attributes:
        logits: ``[heads/t]``, normally distributed at first.

    Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925).
    """

    logits: Tensor

    def __init__(self, config: ModelConfig, split: HeadSplit, group: ProcessGroup) -> None:
        super().__init__(**layer_arguments(config, group=group, linear=False))
        layout = ParamLayout.of_intervals((config.num_attention_heads,), 0, [[own] for own in split.queries])
        # Other methods of a config may need matrices.
        self._make_parameter("logits", layout, CounterNormal(config.init_method_std))

    def forward(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights of the keys in ``dtype``, from scores ``[b, heads/t, s, keys]``."""
        sinks = self.logits.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(dim=-1, dtype=dtype)[..., :-1]
