"""The core of attention: heads that are split over the tensor-parallel group, with a configurable kernel."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.core.layout import Layout
from shardwise.core.random import streams
from shardwise.core.sequence_view import ContextShard, SequenceView
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.attention_kernels import KERNELS, Call, Options, choose, described, for_flash
from shardwise.models.transformer.context_attention import METHODS, Attend, ContextMethod, choose_context_method
from shardwise.models.transformer.heads import HeadSplit, LocalHeads
from shardwise.models.transformer.masks import AttentionMask, AttentionSinks, AttnMaskType
from shardwise.models.transformer.ring_attention import attend_in_ring
from shardwise.models.transformer.visibility import Rule
from shardwise.nn import GroupModule, RowLinear, arithmetic_of
from shardwise.nn.dropout import sharded_dropout
from shardwise.nn.recompute import recomputed


class KeyValueCache(Protocol):
    """Interface of a cache that attention uses."""

    def append(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values ``[b, groups/t, new, d]``; return those of all tokens, ``[b, groups/t, all, d]``."""
        ...


class RowCache(ABC):
    """A cache for a row ``[1, s]`` that holds new tokens of several sequences, which follow the earlier ones.

    All parts of a model but attention work row by row. Attention gives this object its new queries, keys and values.

    Attributes:
        rows: ``[n]`` int64, the rows whose logits the model returns.
        text_lengths: ``[1, s]`` int64, number of tokens of the sequence of each row, for rotary frequencies that depend
            on it.
    """

    rows: Tensor
    text_lengths: Tensor

    @abstractmethod
    def attend(
        self,
        layer_number: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        attend: Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor],
    ) -> Tensor:
        """Keep the new keys and values, and attend to those of each query's sequence.

        Args:
            layer_number: number of the layer, from 1.
            query: ``[1, heads/t, s, d]``.
            key, value: ``[1, groups/t, s, d]``.
            mask: mask of the row, whose ALiBi slopes are used.
            attend: attention of this rank to queries ``[b, heads/t, new, d]`` at the last positions of keys and values
                ``[b, groups/t, all, d]``.

        Returns:
            ``[1, heads/t, s, d]``, as wide as the values.
        """


