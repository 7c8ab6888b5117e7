"""Rows of a vocabulary's weight that are trained while all others stay: ``trainable_token_indices`` of ``peft``.

A layer multiplies by its weight with the trained rows instead of the frozen ones, so its results are those of a layer
with these rows, at every number of ranks. A rank holds the rows of its ids. An embedding and an output layer that are
tied have the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from shardwise.core.errors import ConfigError
from shardwise.core.validation import on_host
from shardwise.models.adapters.adapter import Adapter, local_places, section_layout
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.adapters.lora_layers import LoraLayer
from shardwise.nn import ColumnLinear, VocabEmbedding, arithmetic_of
from shardwise.nn.linear import LinearPlan
from shardwise.nn.quantization import QuantizedTensor

ROWS = "trainable_tokens_delta"
"""Name of the parameter, which holds whole rows although ``peft`` calls it a difference."""

_NAME = "tokens"


class TrainedRows(Adapter):
    """The trained rows of one weight.

    Attributes:
        trainable_tokens_delta: ``[n/t, h]``, the rows of this rank's ids; starts as those of the weight.
        places: ``[n/t]``, their rows in this rank's part of the weight.
    """

    trainable_tokens_delta: nn.Parameter
    places: Tensor

    def __init__(self, layer: VocabEmbedding | ColumnLinear, ids: Sequence[int], config: LoraConfig) -> None:
        weight = layer.weight
        assert weight is not None
        super().__init__(layer, weight, config)
        whole, rank = layer.param_layouts["weight"], self.group.rank()
        section = on_host(torch.tensor)(list(ids), dtype=torch.int64)
        layout = section_layout(section, whole, weight.size(1))
        places = local_places(section, whole, rank)
        if places is None:
            places = on_host(torch.arange)(whole.local_size(rank))
        self.register_buffer("places", places.to(weight.device), persistent=False)
        # Copies of a tied weight on two stages have copies of its rows.
        self._make_parameter(ROWS, layout, init.zeros_, layer.param_replicas["weight"])
        with torch.no_grad():
            self.trainable_tokens_delta.copy_(weight[self.places])

    def put_into(self, weight: Tensor) -> Tensor:
        """Return this rank's part of the weight with the trained rows; ``weight`` is not modified."""
        return weight.index_copy(0, self.places, self.trainable_tokens_delta.to(weight.dtype))


class TrainedRowsLayer(LoraLayer):
    """Base of layers with trained rows; see ``LoraLayer``."""

    lora_shared: tuple[TrainedRows, ...]
    lora_original_rows: Tensor

    @classmethod
    def _add(cls, layer: VocabEmbedding | ColumnLinear, rows: TrainedRows | Sequence[int], config: LoraConfig) -> None:
        arithmetic_of(layer.group).refuse(
            "rows that are trained alone (trainable_token_indices) have no exact sums; leave them out, or exact_parts "
            "(--exact)"
        )
        if isinstance(layer, LoraLayer):
            raise ConfigError("the layer has adapters already; leave them out, or trainable_token_indices")
        if isinstance(layer.weight, QuantizedTensor):
            raise ConfigError(
                f"the weight is in {layer.weight.kind}, and its rows cannot be trained; load the model with it as it is"
            )
        shared = (rows,) if isinstance(rows, TrainedRows) else ()
        own = {} if isinstance(rows, TrainedRows) else {_NAME: TrainedRows(layer, rows, config)}
        # A tuple, so that the rows of another layer are not parameters of this one, too.
        cls._turn(layer, own, config).lora_shared = shared

    @property
    def trained_rows(self) -> TrainedRows:
        """The layer's rows, or those of the embedding that it is tied to."""
        rows = self.lora_shared[0] if self.lora_shared else self.lora[_NAME]
        assert isinstance(rows, TrainedRows)
        return rows

    def _with_rows(self, weight: Tensor) -> Tensor:
        return self.trained_rows.put_into(weight) if self._is_active else weight

    def remove(self) -> None:
        del self.lora_shared
        super().remove()

    @torch.no_grad()
    def merge_(self) -> None:
        """Copy the trained rows into the weight, in place."""
        if not self.lora_merged and not self.lora_shared:
            rows = self.trained_rows
            self.lora_original_rows = self.weight[rows.places].clone()
            self.weight.copy_(rows.put_into(self.weight))
        self.lora_merged = True

    @torch.no_grad()
    def unmerge_(self) -> None:
        """Copy the rows from before ``merge_`` back."""
        if self.lora_merged and not self.lora_shared:
            self.weight.copy_(self.weight.index_copy(0, self.trained_rows.places, self.lora_original_rows))
            del self.lora_original_rows
        self.lora_merged = False


class TrainedRowsEmbedding(TrainedRowsLayer, VocabEmbedding):
    """A VocabEmbedding with some rows that are trained."""

    weight: Tensor

    @staticmethod
    def add(layer: VocabEmbedding, ids: Sequence[int], config: LoraConfig) -> TrainedRows:
        """Train the rows of ``ids`` of an embedding, in place, and return them; the caller freezes the weight.

        Raises:
            ConfigError: the layer has adapters, or the group uses exact arithmetic.
        """
        TrainedRowsEmbedding._add(layer, ids, config)
        assert isinstance(layer, TrainedRowsEmbedding)
        return layer.trained_rows

    def _look_up(self, ids: Tensor, weight: Tensor) -> Tensor:
        return super()._look_up(ids, self._with_rows(weight))


class TrainedRowsColumn(TrainedRowsLayer, ColumnLinear):
    """An output layer with some rows that are trained."""

    lora_plan: LinearPlan

    @staticmethod
    def add(layer: ColumnLinear, rows: TrainedRows | Sequence[int], config: LoraConfig) -> None:
        """Train rows of an output layer, in place: those of ids, or with a tied weight the rows of the embedding.

        Raises:
            ConfigError: the layer has adapters, is quantised, or the group uses exact arithmetic.
        """
        TrainedRowsColumn._add(layer, rows, config)
        assert isinstance(layer, TrainedRowsColumn)
        layer.lora_plan = layer.plan
        # The gradient of the multiplied weight goes to the rows, through autograd.
        layer.plan = dataclasses.replace(layer.plan, fuse=False, queues=())

    @property
    def is_one_product(self) -> bool:
        return not self._is_active and super().is_one_product

    def remove(self) -> None:
        self.plan = self.lora_plan
        del self.lora_plan
        super().remove()

    def _multiply(self, input_: Tensor, weight: Tensor, *others: Any, **options: Any) -> Tensor:
        return super()._multiply(input_, self._with_rows(weight), *others, **options)
