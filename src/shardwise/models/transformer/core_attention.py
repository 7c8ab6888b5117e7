"""The core of attention: heads that are split over the tensor-parallel group, with a configurable kernel."""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.core.layout import Layout
from shardwise.core.random import streams
from shardwise.core.sequence_view import ContextShard, SequenceView
from shardwise.kernels.decode_attention import attend_to_cache
from shardwise.kernels.dispatch import FLEXIBLE_ATTENTION, WIDEST_HEAD, why_repeat_keys
from shardwise.kernels.partial_attention import has_flash_for_parts, is_causal_bias, takes_packed
from shardwise.kernels.planning import device_type_of
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.attention_backends import kernels_of
from shardwise.models.transformer.attention_blocks import (
    Block,
    Packed,
    Part,
    attend_in_blocks,
    attend_to_packed,
    of_one_width,
    with_sinks,
)
from shardwise.models.transformer.context_attention import WAYS, Attend, Way, chosen_way
from shardwise.models.transformer.heads import HeadSplit, LocalHeads
from shardwise.models.transformer.masks import AttentionMask, AttentionSinks, AttnMaskType
from shardwise.models.transformer.mlp import softcap
from shardwise.models.transformer.ring_attention import attend_in_ring
from shardwise.nn import GroupModule, RowLinear, arithmetic_of
from shardwise.nn.dropout import sharded_dropout
from shardwise.nn.recompute import recomputed

# Maximum number of scores in a block, 64 MiB in fp32.
_SCORES_OF_BLOCK = 1 << 24
# The narrowest head of FlexAttention.
_NARROWEST = 16


