"""The products of a linear layer whose bits do not depend on how many ranks share it.

A dimension that is summed is cut into the layer's parts, each a product of its own, and the products are summed by a
tree (``communication.trees``). A dimension that is not summed may be cut anywhere: a matrix product computes each
element by itself, in an order that depends on the summed dimension alone. That holds for wide matrices; a narrow one
goes another way through the library, so where parts are narrow each is its own product there too.

Which library multiplies, and whether parts go by themselves, follows from the whole layer, and never from this rank's
shard of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.communication.trees import tree_sum
from shardwise.kernels import products
from shardwise.sharding import Interval, LocalParts

# MKL multiplies matrices of up to about 10 columns otherwise than wider ones.
_NARROW = 16


@dataclass(frozen=True)
class ExactProducts:
    """The products of a layer of which one dimension is split into parts.

    Attributes:
        parts: this rank's parts of the split dimension.
        split: which of the weight's dimensions it is: ``"output"`` features, or ``"input"``.
        size: of the split dimension, over all ranks.
        num_parts: over all ranks.
    """

    parts: LocalParts
    split: Literal["output", "input"]
    size: int
    num_parts: int

    @cached_property
    def _runs(self) -> list[slice] | None:
        """What is a product of its own along the split dimension where it is not summed; None if that is all of it."""
        # Sizes of parts differ by one at most, and no rank sees all of them.
        if self.size // (len(self.parts[0]) * self.num_parts) >= _NARROW:
            return None
        return [slice(*interval) for interval in self._intervals]

    @cached_property
    def _intervals(self) -> list[Interval]:
        return sorted(interval for part in self.parts for interval in part)

    def linear(self, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``input_ @ weight.T + bias``: ``[..., i]`` and ``[o, i]`` to ``[..., o]``."""
        if self.split == "input":
            output = self._sum(lambda part: F.linear(input_[..., part], weight[:, part]))
            return output if bias is None else output.add_(bias)
        if self._runs is None:
            return self._multiply(input_, weight, bias)
        return torch.cat([F.linear(input_, weight[run], None if bias is None else bias[run]) for run in self._runs], -1)

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """``grad_output @ weight``: ``[..., o]`` and ``[o, i]`` to ``[..., i]``."""
        if self.split == "output":
            return self._sum(lambda part: grad_output[..., part] @ weight[part])
        if self._runs is None:
            return self._multiply(grad_output, weight.t())
        return torch.cat([grad_output @ weight[:, run] for run in self._runs], -1)

    def weight_gradient(self, grad_output: Tensor, input_: Tensor) -> Tensor:
        """``grad_output.T @ input_``: ``[n, o]`` and ``[n, i]`` to ``[o, i]``."""
        if self._runs is None:
            return grad_output.t() @ input_
        if self.split == "output":
            return torch.cat([grad_output[:, run].t() @ input_ for run in self._runs], 0)
        return torch.cat([grad_output.t() @ input_[:, run] for run in self._runs], 1)

    def bias_gradient(self, grad_output: Tensor) -> Tensor:
        """The sums of the columns of ``[n, o]``, where the output is split; each part's by itself."""
        return torch.cat([grad_output[:, start:stop].sum(dim=0) for start, stop in self._intervals])

    def _sum(self, product: Callable[[slice], Tensor]) -> Tensor:
        """The tree over the parts; of a part of several sections their products one after the other."""
        terms = []
        for part in self.parts:
            first, *others = (product(slice(*interval)) for interval in part)
            for other in others:
                first.add_(other)
            terms.append(first)
        return tree_sum(terms)

    def _multiply(self, input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``input_ @ weight.T + bias``, by the library that the whole layer's product is for."""
        input_ = input_.contiguous()
        if products.prefers_onednn(input_, weight, input_.numel() * self.size):
            return products.onednn_linear(input_, weight, bias)
        return F.linear(input_, weight, bias)
