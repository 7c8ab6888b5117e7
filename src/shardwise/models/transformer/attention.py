"""Self-attention whose heads are split over the tensor-parallel group."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.core.layout import Layout
from shardwise.core.sequence_view import SequenceView
from shardwise.kernels.elementwise import split
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.attention_kernels import AT_POSITION
from shardwise.models.transformer.core_attention import CoreAttention
from shardwise.models.transformer.heads import HeadSplit, split_heads
from shardwise.models.transformer.masks import AttnMaskType
from shardwise.models.transformer.mlp import layer_arguments, make_norm
from shardwise.nn import ColumnLinear, HeadsRMSNorm, RowLinear, arithmetic_of, parameter_device
from shardwise.nn.replicated import set_replicas_


class SelfAttention(CoreAttention):
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
        keys_are_values: whether values are keys before norm and rotation; blocks of the weight then end with the key.
        q_layernorm, k_layernorm: with ``config.qk_layernorm``, norms of each head, or of all heads together. Every rank
            holds the whole norms and applies them to its heads, so their gradients are partial sums, with and without
            sequence parallelism, except with ``config.exact_parts``.

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
        if config.latent is not None:
            raise ConfigError("SelfAttention has no latents, and config.latent is set; use LatentSelfAttention")
        group = tp_group
        num_heads, num_groups, head_dim = config.heads_of(layer_number)
        split = split_heads(num_heads, num_groups, group.size())
        super().__init__(config, layer_number, split, group, attn_mask_type)
        arithmetic = arithmetic_of(group)
        if arithmetic.context is not None and num_groups % (group.size() * arithmetic.context.size()):
            arithmetic.refuse(
                f"exact: num_query_groups is {num_groups}, and tp {group.size()} x cp {arithmetic.context.size()} "
                "ranks share the key-value heads equally; use numbers of ranks whose product divides it"
            )
        if num_groups < group.size():
            arithmetic.refuse(
                f"exact: num_query_groups is {num_groups}, fewer than the {group.size()} tensor-parallel ranks, which "
                "hold copies of key-value heads, and the sum of their gradients has no exact form; use "
                f"tp {1 << num_groups.bit_length() - 1} at most, or no exact mode"
            )
        self.keys_are_values = config.keys_are_values(layer_number)
        layout = split.qkv_layout((config.hidden_size,), head_dim, has_values=not self.keys_are_values)
        arguments = layer_arguments(config, group=group)
        self.linear_qkv = ColumnLinear(
            config.hidden_size,
            layout.global_shape[0],
            bias=config.add_qkv_bias,
            init=config.init_method,
            intervals=layout.intervals,
            **arguments,
        )
        self._clip = config.clip_qkv
        self._value_eps = config.layernorm_epsilon if config.value_layernorm else None
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if config.qk_layernorm:
            with parameter_device(group, on_cpu=config.use_cpu_initialization):
                self.q_layernorm, self.k_layernorm = self._make_norms(config, split)
            for norm in (self.q_layernorm, self.k_layernorm):
                set_replicas_(norm, self._norm.replicas(applied_apart=group.size() > 1))
        self.linear_proj = RowLinear(
            num_heads * head_dim,
            config.hidden_size,
            bias=bool(config.attention_bias),
            init=config.output_layer_init_method,
            sizes=[n * head_dim for n in self._head_sizes],
            **arguments,
        )

    @property
    def input_layout(self) -> Layout:
        """Layout of hidden states, I or V(dim=0)."""
        return self.linear_qkv.input_layout

    def _make_norms(self, config: ModelConfig, split: HeadSplit) -> tuple[nn.Module, nn.Module]:
        rank, head_dim = self.group.rank(), self.head_dim
        if not config.qk_layernorm_over_heads:
            return make_norm(config, head_dim), make_norm(config, head_dim)
        options: dict[str, Any] = {
            "eps": config.layernorm_epsilon,
            "zero_centered": config.layernorm_zero_centered_gamma,
            "dtype": config.params_dtype,
        }
        num_heads, num_groups, _ = config.heads_of(self.layer_number)
        queries, keys = split.queries[rank], split.groups[rank]
        return (
            HeadsRMSNorm(num_heads * head_dim, queries, queries[1] - queries[0], head_dim, **options),
            HeadsRMSNorm(num_groups * head_dim, keys, split.num_first_groups(rank), head_dim, **options),
        )

    def _project(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None, sequence: SequenceView | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.split_projection(self.linear_qkv(hidden, sequence=sequence), rotary)

    def split_projection(self, mixed: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split ``[s, b, rows/t]`` into ``[s, b, heads/t, d]`` and two ``[s, b, groups/t, d]``.

        They are normed, clipped and rotated, in this order.
        """
        s, b, _ = mixed.shape
        per_group, head_dim, interleaved = self.local_heads.queries_of_groups[0], self.head_dim, self.rotary_interleaved
        is_plain = self.q_layernorm is None and self._clip is None and self._value_eps is None
        is_fused = self.local_heads.is_even and not self.keys_are_values
        if is_fused and is_plain and rotary is not None:
            return self._activation.split_and_rotate(
                mixed, *rotary, queries_per_group=per_group, head_dim=head_dim, interleaved=interleaved
            )
        if is_fused:
            query, key, value = split(mixed, queries_per_group=per_group, head_dim=head_dim)
        else:
            shared = (1,) if self.keys_are_values else (1, 1)
            sections = [n for queries in self.local_heads.queries_of_groups for n in (queries, *shared)]
            parts = mixed.view(s, b, -1, head_dim).split(sections, dim=2)
            step = 1 + len(shared)
            query, key, value = (torch.cat(parts[i::step], dim=2) for i in (0, 1, len(shared)))
        if self._value_eps is not None:
            value = _normed(value, self._value_eps)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self._norm.heads(self.q_layernorm, self.k_layernorm, query, key)
        if self._clip is not None:
            query, key, value = (x.clamp(-self._clip, self._clip) for x in (query, key, value))
        if rotary is not None:
            query, key = (self._activation.rotate(x, *rotary, interleaved=interleaved) for x in (query, key))
        return query, key, value

    @property
    def attends_at_position(self) -> bool:
        """True if this attention supports ``AttentionMask.query_position``."""
        is_usual = type(self) is SelfAttention and self.local_heads.is_even and self.attn_mask_type.is_causal
        return is_usual and AT_POSITION in self._kernels


def _normed(heads: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm without a weight to ``[..., d]``, by operations whose bits do not depend on the number of rows."""
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(heads.dtype)
