"""One pre-norm transformer layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.config import TransformerConfig
from shardwise.dropout import sharded_dropout
from shardwise.parallel_state import resolve_tensor_model_parallel_group
from shardwise.sharding import balanced_sizes
from shardwise.transformer.attention import KeyValueCache, SelfAttention
from shardwise.transformer.mlp import MLP


def make_norm(config: TransformerConfig) -> nn.Module:
    """The norm that ``config`` names, of width ``hidden_size``.

    Every rank holds its parameters whole. With sequence parallelism each rank sees only a part of the tokens, so their
    gradients are partial sums (``param.sequence_parallel``).
    """
    kind = nn.LayerNorm if config.normalization == "LayerNorm" else nn.RMSNorm
    norm = kind(config.hidden_size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class ResidualDropout(nn.Module):
    """Dropout on the residual stream: the same mask on every rank, or on its shard of the sequence each rank's own.

    With streams of the "global" rule, the mask of the whole sequence is the same at every number of ranks.

    Args:
        p: dropout probability.
        sequence_parallel: whether each rank holds its shard of the sequence.
        group: the ranks that share the sequence.
    """

    def __init__(self, p: float, sequence_parallel: bool, group: ProcessGroup) -> None:
        super().__init__()
        self.p = p
        self.sequence_parallel = sequence_parallel
        self.group = group

    def forward(self, input_: Tensor, *, sequence_length: int | None = None) -> Tensor:
        """``[s, ...]``, or ``[s/t, ...]`` of ``sequence_length`` positions, to the same shape."""
        if self.p == 0.0 or not self.training:
            return input_
        sizes = None if sequence_length is None else balanced_sizes(sequence_length, self.group.size())
        return sharded_dropout(input_, self.p, dim=0 if self.sequence_parallel else None, group=self.group, sizes=sizes)


@dataclass(frozen=True)
class TransformerLayerSpec:
    """What a layer is made of; replace a part to change the model.

    Attributes:
        norm: from the config, a norm.
        attention: from config, layer number (from 1) and group, the attention; called as ``SelfAttention`` is.
        mlp: from config and group, the MLP; called as ``MLP`` is.
    """

    norm: Callable[[TransformerConfig], nn.Module] = make_norm
    attention: Callable[[TransformerConfig, int, ProcessGroup | None], nn.Module] = SelfAttention
    mlp: Callable[[TransformerConfig, ProcessGroup | None], nn.Module] = MLP


class TransformerLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        config: sizes of the model.
        spec: what the layer is made of.
        layer_number: this layer's place in the model, from 1.
        tp_group: tensor-parallel group; the ambient one if None.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerLayerSpec,
        layer_number: int,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = spec.norm(config)
        self.self_attention = spec.attention(config, layer_number, tp_group)
        self.pre_mlp_layernorm = spec.norm(config)
        self.mlp = spec.mlp(config, tp_group)
        self.dropout = ResidualDropout(
            config.hidden_dropout, config.sequence_parallel, resolve_tensor_model_parallel_group(tp_group)
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
        """``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism) to the same; see ``SelfAttention.forward``."""
        attended = self.self_attention(
            self.input_layernorm(hidden),
            attention_mask=attention_mask,
            rotary=rotary,
            cache=cache,
            sequence_length=sequence_length,
        )
        hidden = hidden + self.dropout(attended, sequence_length=sequence_length)
        mixed = self.mlp(self.pre_mlp_layernorm(hidden), sequence_length=sequence_length)
        output: Tensor = hidden + self.dropout(mixed, sequence_length=sequence_length)
        return output
