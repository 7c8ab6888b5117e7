"""AdamW whose update of an element has the same bits however parameters are split."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.core.sharding import ParamLayout
from shardwise.nn import named_param_layouts
from shardwise.training.optimizer.adamw import AdamW, Tensors

# The fused kernel updates the last elements of a tensor, less than a vector, one by one, and rounds them differently.
VECTOR = 16


class ExactAdamW(AdamW):
    """AdamW whose update of an element has the same bits however parameters are split.

    PyTorch's operations compute every step: fused ones only the parameters whose parts are whole vectors.
    """

    scales_gradients = False

    def __init__(self, model: nn.Module, *, parts: int, **options: Any) -> None:
        self._num_parts = parts
        super().__init__(model, **options)

    def _divided(self, groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        layouts = [(param, layout) for _, param, layout in named_param_layouts(model, 1)]
        whole = {param for param, layout in layouts if _has_whole_vectors(layout, self._num_parts)}
        return [
            group | {"params": [each for each in group["params"] if (each in whole) is fused]} | options
            for group in groups
            for fused, options in ((True, {}), (False, {"fused": False}))
        ]

    def _batches(self, group: dict[str, Any]) -> Iterator[tuple[dict[str, Any], torch.dtype | None, list[Tensors]]]:
        return iter(())


def _has_whole_vectors(layout: ParamLayout, parts: int) -> bool:
    """True if each part of the parameter consists of whole vectors, at every layout."""
    if layout.dim is None:
        return True
    sections = parts * layout.stride
    return layout.global_shape[layout.dim] % sections == 0 and math.prod(layout.global_shape) // sections % VECTOR == 0
