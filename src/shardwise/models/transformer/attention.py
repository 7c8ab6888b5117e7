"""Self-attention whose heads are split over the tensor-parallel group, with a configurable kernel."""

import copy
import math
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.core.errors import ConfigError
from shardwise.core.layout import Layout
from shardwise.core.random import streams
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import Replicas
from shardwise.kernels.decode_attention import attend_to_cache
from shardwise.kernels.dispatch import why_repeat_keys
from shardwise.kernels.elementwise import rotate, split, split_and_rotate
from shardwise.kernels.planning import device_type_of
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.heads import HeadSplit, split_heads
from shardwise.models.transformer.masks import AttentionMask, AttentionSinks, AttnMaskType
from shardwise.models.transformer.mlp import layer_arguments, make_norm, softcap
from shardwise.nn import ColumnLinear, GroupModule, HeadsRMSNorm, RowLinear, arithmetic_of, parameter_device
from shardwise.nn.dropout import sharded_dropout
from shardwise.nn.recompute import recomputed
from shardwise.nn.replicated import set_replicas_

_KERNELS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "fused": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
    "unfused": [SDPBackend.MATH],
}
"""Kernels that PyTorch may use, by ``config.attention_backend``; all for "auto", none for "local"."""

# cuDNN's kernel builds a plan for each number of keys, which takes longer than the attention of one token.
_KERNELS_ON_A_CACHE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Maximum number of scores in a block, 64 MiB in fp32.
_SCORES_OF_BLOCK = 1 << 24


