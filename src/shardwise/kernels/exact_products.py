"""The products of a linear layer whose bits do not depend on how many ranks share it.

A dimension that is summed is cut into the layer's parts, each a product of its own, and the products are summed by a
tree (``communication.trees``). A dimension that is not summed may be cut anywhere: a matrix product computes each
element by itself, in an order that depends on the summed dimension alone. That holds for wide matrices; a narrow one
goes another way through the library, so where parts are narrow each is its own product there too.

Which library multiplies, and whether parts go by themselves, follows from the whole layer, and never from this rank's
shard of it. Large products are oneDNN's, those of gradients too: it was seen to keep all of this on AMD's processors,
and is up to twice as fast as MKL there. Parts that are too small for it are multiplied in one call (``torch.bmm``).
"""

from __future__ import annotations

from collections.abc import Sequence
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
            output = self._sum(input_, weight.t())
            return output if bias is None else output.add_(bias)
        if self._runs is None:
            return self._multiply(input_, weight, bias)
        return torch.cat([F.linear(input_, weight[run], None if bias is None else bias[run]) for run in self._runs], -1)

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """``grad_output @ weight``: ``[..., o]`` and ``[o, i]`` to ``[..., i]``."""
        if self.split == "output":
            return self._sum(grad_output, weight)
        if self._runs is None:
            return self._multiply(grad_output, weight.t())
        return torch.cat([grad_output @ weight[:, run] for run in self._runs], -1)

    def weight_gradient(self, grad_output: Tensor, input_: Tensor) -> Tensor:
        """``grad_output.T @ input_``: ``[n, o]`` and ``[n, i]`` to ``[o, i]``."""
        if self._runs is None:
            return self._weight_gradient(grad_output.contiguous(), input_.contiguous())
        if self.split == "output":
            return torch.cat([grad_output[:, run].t() @ input_ for run in self._runs], 0)
        return torch.cat([grad_output.t() @ input_[:, run] for run in self._runs], 1)

    def bias_gradient(self, grad_output: Tensor) -> Tensor:
        """The sums of the columns of ``[n, o]``, where the output is split; each part's by itself."""
        return torch.cat([grad_output[:, start:stop].sum(dim=0) for start, stop in self._intervals])

    def _sum(self, left: Tensor, right: Tensor) -> Tensor:
        """``left @ right`` by parts: ``[..., k]`` and ``[k, m]`` to ``[..., m]``.

        Each part is a product of its own, of a part of several sections one after the other, and the tree adds them.
        """
        rows = left.reshape(left.shape[:-1].numel(), left.size(-1))
        first, *others = (self._products(rows, right, section) for section in zip(*self.parts, strict=True))
        for other in others:
            for term, addend in zip(first, other, strict=True):
                term.add_(addend)
        return tree_sum(first, may_overwrite=True).view(*left.shape[:-1], right.size(1))

    def _products(self, rows: Tensor, right: Tensor, section: Sequence[Interval]) -> list[Tensor]:
        """The product of each of the intervals, which follow one another."""
        (start, stop), last = section[0], section[-1][1]
        # The largest part, as no rank sees all of them.
        length = -(-self.size // (len(self.parts[0]) * self.num_parts))
        if products.prefers_onednn(rows[:0], right[:0], rows.size(0) * length * right.size(1)):
            return [
                products.onednn_linear(rows[:, start:stop], _lying_evenly(right[start:stop].t()), None)
                for start, stop in section
            ]
        if rows.dtype == torch.float32 and rows.is_cpu and self.size % (len(self.parts[0]) * self.num_parts) == 0:
            # One call for all of them, each of which has the bits that it has alone.
            by_part = rows[:, start:last].unflatten(1, (-1, stop - start)).transpose(0, 1)
            return list(torch.bmm(by_part, right[start:last].unflatten(0, (-1, stop - start))).unbind())
        return [rows[:, start:stop] @ right[start:stop] for start, stop in section]

    def _multiply(self, input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``input_ @ weight.T + bias``, by the library that the whole layer's product is for."""
        input_ = input_.contiguous()
        if products.prefers_onednn(input_, weight, input_.numel() * self.size):
            return products.onednn_linear(input_, weight, bias)
        return F.linear(input_, weight, bias)

    def _weight_gradient(self, grad_output: Tensor, input_: Tensor) -> Tensor:
        """``grad_output.T @ input_`` of contiguous factors, by the library that the whole layer's product is for."""
        whole = input_ if self.split == "output" else grad_output
        if products.prefers_onednn(input_.t(), grad_output.t(), whole.numel() * self.size):
            return products.onednn_linear(grad_output.t(), input_.t(), None)
        return grad_output.t() @ input_


def _lying_evenly(matrix: Tensor) -> Tensor:
    """Where a matrix lies neither by rows nor by columns oneDNN may have no code but its slow reference."""
    return matrix if matrix.t().is_contiguous() else matrix.contiguous()
