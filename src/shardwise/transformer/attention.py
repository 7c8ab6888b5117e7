"""Causal self-attention whose heads are split over the tensor-parallel group."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.config import TransformerConfig
from shardwise.dropout import sharded_dropout
from shardwise.errors import ConfigError
from shardwise.parallel_state import resolve_tensor_model_parallel_group
from shardwise.random import streams
from shardwise.sharding import balanced_sizes
from shardwise.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from shardwise.transformer.rotary import apply_rotary


class KeyValueCache(Protocol):
    """What attention needs of a cache: it appends new keys and values and returns all of them."""

    def append(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """``[b, groups/t, new, d]`` each in; ``[b, groups/t, all, d]`` each out."""
        ...


class SelfAttention(nn.Module):
    """Multi-head, grouped-query or multi-query attention.

    The query-key-value weight holds one block per key-value head: its queries, its key, its value. Ranks hold whole
    blocks, by the balanced rule, so 7 heads on 3 ranks are 3, 2 and 2.

    Args:
        config: sizes of the model.
        layer_number: this layer's place in the model, from 1; names its cache.
        tp_group: tensor-parallel group; the ambient one if None.

    Raises:
        ConfigError: fewer key-value heads than ranks.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, tp_group: ProcessGroup | None = None) -> None:
        super().__init__()
        group = resolve_tensor_model_parallel_group(tp_group)
        num_heads, num_groups, head_dim = config.heads
        if num_groups < group.size():
            raise ConfigError(
                f"{num_groups} key-value heads cannot be split over {group.size()} tensor-parallel ranks; "
                "use at most as many ranks as key-value heads"
            )
        self.layer_number = layer_number
        self.head_dim = head_dim
        self.queries_per_group = num_heads // num_groups
        groups = balanced_sizes(num_groups, group.size())
        self.num_local_groups = groups[group.rank()]
        self.dropout = config.attention_dropout
        self.group = group
        self._head_sizes = [n * self.queries_per_group for n in groups]
        block = (self.queries_per_group + 2) * head_dim
        assert config.init_method is not None
        assert config.output_layer_init_method is not None
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            num_groups * block,
            config=config,
            init_method=config.init_method,
            bias=bool(config.add_qkv_bias),
            sizes=[n * block for n in groups],
            tp_group=group,
        )
        self.linear_proj = RowParallelLinear(
            num_heads * head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=False,
            sizes=[n * self.queries_per_group * head_dim for n in groups],
            tp_group=group,
        )

    def forward(
        self,
        hidden: Tensor,
        *,
        attention_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
        sequence_length: int | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            hidden: ``[s, b, h]``, or ``[s/t, b, h]`` with sequence parallelism.
            attention_mask: True where attention is forbidden, broadcast to ``[b, heads, s, keys]``; causal if None.
            rotary: cosine and sine of the positions; no rotation if None.
            cache: keys and values of earlier tokens; what is new is appended.
            sequence_length: ``s``, which sequence parallelism must be told where the ranks do not divide it.

        Returns:
            Like ``hidden``.
        """
        mixed, _ = self.linear_qkv(hidden, sequence_length=sequence_length)
        s, b, _ = mixed.shape
        mixed = mixed.view(s, b, self.num_local_groups, self.queries_per_group + 2, self.head_dim)
        query, key, value = mixed.split((self.queries_per_group, 1, 1), dim=3)
        query = query.reshape(s, b, self.num_local_groups * self.queries_per_group, self.head_dim)
        key, value = key.squeeze(3), value.squeeze(3)
        if rotary is not None:
            query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        # [s, b, heads, d] -> [b, heads, s, d], as views.
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if cache is not None:
            key, value = cache.append(self.layer_number, key, value)
        context = self._attend(query, key, value, attention_mask)
        output: Tensor = self.linear_proj(context.permute(2, 0, 1, 3).reshape(s, b, -1))[0]
        return output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        new, total = query.size(2), key.size(2)
        allowed = None
        if attention_mask is not None:
            allowed = ~attention_mask
        elif 1 < new < total:
            # Queries are the last of the keys' positions; `is_causal` would align them with the first.
            allowed = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
        dropout = self.dropout if self.training else 0.0
        if dropout > 0 and streams().rule == "global":
            return self._attend_with_global_mask(query, key, value, allowed)
        with streams().fork() if dropout > 0 else nullcontext():
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=allowed,
                dropout_p=dropout,
                is_causal=allowed is None and new == total,
                enable_gqa=self.queries_per_group > 1,
            )

    def _attend_with_global_mask(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
        """Attention written out, since PyTorch's draws its dropout mask itself; this one is a slice of all heads'."""
        key, value = (x.repeat_interleave(self.queries_per_group, dim=1) for x in (key, value))
        new, total = query.size(2), key.size(2)
        if allowed is None:
            allowed = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
        scores = (query @ key.transpose(-1, -2)) / math.sqrt(self.head_dim)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1, dtype=wide).to(value.dtype)
        weights = sharded_dropout(weights, self.dropout, dim=1, group=self.group, sizes=self._head_sizes)
        return weights @ value