class KeyValueCache(Protocol):
    """Interface of a cache that attention uses."""

    def append(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values ``[b, groups/t, new, d]``; return those of all tokens, ``[b, groups/t, all, d]``."""
        ...


class SelfAttention(GroupModule):
    """Multi-head, grouped-query or multi-query attention.

    The query-key-value weight has one block per key-value head: its queries, its key, its value. Ranks hold whole
    blocks, by the balanced rule, so 7 heads on 3 ranks are split into 3, 2 and 2. With fewer key-value heads than
    ranks, the ranks split the query heads, and each holds a copy of the key-value heads that its query heads use. The
    copies' gradients are partial sums until ``finalize_gradients_`` (``models.transformer.heads.HeadSplit``).

    Args:
        config: sizes and variant of the attention.
        layer_number: number of this layer in the model, from 1; identifies its part of a cache.
        tp_group: tensor-parallel group.
        attn_mask_type: positions that attention forbids without a mask.

    Attributes:
        num_local_groups: number of key-value heads on this rank.
        q_layernorm, k_layernorm: with ``config.qk_layernorm``, norms of each head, or of all heads together. Every rank
            holds the whole norms and applies them to its heads, so their gradients are partial sums, with and without
            sequence parallelism, except with ``config.exact_parts``.
        sinks: ``AttentionSinks`` with ``config.attention_sinks``, or None.
        window_size: window of this layer, or None.
        rotates: whether this layer rotates queries and keys.

    Raises:
        ConfigError: there are fewer query heads than ranks or, with ``config.exact_parts``, fewer key-value heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        tp_group: ProcessGroup,
        *,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
    ) -> None:
        super().__init__()
        group = tp_group
        num_heads, num_groups, head_dim = config.heads
        split = split_heads(num_heads, num_groups, group.size())
        arithmetic = arithmetic_of(group)
        if num_groups < group.size():
            arithmetic.refuse(
                f"exact: num_query_groups is {num_groups}, fewer than the {group.size()} tensor-parallel ranks, which "
                "hold copies of key-value heads, and the sum of their gradients has no exact form; use "
                f"tp {1 << num_groups.bit_length() - 1} at most, or no exact mode"
            )
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.head_dim = head_dim
        self.dropout = config.attention_dropout
        self.softmax_scale = config.softmax_scale
        self.logit_softcap = config.attention_logit_softcap
        self.window_size = config.window_size if config.windows(layer_number) else None
        self.rotates = config.rotates(layer_number)
        self._norm, self._activation = arithmetic.norm(group), arithmetic.activation
        self.rotary_interleaved = config.rotary_interleaved
        self.recomputes_core = config.recompute.recomputes("core_attn")
        self._hold(split, group)
        self._backend = config.attention_backend
        self._kernels = _KERNELS.get(config.attention_backend)
        layout = split.qkv_layout((config.hidden_size,), head_dim)
        arguments = layer_arguments(config, group=group)
        self.linear_qkv = ColumnLinear(
            config.hidden_size,
            layout.global_shape[0],
            bias=config.add_qkv_bias,
            init=config.init_method,
            intervals=layout.intervals,
            **arguments,
        )
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if config.qk_layernorm:
            with parameter_device(group, on_cpu=config.use_cpu_initialization):
                self.q_layernorm, self.k_layernorm = self._make_norms(config, split)
            for norm in (self.q_layernorm, self.k_layernorm):
                # With exact arithmetic the backward already computes the whole gradient.
                is_partial = group.size() > 1 and self._norm.partial_gradients
                set_replicas_(norm, Replicas(summed_over=("tp",) if is_partial else ()))
        self.sinks = AttentionSinks(config, split, group) if config.attention_sinks else None
        self.linear_proj = RowLinear(
            num_heads * head_dim,
            config.hidden_size,
            bias=config.add_bias_linear,
            init=config.output_layer_init_method,
            sizes=[n * head_dim for n in self._head_sizes],
            **arguments,
        )

    @property
    def input_layout(self) -> Layout:
        """Layout of hidden states, I or V(dim=0)."""
        return self.linear_qkv.input_layout

    @property
    def output_layout(self) -> Layout:
        """Same as ``input_layout``."""
        return self.linear_proj.output_layout

    def _hold(self, split: HeadSplit, group: ProcessGroup) -> None:
        self.group = group
        self.queries_of_groups = split.queries_of_groups(group.rank())
        self.num_local_groups = len(self.queries_of_groups)
        self._is_even = len(set(self.queries_of_groups)) == 1
        self._rotates_while_splitting = self._is_even and self._activation.rotates_while_splitting
        self._head_sizes = split.query_sizes()

    def with_heads_of(self, split: HeadSplit, group: ProcessGroup) -> Self:
        """Return a copy whose ``attended`` takes this rank's heads by another split, without query and key norms."""
        other = copy.copy(self)
        other._hold(split, group)
        # A new dictionary, because the copy shares the original's.
        other._modules = {**self._modules, "q_layernorm": None, "k_layernorm": None}
        return other

    def _make_norms(self, config: ModelConfig, split: HeadSplit) -> tuple[nn.Module, nn.Module]:
        rank, head_dim = self.group.rank(), self.head_dim
        if not config.qk_layernorm_over_heads:
            return make_norm(config, head_dim), make_norm(config, head_dim)
        options: dict[str, Any] = {
            "eps": config.layernorm_epsilon,
            "zero_centered": config.layernorm_zero_centered_gamma,
            "dtype": config.params_dtype,
        }
        num_heads, num_groups, _ = config.heads
        queries, keys = split.queries[rank], split.groups[rank]
        return (
            HeadsRMSNorm(num_heads * head_dim, queries, queries[1] - queries[0], head_dim, **options),
            HeadsRMSNorm(num_groups * head_dim, keys, split.num_first_groups(rank), head_dim, **options),
        )

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
        mixed: Tensor = self.linear_qkv(hidden, sequence=sequence)
        if self.window_size is not None and window_rotary is not None:
            rotary = window_rotary
        mask = attention_mask if isinstance(attention_mask, AttentionMask) else AttentionMask(attention_mask)
        output: Tensor = self.linear_proj(self.attended(mixed, mask, rotary, cache))
        return output

    def attended(
        self,
        mixed: Tensor,
        mask: AttentionMask,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Compute ``forward`` between its two linear layers: ``[s, b, rows/t]`` to ``[s, b, heads/t * d]``."""
        s, b, _ = mixed.shape
        query, key, value = self._split_heads(mixed, rotary if self.rotates else None)
        # [s, b, heads, d] -> [b, heads, s, d], as views.
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if cache is not None:
            key, value = cache.append(self.layer_number, key, value)
        attend = partial(recomputed, self._attend) if self.recomputes_core and cache is None else self._attend
        context = attend(query, key, value, mask)
        return context.permute(2, 0, 1, 3).reshape(s, b, -1)

    def _split_heads(self, mixed: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split ``[s, b, rows/t]`` into ``[s, b, heads/t, d]`` and two ``[s, b, groups/t, d]``, normed and rotated."""
        s, b, _ = mixed.shape
        per_group, head_dim, interleaved = self.queries_of_groups[0], self.head_dim, self.rotary_interleaved
        if self._rotates_while_splitting and rotary is not None and self.q_layernorm is None:
            return split_and_rotate(
                mixed, *rotary, queries_per_group=per_group, head_dim=head_dim, interleaved=interleaved
            )
        if self._is_even:
            query, key, value = split(mixed, queries_per_group=per_group, head_dim=head_dim)
        else:
            sections = [n for queries in self.queries_of_groups for n in (queries, 1, 1)]
            parts = mixed.view(s, b, -1, head_dim).split(sections, dim=2)
            query, key, value = (torch.cat(parts[i::3], dim=2) for i in range(3))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self._norm.heads(self.q_layernorm, self.k_layernorm, query, key)
        if rotary is not None:
            query, key = (
                rotate(x, *rotary, interleaved=interleaved, at_any_size=self._activation.at_any_size)
                for x in (query, key)
            )
        return query, key, value

    @property
    def attends_at_position(self) -> bool:
        """True if this attention supports ``AttentionMask.query_position``."""
        is_causal, reads = self.attn_mask_type.is_causal, self._activation.reads_a_cache
        return type(self) is SelfAttention and self._is_even and is_causal and reads

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        if mask.query_position is not None:
            return attend_to_cache(
                query,
                key,
                value,
                mask.query_position,
                scale=self.softmax_scale or 1 / math.sqrt(self.head_dim),
                before=-1 if self.window_size is None else self.window_size[0],
                softcap=self.logit_softcap,
                slopes=mask.alibi_slopes,
                sinks=None if self.sinks is None else self.sinks.logits,
            )
        bias, is_causal = mask.bias(query, key.size(2), causal=self.attn_mask_type.is_causal, window=self.window_size)
        dropout = self.dropout if self.training else 0.0
        if self.logit_softcap is not None or self.sinks is not None:
            return self._attend_in_blocks(query, key, value, bias, is_causal, dropout)
        if self._backend == "local" or (dropout > 0 and streams().rule == "global"):
            return self._attend_written_out(query, key, value, bias, is_causal, dropout)
        grouped = self.num_local_groups < query.size(1)
        if grouped and (not self._is_even or self._why_repeat(query, bias) is not None):
            key, value, grouped = self._for_all_queries(key), self._for_all_queries(value), False
        kernels = self._kernels
        if query.is_cuda and query.size(2) != key.size(2):
            kernels = [each for each in kernels or _KERNELS_ON_A_CACHE if each is not SDPBackend.CUDNN_ATTENTION]
        with (
            streams().fork() if dropout > 0 else nullcontext(),
            sdpa_kernel(kernels) if kernels is not None else nullcontext(),
        ):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=bias,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.softmax_scale,
                enable_gqa=grouped,
            )

    def _why_repeat(self, query: Tensor, bias: Tensor | None) -> str | None:
        kind = device_type_of(query), query.dtype
        return why_repeat_keys(self._backend, *kind, head_dim=self.head_dim, masked=bias is not None)

    def _for_all_queries(self, heads: Tensor) -> Tensor:
        """Repeat keys or values ``[b, groups/t, keys, d]`` for all of their queries."""
        if self.num_local_groups == sum(self.queries_of_groups):
            return heads
        copies = [heads[:, i : i + 1].expand(-1, n, -1, -1) for i, n in enumerate(self.queries_of_groups)]
        return torch.cat(copies, dim=1)

    def _attend_in_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, dropout: float
    ) -> Tensor:
        """Run ``_attend_written_out`` by blocks of queries, recomputed in the backward, to bound the scores' memory."""
        b, heads, s, _ = query.shape
        counted = self._activation.counted_heads(heads, sum(self._head_sizes))
        rows = max(1, _SCORES_OF_BLOCK // max(1, b * counted * key.size(2)))
        blocks = []
        for start in range(0, s, rows):
            some = query[:, :, start : start + rows]
            part = bias if bias is None or bias.size(-2) == 1 else bias[..., start : start + rows, :]
            # Causal attention without a bias has as many keys as queries, and does not see later keys.
            seen = start + some.size(2) if is_causal else key.size(2)
            attend = partial(self._attend_written_out, is_causal=is_causal, dropout=dropout)
            blocks.append(recomputed(attend, some, key[:, :, :seen], value[:, :, :seen], part))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)

    def _attend_written_out(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, dropout: float
    ) -> Tensor:
        # PyTorch's attention draws its own dropout mask, but the "global" rule needs a slice of the mask of all heads.
        key, value = self._for_all_queries(key), self._for_all_queries(value)
        forbidden = blind = None
        if is_causal:
            new, seen = query.size(2), key.size(2)
            forbidden = torch.ones(new, seen, dtype=torch.bool, device=query.device).triu(seen - new + 1)
        scale = self.softmax_scale or 1 / math.sqrt(self.head_dim)
        scores = (query @ key.transpose(-1, -2)) * scale
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
        weights = scores.softmax(dim=-1, dtype=wide) if self.sinks is None else self.sinks(scores, wide)
        weights = weights.to(value.dtype)
        if blind is not None:
            weights = weights.masked_fill(blind, 0.0)
        weights = sharded_dropout(
            weights, dropout, dim=1, group=self.group, sizes=self._head_sizes, layer_number=self.layer_number
        )
        return weights @ value