class KeyValueCache(Protocol):
    """Interface of a cache that attention uses."""

    def append(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values ``[b, groups/t, new, d]``; return those of all tokens, ``[b, groups/t, all, d]``."""
        ...


class CoreAttention(GroupModule):
    """Base of attention: everything but the projection of hidden states to this rank's queries, keys and values.

    Args:
        config: sizes and variant of the attention.
        layer_number: number of this layer in the model, from 1; identifies its part of a cache.
        split: heads of each rank.
        group: tensor-parallel group.
        attn_mask_type: positions that attention forbids without a mask.

    Attributes:
        head_dim: width of queries and keys.
        linear_proj: output projection, which subclasses create.
        local_heads: heads of this rank.
        window_size: window of this layer, or None.
        rotates: whether this layer rotates queries and keys.
        sinks: ``AttentionSinks`` with ``config.attention_sinks``, or None.
    """

    linear_proj: RowLinear

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        split: HeadSplit,
        group: ProcessGroup,
        attn_mask_type: AttnMaskType,
    ) -> None:
        super().__init__()
        arithmetic = arithmetic_of(group)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.head_dim = config.heads.width
        self.dropout = config.attention_dropout
        self._way_asked = config.cp_comm_type
        self.softmax_scale = config.softmax_scale or 1 / math.sqrt(self.head_dim)
        self.logit_softcap = config.attention_logit_softcap
        self.window_size = config.window_size if config.windows(layer_number) else None
        self.rotates = config.rotates(layer_number)
        self._norm, self._activation = arithmetic.norm(group), arithmetic.activation
        self._context = arithmetic.context
        self.rotary_interleaved = config.rotary_interleaved
        self.recomputes_core = config.recompute.recomputes("core_attn")
        self._backend = config.attention_backend
        self._hold(split, group)
        self.sinks = AttentionSinks(config, split, group) if config.attention_sinks else None

    @property
    def output_layout(self) -> Layout:
        """Layout of hidden states, I or V(dim=0)."""
        return self.linear_proj.output_layout

    def _hold(self, split: HeadSplit, group: ProcessGroup) -> None:
        self.group = group
        self.local_heads = LocalHeads(split.queries_of_groups(group.rank()))
        self._head_sizes = split.query_sizes()

    def forward(
        self,
        hidden: Tensor,
        *,
        attention_mask: Tensor | AttentionMask | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        window_rotary: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
        sequence: SequenceView | None = None,
    ) -> Tensor:
        """Apply attention.

        Args:
            hidden: ``[s, b, h]``, or ``[s/t, b, h]`` with sequence parallelism.
            attention_mask: bools, True where attention is forbidden in addition to ``attn_mask_type`` and the window,
                broadcast to ``[b, heads/t, s, keys]``; or an ``AttentionMask``, for documents and ALiBi.
            rotary: cosine and sine of the positions; no rotation if None.
            window_rotary: separate cosine and sine for layers with a window, or None.
            cache: keys and values of earlier tokens, to which new ones are appended.
            sequence: used with sequence parallelism; None if all ranks hold the same number of positions.

        Returns:
            A tensor with the shape of ``hidden``.

        Raises:
            ShardingError: the mask has the wrong shape.
        """
        if self.window_size is not None and window_rotary is not None:
            rotary = window_rotary
        query, key, value = self._project(hidden, rotary if self.rotates else None, sequence)
        mask = attention_mask if isinstance(attention_mask, AttentionMask) else AttentionMask(attention_mask)
        output: Tensor = self.linear_proj(self.attended(query, key, value, mask, cache), sequence=sequence)
        return output

    def _project(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None, sequence: SequenceView | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's rotated queries and keys ``[s, b, heads/t or groups/t, d]``, and its values."""
        raise NotImplementedError

    def attended(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Compute ``[s, b, heads/t * d]``, the input of the output projection.

        Args:
            query: ``[s, b, heads/t, d]``.
            key, value: ``[s, b, groups/t, d]``; the values may have another width.
            mask: mask of the scores.
            cache: see ``forward``.
        """
        s, b, _, _ = query.shape
        # [s, b, heads, d] -> [b, heads, s, d], as views.
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if cache is not None:
            key, value = cache.append(self.layer_number, key, value)
        attend: Callable[..., Tensor] = self._attend
        if mask.context is not None:
            attend = partial(self._way(mask.context), attend, shard=mask.context, heads=self.local_heads)
        if self.recomputes_core and cache is None:
            attend = partial(recomputed, attend)
        context = attend(query, key, value, mask)
        return context.permute(2, 0, 1, 3).reshape(s, b, -1)

    def _way(self, shard: ContextShard) -> Way:
        draws = self.training and self.dropout > 0 and streams().rule == "global"
        if self._context is not None:
            # A sum of gradients of keys and values would round in another order.
            return WAYS["a2a"]
        way = chosen_way(self._way_asked, self.local_heads, shard.group.size(), draws=draws)
        return self._attend_in_ring if way == "p2p" else WAYS[way]

    def _attend_in_ring(
        self,
        attend: Attend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        *,
        shard: ContextShard,
        heads: LocalHeads,
    ) -> Tensor:
        """Attend to the keys and values of all context-parallel ranks as they arrive; a ``Way``."""
        width = value.size(-1)
        key, value = (_made_even(each, heads) for each in (key, value))
        query, key, value = of_one_width(query, key, value, direct=True)
        own = torch.cat([key, value], dim=-1).permute(2, 0, 1, 3).contiguous()
        sees: dict[str, Any] = {"causal": self.attn_mask_type.is_causal, "window": self.window_size}
        blocks = mask.blocks(query, shard.length, **sees, has_parts=True)
        sinks = None if self.sinks is None else self.sinks.logits
        return attend_in_ring(query, own, blocks, shard, scale=self.softmax_scale, sinks=sinks)[..., :width]

    def with_heads_of(self, split: HeadSplit, group: ProcessGroup) -> Self:
        """Return a copy that attends with this rank's heads of another split, without query and key norms."""
        other = copy.copy(self)
        other._hold(split, group)
        # A new dictionary, because the copy shares the original's.
        other._modules = {**self._modules, "q_layernorm": None, "k_layernorm": None}
        return other

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        heads = mask.heads or self.local_heads
        sinks = None if self.sinks is None else self.sinks.logits[slice(*heads.queries)]
        if mask.query_position is not None:
            return attend_to_cache(
                query,
                key,
                value,
                mask.query_position,
                scale=self.softmax_scale,
                before=-1 if self.window_size is None else self.window_size[0],
                softcap=self.logit_softcap,
                slopes=mask.alibi_slopes,
                sinks=sinks,
            )
        dropout = self.dropout if self.training else 0.0
        draws_whole = dropout > 0 and streams().rule == "global"
        if draws_whole and mask.context is not None:
            raise ConfigError(
                f"attention_dropout {dropout} with training.rng global draws the mask of whole sequences, which "
                "context-parallel ranks (cp) do not hold when they gather keys; use cp_comm_type a2a with at most as "
                "many ranks as heads, training.rng per_rank, or attention_dropout 0"
            )
        packed = self._packed_runs(query, mask, key.size(2), dropout)
        if packed is not None:
            return self._attend_to_packed(query, key, value, packed, heads)
        kernels = self._flexible_kernels(query, key, value, mask, dropout)
        if kernels is not None:
            return self._attend_flexibly(kernels, query, key, value, mask, heads)
        options: dict[str, Any] = {"causal": self.attn_mask_type.is_causal, "window": self.window_size}
        cut = partial(mask.blocks, query, key.size(2), **options)
        if draws_whole or self._backend == "local":
            attend = partial(self._attend_written_out, dropout=dropout, heads=heads)
            return _block_by_block(attend, query, key, value, cut(rows=query.size(2)))
        has_flash = self._backend in ("auto", "flash") and has_flash_for_parts(query)
        has_parts = has_flash and dropout == 0 and self.logit_softcap is None and self._activation.adds_parts
        has_parts = has_parts and not torch.compiler.is_compiling()
        written_out = self.logit_softcap is not None or (self.sinks is not None and not has_parts)
        if written_out or (dropout > 0 and has_flash):
            counted = self._activation.counted_heads(query.size(1), sum(self._head_sizes))
            blocks = cut(rows=max(1, _SCORES_OF_BLOCK // max(1, query.size(0) * counted * key.size(2))))
            if written_out or len(blocks) > 1:
                attend = partial(recomputed, partial(self._attend_written_out, dropout=dropout, heads=heads))
                return _block_by_block(attend, query, key, value, blocks)
        if not has_parts:
            blocks = cut(rows=query.size(2), for_kernels=True)
            by_kernel = partial(self._attend_by_kernel, dropout=dropout, heads=heads)
            return _block_by_block(by_kernel, query, key, value, blocks)
        blocks = cut(has_parts=True)
        if len(blocks) == 1 and len(blocks[0].parts) == 1 and self.sinks is None:
            by_kernel = partial(self._attend_by_kernel, dropout=0.0, heads=heads)
            return _block_by_block(by_kernel, query, key, value, blocks)
        key, value = (_made_even(each, heads) for each in (key, value))
        query, key, padded = of_one_width(query, key, value, direct=True)
        context = attend_in_blocks(query, key, padded, blocks, scale=self.softmax_scale, sinks=sinks)
        return context[..., : value.size(-1)]

    def _packed_runs(
        self, query: Tensor, mask: AttentionMask, num_keys: int, dropout: float
    ) -> Sequence[Packed] | None:
        """Return the runs that flash attention takes for documents or a window; its gradients round in any order."""
        takes = dropout == 0 and self.logit_softcap is None and self.sinks is None and self._activation.adds_parts
        takes = takes and self._backend in ("auto", "flash")
        is_restricted = mask.document_ids is not None or self.window_size is not None
        # Flash attention aligns a window at the last query and the last key, and a rank's queries end before the keys.
        causal = self.attn_mask_type.is_causal
        is_aligned = causal or self.window_size is None or mask.context is None
        if not (takes and is_restricted and is_aligned and takes_packed(query)) or torch.compiler.is_compiling():
            return None
        return mask.packed(query, num_keys, causal=causal)

    def _attend_to_packed(
        self, query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Packed], heads: LocalHeads
    ) -> Tensor:
        before, after = self.window_size or (-1, -1)
        window = before, 0 if self.attn_mask_type.is_causal else after
        key, padded = (_made_even(each, heads) for each in (key, value))
        query, key, padded = of_one_width(query, key, padded, direct=True)
        context = attend_to_packed(query, key, padded, runs, scale=self.softmax_scale, window=window)
        return context[..., : value.size(-1)]

    def _flexible_kernels(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, dropout: float) -> Any:
        """Return the kernels of FlexAttention if scores need a mask or change, and it takes them; otherwise None."""
        is_plain = mask.is_plain and self.window_size is None and self.logit_softcap is None and self.sinks is None
        if is_plain or dropout > 0 or self._backend != "auto" or not self._activation.adds_parts:
            return None
        widths = query.size(-1), value.size(-1)
        scores = query.shape[:3].numel() * key.size(2)
        return FLEXIBLE_ATTENTION.kernels(
            query, key, value, size=scores, fits=lambda: min(widths) >= _NARROWEST and max(widths) <= WIDEST_HEAD
        )

    def _attend_flexibly(
        self, kernels: Any, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, heads: LocalHeads
    ) -> Tensor:
        options: dict[str, Any] = {"causal": self.attn_mask_type.is_causal, "window": self.window_size}
        functions = partial(mask.functions, query, key.size(2), **options, cap=self.logit_softcap)
        key, value = (_made_even(each, heads) for each in (key, value))
        has_sums = self.sinks is not None
        output, sums = kernels.attend(query, key, value, functions, scale=self.softmax_scale, has_sums=has_sums)
        if self.sinks is not None:
            output, _ = with_sinks(output, sums, self.sinks.logits[slice(*heads.queries)])
        result: Tensor = output.to(query.dtype)
        return result

    def _attend_by_kernel(
        self, query: Tensor, key: Tensor, value: Tensor, part: Part, *, dropout: float, heads: LocalHeads
    ) -> Tensor:
        bias = part.made_bias()
        grouped = len(heads.queries_of_groups) < query.size(1)
        if grouped and (not heads.is_even or self._why_repeat(query, bias) is not None):
            key, value, grouped = _for_all_queries(key, heads), _for_all_queries(value, heads), False
        value_width = value.size(-1)
        query, key, value = of_one_width(query, key, value)
        with (
            streams().fork() if dropout > 0 else nullcontext(),
            kernels_of(self._backend, query, key),
        ):
            context = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=bias,
                dropout_p=dropout,
                is_causal=part.is_causal,
                scale=self.softmax_scale,
                enable_gqa=grouped,
            )
        return context if context.size(-1) == value_width else context[..., :value_width]

    def _why_repeat(self, query: Tensor, bias: Tensor | None) -> str | None:
        kind = device_type_of(query), query.dtype
        masked = bias is not None and not is_causal_bias(bias)
        return why_repeat_keys(self._backend, *kind, head_dim=self.head_dim, masked=masked)

    def _attend_written_out(
        self, query: Tensor, key: Tensor, value: Tensor, part: Part, *, dropout: float, heads: LocalHeads
    ) -> Tensor:
        # PyTorch's attention draws its own dropout mask, but the "global" rule needs a slice of the mask of all heads.
        key, value = _for_all_queries(key, heads), _for_all_queries(value, heads)
        bias, forbidden, blind = part.made_bias(), None, None
        if part.is_causal:
            new, seen = query.size(2), key.size(2)
            forbidden = torch.ones(new, seen, dtype=torch.bool, device=query.device).triu(seen - new + 1)
        scores = self._activation.matmul(query, key.transpose(-1, -2)) * self.softmax_scale
        if self.logit_softcap is not None:
            capped = partial(softcap, cap=self.logit_softcap)
            scores = self._activation(capped, scores)
        if bias is not None:
            scores = scores + bias
            forbidden = bias == -torch.inf
            blind = forbidden.all(dim=-1, keepdim=True)
        if forbidden is not None:
            # Not -inf, because the softmax of a token that sees nothing would be NaN.
            scores = scores.masked_fill(forbidden, torch.finfo(scores.dtype).min)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = self._activation.softmax(scores, wide) if self.sinks is None else self.sinks(scores, wide, heads)
        weights = weights.to(value.dtype)
        if blind is not None:
            weights = weights.masked_fill(blind, 0.0)
        along: dict[str, Any] = {"dim": 1, "group": self.group, "sizes": self._head_sizes, "part": heads.queries}
        weights = sharded_dropout(weights, dropout, layer_number=self.layer_number, **along)
        return self._activation.matmul(weights, value)


def _for_all_queries(keys: Tensor, heads: LocalHeads) -> Tensor:
    """Repeat keys or values ``[b, groups, keys, d]`` for all of their queries."""
    if len(heads.queries_of_groups) == sum(heads.queries_of_groups):
        return keys
    copies = [keys[:, i : i + 1].expand(-1, n, -1, -1) for i, n in enumerate(heads.queries_of_groups)]
    return torch.cat(copies, dim=1)


def _made_even(keys: Tensor, heads: LocalHeads) -> Tensor:
    """Repeat keys or values unless all of them have as many queries."""
    return keys if heads.is_even else _for_all_queries(keys, heads)


def _block_by_block(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block]
) -> Tensor:
    """Call ``attend`` with the queries, keys and values of each block of one part, and join the results."""
    results = [
        attend(query[samples, :, queries], key[samples, :, part.keys], value[samples, :, part.keys], part)
        for samples, queries, (part,) in blocks
    ]
    return results[0] if len(results) == 1 else torch.cat(results, dim=2)
