"""Multi-head latent attention: keys and values of all heads are projections of one narrow latent of each token.

Every rank computes the latents, of its tokens with sequence parallelism and else of all tokens; the projections from
them are split by heads. Without sequence parallelism the gradients of the latents and of the keys' rotated part are
summed over the heads of all ranks, so that the gradients of what computes them are whole. With it, these tensors are
gathered along the sequence, their gradients are summed and scattered, and the gradients of what computes them are
partial sums over the ranks' tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.layout import Layout
from shardwise.core.sequence_view import SequenceView
from shardwise.kernels.elementwise import rotate
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.core_attention import CoreAttention
from shardwise.models.transformer.heads import split_heads
from shardwise.models.transformer.masks import AttnMaskType
from shardwise.models.transformer.mlp import layer_arguments, make_norm
from shardwise.nn import ColumnLinear, ReplicatedLinear, RowLinear, parameter_device

# DeepSeek's models have this constant in the norms of latents, and their own in all others.
_EPSILON = 1e-6


class LatentSelfAttention(CoreAttention):
    """Self-attention with ``config.latent``.

    Args:
        config: sizes and variant of the attention; ``add_qkv_bias`` gives the projections to latents biases.
        layer_number: number of this layer in the model, from 1; identifies its part of a cache.
        tp_group: tensor-parallel group, whose ranks hold heads by the balanced rule.
        attn_mask_type: positions that attention forbids without a mask.

    Attributes:
        linear_q_proj: projection of the hidden states to queries; None with ``query_rank``.
        linear_q_down_proj, q_layernorm, linear_q_up_proj: projection to the latent of queries, its norm, and projection
            to queries; None without ``query_rank``.
        linear_kv_down_proj: projection to the latent of keys and values, and after it the rotated part of all keys.
        kv_layernorm: norm of that latent.
        linear_kv_up_proj: projection to keys and values; for each head the key's part that is not rotated, then the
            value.

    Raises:
        ConfigError: there are fewer heads than ranks.

    Source: DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        tp_group: ProcessGroup,
        *,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
    ) -> None:
        latent, group, num_heads = config.latent, tp_group, config.num_attention_heads
        assert latent is not None
        assert config.init_method is not None
        super().__init__(config, layer_number, split_heads(num_heads, num_heads, group.size()), group, attn_mask_type)
        self.latent = latent
        self._splits_sequence = config.sequence_parallel and group.size() > 1
        arguments = layer_arguments(config, group=group)
        down: dict[str, Any] = {
            "bias": config.add_qkv_bias,
            "init": config.init_method,
            "sequence_shards": self._splits_sequence,
            **layer_arguments(config, group=group, linear=False),
        }

        def up(features: int, width: int) -> ColumnLinear:
            sizes = [n * width for n in self._head_sizes]
            init = config.init_method
            return ColumnLinear(features, num_heads * width, bias=False, init=init, sizes=sizes, **arguments)

        self.linear_q_proj: ColumnLinear | None = None
        self.linear_q_down_proj: ReplicatedLinear | None = None
        self.q_layernorm: nn.Module | None = None
        self.linear_q_up_proj: ColumnLinear | None = None
        with parameter_device(group, on_cpu=config.use_cpu_initialization):
            if latent.query_rank is None:
                self.linear_q_proj = up(config.hidden_size, latent.head_width)
            else:
                self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, latent.query_rank, **down)
                self.q_layernorm = make_norm(config, latent.query_rank, _EPSILON)
                self.linear_q_up_proj = up(latent.query_rank, latent.head_width)
            rows = latent.key_value_rank + latent.rotary_width
            self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, rows, **down)
            self.kv_layernorm = make_norm(config, latent.key_value_rank, _EPSILON)
        self.linear_kv_up_proj = up(latent.key_value_rank, latent.plain_width + latent.value_width)
        self.linear_proj = RowLinear(
            num_heads * latent.value_width,
            config.hidden_size,
            bias=bool(config.attention_bias),
            init=config.output_layer_init_method,
            sizes=[n * latent.value_width for n in self._head_sizes],
            **arguments,
        )

    @property
    def input_layout(self) -> Layout:
        return self.output_layout

    def _project(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None, sequence: SequenceView | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        latent = self.latent
        query = self._queries(hidden, sequence)
        of_tokens, shared = self.linear_kv_down_proj(hidden).split([latent.key_value_rank, latent.rotary_width], dim=-1)
        mixed = self.linear_kv_up_proj(self._norm(self.kv_layernorm, of_tokens), sequence=sequence)
        mixed = mixed.unflatten(-1, (-1, latent.plain_width + latent.value_width))
        plain, value = mixed.split([latent.plain_width, latent.value_width], dim=-1)
        shared = self._for_heads_of_all_ranks(shared, sequence).unsqueeze(2)
        if rotary is not None:
            plain_query, rotated = query.split([latent.plain_width, latent.rotary_width], dim=-1)
            rotated, shared = (rotate(x, *rotary, interleaved=self.rotary_interleaved) for x in (rotated, shared))
            query = torch.cat([plain_query, rotated], dim=-1)
        return query, torch.cat([plain, shared.expand(-1, -1, plain.size(2), -1)], dim=-1), value

    def _queries(self, hidden: Tensor, sequence: SequenceView | None) -> Tensor:
        up = self.linear_q_proj or self.linear_q_up_proj
        if self.linear_q_down_proj is not None:
            assert self.q_layernorm is not None
            hidden = self._norm(self.q_layernorm, self.linear_q_down_proj(hidden))
        assert up is not None
        queries: Tensor = up(hidden, sequence=sequence).unflatten(-1, (-1, self.head_dim))
        return queries

    def _for_heads_of_all_ranks(self, shared: Tensor, sequence: SequenceView | None) -> Tensor:
        """Return what each head reads of all positions, ``[s, b, d]``; its gradient is summed over the heads."""
        if self.group.size() == 1:
            return shared
        if not self._splits_sequence:
            return moves.copy(shared, group=self.group)
        sizes = None if sequence is None else sequence.sizes_to_gather(shared)
        return moves.gather_for_parts(shared, dim=0, group=self.group, sizes=sizes)