def check_attention_backend(config: ModelConfig, device: torch.device, *, masked: bool = False) -> None:
    """Try ``config.attention_backend`` on a device; raise ConfigError with PyTorch's reasons if it does not work.

    No-op on the meta device. ``masked`` means that attention has a mask or bias (padding, documents, ALiBi), which some
    kernels do not support.
    """
    kernels = _KERNELS.get(config.attention_backend)
    if kernels is None or device.type == "meta":
        return
    heads, groups, head_dim = config.heads
    masked = masked or config.window_size is not None
    repeated = why_repeat_keys(
        config.attention_backend, device.type, config.params_dtype, head_dim=head_dim, masked=masked
    )
    query = torch.zeros(1, min(heads, 2), 16, head_dim, dtype=config.params_dtype, device=device, requires_grad=True)
    key = query if repeated is not None or groups == heads else query[:, :1]
    mask = query.new_zeros(16, 16) if masked else None
    devices = [device] if device.type != "cpu" else []
    with (
        warnings.catch_warnings(record=True) as reasons,
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
        sdpa_kernel(kernels),
    ):
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(
                query,
                key,
                key,
                attn_mask=mask,
                dropout_p=config.attention_dropout,
                is_causal=not masked,
                enable_gqa=key is not query,
            ).sum().backward()
        except RuntimeError as error:
            said = "; ".join(dict.fromkeys(str(reason.message).splitlines()[0] for reason in reasons))
            raise ConfigError(
                f"attention_backend {config.attention_backend!r} does not work on {device} in {config.params_dtype} "
                f"with heads of width {head_dim}, attention_dropout {config.attention_dropout} and "
                f"{'a' if masked else 'no'} mask: {said or error}; use 'auto'"
            ) from error
