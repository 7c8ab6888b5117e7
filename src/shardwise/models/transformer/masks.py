"""Attention masks and sinks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ShardingError
from shardwise.core.initialization import CounterNormal
from shardwise.core.sequence_view import ContextShard
from shardwise.core.sharding import Interval, ParamLayout
from shardwise.kernels.fake_device import device_type_of, outside_of_plans, planned_device
from shardwise.kernels.flexible_attention import Functions
from shardwise.kernels.partial_attention import BLOCK_OF_KEYS
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.attention_blocks import Block, Packed, Part, Run, runs_of_documents
from shardwise.models.transformer.distance_bias import DistanceBias
from shardwise.models.transformer.heads import HeadSplit, LocalHeads
from shardwise.models.transformer.mlp import layer_arguments
from shardwise.models.transformer.visibility import Rectangle, Rule, Visibility, hidden
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


# Queries of a block with a bias, which has as many rows; and numbers of a bias that differs between heads.
_ROWS = 512
_NUMBERS = 1 << 24


class AttentionMask:
    """Restrictions and biases of the attention in one forward pass, in addition to those of each layer.

    It caches the bias tensor for all layers. Create a new object for each forward pass.

    Args:
        forbidden: bools, True where a token may not see another, broadcast to ``[b, heads/t, s, keys]``. The output for
            a token that sees nothing is 0.
        document_ids: ``[b, s]`` integers, for several texts packed into one row, without a cache: a token sees only
            tokens with the same number. On the CPU they may be read, so that attention has a kernel without a mask.
        alibi_slopes: ``[heads/t]``, decrease of this rank's scores per position of distance.
        key_positions: ``[b, keys]`` integers, positions for ALiBi's distances; each key's index if None.
        query_position: int64 ``[1]``, position of a single query whose keys are a whole cache; later positions are
            forbidden. ALiBi is the only other restriction that it supports.
        context: with context parallelism, the positions that this rank's queries have; masks and ids are of whole
            sequences.

    Attributes:
        heads: the heads that the mask is for (``of_heads``); None for all of this rank's.
        is_plain: True without masks, documents and ALiBi.

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
        self.heads: LocalHeads | None = None
        self.is_plain = forbidden is None and document_ids is None and alibi_slopes is None
        self._made: dict[object, Tensor] = {}
        self._by_distance = DistanceBias()
        self._sights: dict[object, Visibility] = {}
        self._ends: list[list[int]] | None = None
        self._moved_ids: Tensor | None = None
        self._packed: dict[bool, list[Packed]] = {}
        self._functions: dict[object, Functions] = {}
        self._of_heads: dict[LocalHeads, AttentionMask] = {}

    def of_heads(self, heads: LocalHeads, of: LocalHeads) -> AttentionMask:
        """Return the mask of whole sequences for some heads of a rank that has the heads ``of``.

        Raises:
            ShardingError: the mask has another number of heads.
        """
        if heads not in self._of_heads:
            forbidden, slopes, (first, last) = self.forbidden, self.alibi_slopes, heads.queries
            if forbidden is not None and forbidden.dim() > 2 and forbidden.size(-3) != 1:
                total = of.queries[1]
                if forbidden.size(-3) != total:
                    raise ShardingError(
                        f"attention_mask has shape {list(forbidden.shape)}; it must broadcast to [batch, query heads "
                        f"of this rank, queries, keys], and this rank has {total} query heads"
                    )
                forbidden = forbidden[..., first:last, :, :]
            mask = AttentionMask(
                forbidden,
                document_ids=self.document_ids,
                alibi_slopes=None if slopes is None else slopes[first:last],
                key_positions=self.key_positions,
            )
            mask.heads = heads
            self._of_heads[heads] = mask
        return self._of_heads[heads]

    def blocks(
        self,
        query: Tensor,
        num_keys: int,
        rule: Rule,
        *,
        rows: int | None = None,
        has_parts: bool = False,
        for_kernels: bool = False,
    ) -> list[Block]:
        """Cut queries into blocks, each with the keys that it needs.

        Args:
            query: ``[b, heads/t, s, d]``.
            num_keys: number of keys. Without context parallelism, queries are at the last ``s`` of their positions.
            rule: restrictions of the layer.
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
        if has_parts and self.alibi_slopes is not None:
            rows = max(1, min(rows, _NUMBERS // (query.size(1) * num_keys)))
        self._check(query, num_keys)
        kind, first_row, blocks = (query.dtype, query.device), 0, []
        ends = self._ends_of_documents() if has_parts and num_keys > rows else None
        on_cuda = for_kernels and device_type_of(query) == "cuda"
        for start, stop in self._positions(query, num_keys):
            whole = Run(slice(None), (start, stop), (0, num_keys), self.document_ids is not None)
            for run in [whole] if ends is None else runs_of_documents(ends, (start, stop), rows):
                blocks += self._blocks_of(run, rule, kind, start - first_row, rows, has_parts, on_cuda)
            first_row += stop - start
        return blocks

    def blocks_from_start(self, query: Tensor, num_keys: int, rule: Rule) -> list[Block] | None:
        """Cut queries at documents, and where a bias would be large.

        A block has one part, whose first key is that of the document, or a multiple of ``BLOCK_OF_KEYS`` after it. It
        is None if documents are not known here, or in pieces. For arguments and errors see ``blocks``.
        """
        self._check(query, num_keys)
        kind, positions = (query.dtype, query.device), self._positions(query, num_keys)
        ends = [] if self.document_ids is None else self._ends_of_documents()
        if ends is None or len(positions) > 1:
            return None
        runs = runs_of_documents(ends, positions[0], rows=0)
        offset, blocks = positions[0][0], list[Block]()
        for samples, (start, stop), keys, _ in runs if ends else [Run(slice(None), positions[0], (0, num_keys))]:
            own, queries = rule.within((start, stop), keys), slice(start - offset, stop - offset)
            has_bias = own.window is not None or self.forbidden is not None or self.alibi_slopes is not None
            if not has_bias and (start == keys[0] or not own.causal):
                part = Part(slice(keys[0], stop if own.causal else keys[1]), is_causal=own.causal)
                blocks.append(Block(samples, queries, (part,)))
                continue
            for low in range(start, stop, _ROWS):
                high = min(low + _ROWS, stop)
                first, last = own.keys_of((low, high), keys)
                seen = slice(first - (first - keys[0]) % BLOCK_OF_KEYS, last)
                bias = functools.partial(self._bias, own, kind, slice(low, high), offset, samples, False)
                if stop - start <= _ROWS:
                    bias = functools.partial(_columns, self._kept(bias, seen), seen.start)
                blocks.append(Block(samples, slice(low - offset, high - offset), (Part(seen, bias=bias),)))
        return blocks

    def packed(self, query: Tensor, num_keys: int, rule: Rule) -> list[Packed] | None:
        """Return runs of documents, or of samples without documents, for a layer that has at most a window.

        It is None if documents are not known here, or there are other restrictions. For arguments and errors see
        ``blocks``.
        """
        self._check(query, num_keys)
        ends = [[num_keys]] * query.size(0) if self.document_ids is None else self._ends_of_documents()
        if ends is None or self.forbidden is not None or self.alibi_slopes is not None:
            return None
        if rule.causal not in self._packed:
            self._packed[rule.causal], first = [], 0
            # The kernel applies the window.
            unbounded = rule._replace(window=None)
            for positions in self._positions(query, num_keys):
                runs = runs_of_documents(ends, positions, rows=0)
                seen = (run._replace(keys=unbounded.keys_of(run.queries, run.keys)) for run in runs)
                found = Packed.of(seen, positions[0], query.device)
                queries = slice(first, first + found.queries.stop)
                self._packed[rule.causal].append(found._replace(queries=queries))
                first = queries.stop
        return self._packed[rule.causal]

    def functions(self, query: Tensor, num_keys: int, rule: Rule, cap: float | None) -> Functions:
        """Return the mask as functions of positions, made once for all layers; ``cap`` bounds the scores.

        For the other arguments and errors see ``blocks``.
        """
        key = rule, cap, query.shape, num_keys
        if key not in self._functions:
            self._check(query, num_keys)
            sight = self._sight(rule, query.dtype, query.device)
            self._functions[key] = sight.functions(query, num_keys, cap=cap, context=self.context)
        return self._functions[key]

    def _positions(self, query: Tensor, num_keys: int) -> Sequence[Interval]:
        return ((num_keys - query.size(2), num_keys),) if self.context is None else self.context.intervals

    def _sight(self, rule: Rule, dtype: torch.dtype, device: torch.device) -> Visibility:
        key = rule, dtype, device
        if key not in self._sights:
            forbidden, slopes = self.forbidden, self.alibi_slopes
            self._sights[key] = Visibility(
                rule,
                None if forbidden is None else forbidden[(None,) * (4 - forbidden.dim())],
                None if self.document_ids is None else self._ids_on(device),
                None if slopes is None else slopes.to(device, torch.promote_types(dtype, torch.float32)),
                self.key_positions,
            )
        return self._sights[key]

    def _blocks_of(
        self, run: Run, rule: Rule, kind: Any, offset: int, rows: int, has_parts: bool, on_cuda: bool
    ) -> list[Block]:
        """``kind`` is the dtype and the device; ``offset`` is the position of a query less its index."""
        samples, (start, stop), keys, is_mixed = run
        rule = rule.within((start, stop), keys)
        queries = slice(start - offset, stop - offset)
        is_plain = not (is_mixed or rule.window or self.forbidden is not None or self.alibi_slopes is not None)
        if is_plain and (has_parts or stop - start <= rows):
            seen = slice(*rule.keys_of((start, stop), keys))
            if not rule.causal or stop - start == 1:
                return [Block(samples, queries, (Part(seen),))]
            own = Part(slice(start, stop), is_causal=True)
            if start == seen.start:
                return [Block(samples, queries, (own,))]
            if has_parts:
                return [Block(samples, queries, (Part(slice(seen.start, start)), own))]
            if on_cuda:
                from torch.nn.attention.bias import causal_lower_right

                # Flash attention aligns the last query with the last key.
                with outside_of_plans():
                    lower_right = causal_lower_right(stop - start, stop - seen.start)
                return [Block(samples, queries, (Part(seen, bias=lambda keys: lower_right),))]
        blocks = []
        for low in range(start, stop, rows):
            high = min(low + rows, stop)
            seen = slice(*rule.keys_of((low, high), keys))
            bias = functools.partial(self._bias, rule, kind, slice(low, high), offset, samples, is_mixed)
            if stop - start <= rows:
                bias = functools.partial(_columns, self._kept(bias, seen), seen.start)
            blocks.append(Block(samples, slice(low - offset, high - offset), (Part(seen, bias=bias),)))
        return blocks

    def _ends_of_documents(self) -> Sequence[Sequence[int]] | None:
        """Return, for each sample, the end of each document; None if reading them needs a wait, or one is in pieces."""
        ids = self.document_ids
        if ids is not None and planned_device() is not None:
            return [[ids.size(1)]] * ids.size(0)
        if ids is None or type(ids) is not Tensor or ids.device.type != "cpu":
            return None
        if self._ends is None:
            is_last = torch.cat([ids[:, 1:] != ids[:, :-1], torch.ones_like(ids[:, :1], dtype=torch.bool)], dim=1)
            ends = [(of_sample.nonzero().flatten() + 1).tolist() for of_sample in is_last]
            in_pieces = any(len(each) != len(sample.unique()) for each, sample in zip(ends, ids, strict=True))
            self._ends = [] if in_pieces else ends
        return self._ends or None

    def _kept(self, bias: functools.partial[Tensor], keys: slice) -> Tensor:
        """Make a bias once for all layers."""
        values = (*bias.args, keys)
        key = tuple((each.start, each.stop) if isinstance(each, slice) else each for each in values)
        if key not in self._made:
            self._made[key] = bias(keys)
        return self._made[key]

    def _bias(
        self, rule: Rule, kind: Any, queries: slice, offset: int, samples: slice, is_mixed: bool, keys: slice
    ) -> Tensor:
        """Make the bias of positions ``queries`` on ``keys``; for the other arguments see ``_blocks_of``."""
        dtype, device = kind
        sight = self._sight(rule, dtype, device)
        if not is_mixed:
            sight = sight._replace(document_ids=None)
        # The rows of a mask are those of this rank's queries, or of all positions.
        pairs = Rectangle(samples, queries, keys, device, offset=offset if self.context is None else 0)
        return hidden(self._by_distance.of(sight, pairs, dtype), sight.apart(pairs))

    def _ids_on(self, device: torch.device) -> Tensor:
        assert self.document_ids is not None
        if self.document_ids.device == device or device.type != "cuda":
            return self.document_ids
        if self._moved_ids is None:
            # In addition to those on the CPU, which other layers read.
            self._moved_ids = self.document_ids.pin_memory().to(device, non_blocking=True)
        return self._moved_ids

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


def _columns(bias: Tensor, first: int, keys: slice) -> Tensor:
    """Return the columns of keys from a bias whose first key is ``first``."""
    if bias.dim() == 0 or bias.size(-1) in (1, keys.stop - keys.start):
        return bias
    return bias[..., keys.start - first : keys.stop - first]


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


class AttentionSinks(ShardedModule):
    """A learned logit of each query head that takes a share of the attention weights, and has no value.

    Args:
        split: the heads of each rank.

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
