"""The embedding split over the vocabulary with a low-rank adapter: ``W[i] + scaling * B A[:, i]`` for an id ``i``.

``A`` has a column for each id and is split like ``W``. ``B`` is whole, and its gradient is partial. A rank masks the
sum for ids of other ranks, so the layer's own reduction sums the products too, without further communication.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import init

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamLayout
from shardwise.models.adapters.adapter import Adapter, lengths
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.adapters.lora_layers import LoraLayer
from shardwise.nn import VocabEmbedding, arithmetic_of


class LoraEmbeddingAdapter(Adapter):
    """The two factors for an embedding.

    Attributes:
        r, scaling: rank, and factor of the product.
        lora_embedding_A: ``[r, v/t]``; starts at 0.
        lora_embedding_B: ``[h, r]``; starts normally distributed, as in ``peft``.
        lora_magnitude_vector: with ``use_dora``, ``[h]``; starts as the lengths of the weight's columns.
    """

    def __init__(self, layer: VocabEmbedding, config: LoraConfig) -> None:
        super().__init__(layer, layer.weight, config)
        t, vocabulary = self.group.size(), layer.param_layouts["weight"]
        layout_a = ParamLayout((config.r, layer.num_embeddings), 1, vocabulary.intervals, t, vocabulary.stride)
        layout_b = ParamLayout.replicated((layer.embedding_dim, config.r), t)
        self._make_parameter("lora_embedding_A", layout_a, init.zeros_)
        self._make_parameter("lora_embedding_B", layout_b, init.normal_, partial_gradient=t > 1)
        self.lora_embedding_A: nn.Parameter
        self.lora_embedding_B: nn.Parameter
        if config.use_dora:
            layout_m = ParamLayout.replicated((layer.embedding_dim,), t)
            self._make_parameter("lora_magnitude_vector", layout_m, init.zeros_, partial_gradient=t > 1)
            self.lora_magnitude_vector: nn.Parameter
            with torch.no_grad():
                self.lora_magnitude_vector.copy_(lengths(layer.weight.detach(), 0, self.group))


class LoraEmbedding(LoraLayer, VocabEmbedding):
    """A VocabEmbedding with an adapter; see ``LoraLayer``. There is no dropout, as in ``peft``."""

    weight: Tensor

    @staticmethod
    def add(layer: nn.Module, config: LoraConfig, name: str) -> LoraEmbedding:
        """Add an adapter to an embedding, in place. With ``config.use_dora`` collective over the layer's group.

        Args:
            layer: a VocabEmbedding, or an instance of a subclass.
            config: rank and strength.
            name: name of the adapter.

        Raises:
            ConfigError: the layer has an adapter already, is not a VocabEmbedding, or uses exact arithmetic.
        """
        if isinstance(layer, LoraEmbedding):
            raise ConfigError(f"the layer has adapters already: {', '.join(layer.lora)}; remove them first")
        if not isinstance(layer, VocabEmbedding):
            raise ConfigError(f"a {type(layer).__name__} is no embedding that is split over a vocabulary")
        arithmetic_of(layer.group).refuse(
            "an adapter on the embedding has no exact sums; leave it out, or exact_parts (--exact)"
        )
        result: LoraEmbedding = LoraEmbedding._turn(layer, {name: LoraEmbeddingAdapter(layer, config)}, config)
        return result

    @property
    def _adapter(self) -> LoraEmbeddingAdapter:
        (adapter,) = self.lora.values()
        assert isinstance(adapter, LoraEmbeddingAdapter)
        return adapter

    def _look_up(self, ids: Tensor, weight: Tensor) -> Tensor:
        output = super()._look_up(ids, weight)
        if not self._is_active:
            return output
        adapter = self._adapter
        columns = adapter.lora_embedding_A.t()
        low_rank = columns[ids] if self.deterministic else F.embedding(ids, columns)
        up = (adapter.scaling * adapter.lora_embedding_B.t()).to(output.dtype)
        output = output + low_rank.to(output.dtype) @ up
        return output * self._factors().to(output.dtype) if self.lora_config.use_dora else output

    def _factors(self) -> Tensor:
        """Return ``m / n`` of ``use_dora`` for each column, ``[h]``."""
        with torch.no_grad():
            own = lengths(self.weight + self.delta(), 0, self.group)
        return self._adapter.lora_magnitude_vector / own

    def _scaled(self, weight: Tensor, factors: Tensor) -> Tensor:
        return weight * factors

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Return this rank's part of the adapter's product, ``scaling * (B A)^T``, in fp32 or wider."""
        adapter = self._adapter
        wide = torch.promote_types(adapter.lora_embedding_A.dtype, torch.float32)
        return adapter.scaling * (adapter.lora_embedding_A.t().to(wide) @ adapter.lora_embedding_B.t().to(wide))