class CoreAttention(GroupModule):
    """Base of attention: everything but the projection of hidden states to this rank's queries, keys and values.

    Args:
        config: sizes and variant of the attention.
        layer_number: number of this layer in the model, from 1; identifies its part of a cache.
        split: heads of each rank.
        attn_mask_type: positions that attention forbids without a mask.

    Attributes:
        head_dim: width of queries and keys.
        linear_proj: output projection, which subclasses create.
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
        self.head_dim = config.heads_of(layer_number).width
        self.dropout = config.attention_dropout
        self._cp_comm_type = config.cp_comm_type
        self.softmax_scale = config.softmax_scale or 1 / math.sqrt(self.head_dim)
        self.logit_softcap = config.attention_logit_softcap
        self.window_size = config.window_size if config.windows(layer_number) else None
        self._rule = Rule(attn_mask_type.is_causal, self.window_size)
        self.rotates = config.rotates(layer_number)
        self._norm, self._activation = arithmetic.norm(group), arithmetic.activation
        self._kernels = self._activation.kernels(KERNELS)
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
        query_scale: Tensor | None = None,
        cache: KeyValueCache | RowCache | None = None,
        sequence: SequenceView | None = None,
    ) -> Tensor:
        """Apply attention.

        Args:
            hidden: ``[s, b, h]``, or ``[s/t, b, h]`` with sequence parallelism.
            attention_mask: bools, True where attention is forbidden in addition to ``attn_mask_type`` and the window,
                broadcast to ``[b, heads/t, s, keys]``; or an ``AttentionMask``, for documents and ALiBi.
            rotary: cosine and sine of the positions; no rotation if None.
            window_rotary: separate cosine and sine for layers with a window, or None.
            query_scale: factor of the queries of each position, ``[s, 1 or b, 1, 1]``; 1 if None.
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
        if query_scale is not None:
            query = query * query_scale
        mask = attention_mask if isinstance(attention_mask, AttentionMask) else AttentionMask(attention_mask)
        output: Tensor = self.linear_proj(self.attended(query, key, value, mask, cache), sequence=sequence)
        return output

    def _project(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None, sequence: SequenceView | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's rotated queries and keys ``[s, b, heads/t or groups/t, d]``, and its values."""
        raise NotImplementedError

    def attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        cache: KeyValueCache | RowCache | None = None,
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
        attend: Callable[..., Tensor] = self._attend
        if isinstance(cache, RowCache):
            context = cache.attend(self.layer_number, query, key, value, mask, attend)
            return context.permute(2, 0, 1, 3).reshape(s, b, -1)
        if cache is not None:
            key, value = cache.append(self.layer_number, key, value)
        if mask.context is not None:
            attend = partial(self._context_method(mask.context), attend, shard=mask.context, heads=self.local_heads)
        if self.recomputes_core and cache is None:
            attend = partial(recomputed, attend)
        context = attend(query, key, value, mask)
        return context.permute(2, 0, 1, 3).reshape(s, b, -1)

    def _context_method(self, shard: ContextShard) -> ContextMethod:
        draws = self.training and self.dropout > 0 and streams().rule == "global"
        if self._context is not None:
            # A sum of gradients of keys and values would round in another order.
            return METHODS["a2a"]
        way = choose_context_method(self._cp_comm_type, self.local_heads, shard.group.size(), draws=draws)
        if draws and way == "all_gather":
            raise ConfigError(
                f"attention_dropout {self.dropout} with training.rng global draws the mask of whole sequences, which "
                "context-parallel ranks (cp) do not hold when they gather keys; use cp_comm_type a2a with at most as "
                "many ranks as heads, training.rng per_rank, or attention_dropout 0"
            )
        return self._attend_in_ring if way == "p2p" else METHODS[way]

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
        """Attend to the keys and values of all context-parallel ranks as they arrive; a ``ContextMethod``."""
        width = value.size(-1)
        query, key, value = for_flash(query, key, value, heads)
        own = torch.cat([key, value], dim=-1).permute(2, 0, 1, 3).contiguous()
        blocks = mask.blocks(query, shard.length, self._rule, has_parts=True)
        sinks = None if self.sinks is None else self.sinks.logits
        return attend_in_ring(query, own, blocks, shard, scale=self.softmax_scale, sinks=sinks)[..., :width]

    def with_heads_of(self, split: HeadSplit, group: ProcessGroup) -> Self:
        """Return a copy that attends with this rank's heads of another split, without query and key norms."""
        other = copy.copy(self)
        other._hold(split, group)
        # A new dictionary, because the copy shares the original's.
        other._modules = {**self._modules, "q_layernorm": None, "k_layernorm": None}
        return other

    def described_kernel(self, like: Tensor, mask: AttentionMask) -> str:
        """Return the kernel for samples like ``[b, s]`` under a mask, and why others do not; see ``described``."""
        (b, keys), heads, shard = like.shape, self.local_heads, mask.context
        queries, method = keys, None if shard is None else self._context_method(shard)
        if shard is not None and method is METHODS["a2a"]:
            heads = heads.over(shard.group.size())[shard.group.rank()]
            mask = mask.of_heads(heads, self.local_heads)
        elif shard is not None:
            queries = shard.size
        if method == self._attend_in_ring:
            return "flash attention to the keys of one rank after the other"
        # Without memory: kernels choose by shapes, dtype and device.
        query, key = (
            like.new_empty(()).expand(b, last - first, length, self.head_dim)
            for (first, last), length in ((heads.queries, queries), (heads.groups, keys))
        )
        return described(self._kernels, Call(query, key, key, mask, self._options(heads)))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        call = Call(query, key, value, mask, self._options(mask.heads or self.local_heads))
        return choose(self._kernels, call).attend(call)

    def _options(self, heads: LocalHeads) -> Options:
        dropout = self.dropout if self.training else 0.0
        along: dict[str, Any] = {"dim": 1, "group": self.group, "sizes": self._head_sizes, "part": heads.queries}
        return Options(
            heads,
            self._rule,
            self.softmax_scale,
            self.logit_softcap,
            None if self.sinks is None else self.sinks.logits[slice(*heads.queries)],
            dropout,
            partial(sharded_dropout, p=dropout, layer_number=self.layer_number, **along),
            self._backend,
            self._activation,
            self._activation.counted_heads(heads.queries[1] - heads.queries[0], sum(self._head_sizes)),
        )
