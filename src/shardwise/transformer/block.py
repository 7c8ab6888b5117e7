"""The stack of transformer layers and the norm after it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.config import TransformerConfig
from shardwise.transformer.attention import KeyValueCache
from shardwise.transformer.layer import TransformerLayer, TransformerLayerSpec


class TransformerBlock(nn.Module):
    """All layers, then a norm.

    Args:
        config: sizes of the model.
        spec: what a layer is made of.
        tp_group: tensor-parallel group; the ambient one if None.
    """

    def __init__(
        self, config: TransformerConfig, spec: TransformerLayerSpec, tp_group: ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerLayer(config, spec, number, tp_group) for number in range(1, config.num_layers + 1)
        )
        self.final_layernorm = spec.norm(config)

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
        for layer in self.layers:
            hidden = layer(
                hidden, attention_mask=attention_mask, rotary=rotary, cache=cache, sequence_length=sequence_length
            )
        output: Tensor = self.final_layernorm(hidden)
        return output
