"""Products of a linear layer whose bits do not depend on the number of ranks that share the layer.

A summed dimension is cut into the layer's parts. Each part is one product, and a tree adds the products
(``core.communication.trees``). A dimension that is not summed may be cut anywhere, because a matrix product computes
each element in an order that depends only on the summed dimension. This holds for wide matrices. Libraries multiply
narrow matrices in another way, so in such a dimension narrow parts are one product each too.

The whole layer, never this rank's shard, determines which library multiplies and whether parts are separate products.
Large products, also of gradients, use oneDNN: on AMD processors it was observed to have all these properties, and is up
to twice as fast as MKL. Parts that are too small for oneDNN are multiplied in one call (``torch.bmm``). On Intel
processors all sizes of a product affect the order in which it sums an element, so each part is a separate product.
Where the number of threads affects that order in MKL (``products.sums_by_threads``), oneDNN multiplies small matrices
too.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.trees import tree_sum, tree_sum_stacked_
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import Interval, LocalParts
from shardwise.exact.context_terms import gathered, own_columns
from shardwise.kernels import products
from shardwise.kernels.products import OwnProducts, Products

# MKL multiplies matrices of up to about 10 columns differently from wider ones.
_NARROW = 16
_BY_ROWS = torch.contiguous_format
USUAL_ROWS = 256
"""Number of rows for which libraries and kernels are chosen, because a row must not depend on the number of others."""


@dataclass(eq=False)
class FewRows:
    """Pads products of few rows, which libraries multiply in another way than many.

    Attributes:
        least: smallest number of rows at which the bits of a row no longer depend on it. This number is enough on
            all processors that were tried; ``run.exact.row_trials`` finds a smaller one.
    """

    least: int = 32

    def filled(self, rows: Tensor) -> Tensor:
        """Append zeros to ``[n, i]`` if there are fewer than ``least`` rows."""
        return F.pad(rows, (0, 0, 0, self.least - len(rows))) if len(rows) < self.least else rows


@dataclass(frozen=True)
class ExactProducts(OwnProducts):
    """The products of a layer whose weight has one dimension split into parts.

    Attributes:
        parts: this rank's parts of the split dimension.
        split: dimension of the weight that is split: ``"output"`` or ``"input"`` features.
        size: size of the split dimension, over all ranks.
        num_parts: number of parts, over all ranks.
        is_narrow: whether the other dimension is narrow; then every part is a separate product everywhere.
        context: ranks that share the positions of a sample, or None. Each computes the gradients of some of the parts
            from all positions (``exact.context_terms``); elsewhere its gradients are -0.0.
        few: how a product of few rows is padded.
    """

    parts: LocalParts
    split: Literal["output", "input"]
    size: int
    num_parts: int
    is_narrow: bool = False
    context: ProcessGroup | None = None
    few: FewRows = field(default_factory=FewRows, compare=False)

    def _runs(self, factor: Tensor) -> list[slice] | None:
        """Return the parts of a split dimension that is not summed; None if one product with ``factor`` covers all."""
        # Part sizes differ by at most one, and no rank sees all of them.
        is_wide = not self.is_narrow and self.size // (len(self.parts[0]) * self.num_parts) >= _NARROW
        if is_wide and not products.sums_by_shape(factor):
            return None
        return [slice(*interval) for interval in self._intervals]

    @cached_property
    def _intervals(self) -> list[Interval]:
        return sorted(interval for part in self.parts for interval in part)

    def aligned(self, input_: Tensor, weight: Tensor) -> Products:
        return self

    def in_dtype(self, dtype: torch.dtype) -> Products:
        raise ConfigError(
            f"output_dtype is {dtype}, and the group's sums are exact, whose outputs have the input's dtype; leave "
            "output_dtype out, or cast the output"
        )

    def linear(self, input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = input_.reshape(input_.shape[:-1].numel(), input_.size(-1))
        output = self._linear(self.few.filled(rows), weight, bias)[: len(rows)]
        return output.view(*input_.shape[:-1], output.size(-1))

    def _linear(self, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.split == "input":
            output = self._sum(input_, weight.t(), usual_rows=USUAL_ROWS)
            return output if bias is None else output.add_(bias)
        runs = self._runs(weight)
        if runs is None:
            return self._multiply(input_, weight, bias)
        return torch.cat([F.linear(input_, weight[run], None if bias is None else bias[run]) for run in runs], -1)

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        if self.split == "output":
            return self._sum(grad_output, weight)
        runs = self._runs(weight)
        if runs is None:
            return self._multiply(grad_output, weight.t())
        return torch.cat([_product(grad_output, weight[:, run], _needs_onednn(weight)) for run in runs], -1)

    def weight_gradient(self, grad_output: Tensor, input_: Tensor) -> Tensor:
        if self.context is not None:
            split, other = (grad_output, input_) if self.split == "output" else (input_, grad_output)
            own, rows = self._own_columns(split), gathered(other, group=self.context)
            factors = (own, rows) if self.split == "output" else (rows, own)
            dim = 0 if self.split == "output" else 1
            return self._among_others(self._share.weight_gradient(*factors), split.size(1), dim)
        runs = self._runs(input_)
        if runs is None:
            return self._weight_gradient(grad_output.contiguous(), input_.contiguous())
        if self.split == "output":
            return torch.cat([_product(grad_output[:, run].t(), input_, _needs_onednn(input_)) for run in runs], 0)
        return torch.cat([_product(grad_output.t(), input_[:, run], _needs_onednn(input_)) for run in runs], 1)

    def bias_gradient(self, grad_output: Tensor) -> Tensor:
        """Sum each column of ``[n, o]``, part by part of a split output."""
        if self.context is not None:
            own = self._share.bias_gradient(self._own_columns(grad_output))
            return self._among_others(own, grad_output.size(1), 0)
        return torch.cat([grad_output[:, start:stop].sum(dim=0) for start, stop in self._intervals])

    @cached_property
    def _columns(self) -> list[list[Interval]]:
        """The columns of a split dimension for which each context-parallel rank computes gradients."""
        assert self.context is not None
        each = len(self.parts) // self.context.size()
        shares = (self.parts[first : first + each] for first in range(0, len(self.parts), each))
        return [sorted(interval for part in share for interval in part) for share in shares]

    @cached_property
    def _share(self) -> "ExactProducts":
        """The products of this rank's columns at all positions."""
        assert self.context is not None
        each, start, places = len(self.parts) // self.context.size(), 0, {}
        for low, high in self._columns[self.context.rank()]:
            places[low, high] = (start, start + high - low)
            start += high - low
        own = self.parts[self.context.rank() * each :][:each]
        parts = tuple(tuple(places[interval] for interval in part) for part in own)
        return dataclasses.replace(self, parts=parts, context=None)

    def _own_columns(self, rows: Tensor) -> Tensor:
        assert self.context is not None
        return own_columns(rows, self._columns, group=self.context)

    def _among_others(self, own: Tensor, size: int, dim: int) -> Tensor:
        """Return a gradient with this rank's columns, and -0.0 in those of other context-parallel ranks."""
        assert self.context is not None
        shape = list(own.shape)
        shape[dim] = size
        result, columns = own.new_full(shape, -0.0), self._columns[self.context.rank()]
        sections = own.split([stop - start for start, stop in columns], dim)
        for (start, stop), section in zip(columns, sections, strict=True):
            result.narrow(dim, start, stop - start).copy_(section)
        return result

    @property
    def _num_shares(self) -> int:
        """Number of ranks that share the rows; the rows of all of them decide which library multiplies."""
        return 1 if self.context is None else self.context.size()

    def _sum(self, left: Tensor, right: Tensor, *, usual_rows: int | None = None) -> Tensor:
        """Compute ``left @ right`` by parts and add them by the tree: ``[..., k]`` and ``[k, m]`` to ``[..., m]``.

        ``usual_rows`` chooses the library; None means the number of rows of all context-parallel ranks.
        """
        rows = left.reshape(left.shape[:-1].numel(), left.size(-1))
        # Choose by the largest part, since no rank sees all parts.
        length, rest = divmod(self.size, len(self.parts[0]) * self.num_parts)
        size = (usual_rows or self._num_shares * rows.size(0)) * (length + (rest > 0)) * right.size(1)
        onednn = products.prefers_onednn(rows[:0], right[:0], size)
        if rest == 0 and not self.is_narrow and rows.is_cpu and rows.dtype == torch.float32 and not onednn:
            total = self._sum_in_one_call(rows, right)
        else:
            terms = []
            for part in self.parts:
                factors = ((rows[:, start:stop], right[start:stop]) for start, stop in part)
                if self.is_narrow:
                    # The addresses and row strides of the factors affect how a library multiplies them.
                    factors = (
                        (left.clone(memory_format=_BY_ROWS), right.clone(memory_format=_BY_ROWS))
                        for left, right in factors
                    )
                first, *others = (_product(*each, onednn or _needs_onednn(rows)) for each in factors)
                for other in others:
                    first.add_(other)
                terms.append(first)
            total = tree_sum(terms, may_overwrite=True)
        return total.view(*left.shape[:-1], right.size(1))

    def _sum_in_one_call(self, rows: Tensor, right: Tensor) -> Tensor:
        """Compute ``_sum`` of parts of one size; each has the same bits as in a separate product."""
        total: Tensor | None = None
        for section in zip(*self.parts, strict=True):
            (start, stop), last = section[0], section[-1][1]
            by_part = rows[:, start:last].unflatten(1, (-1, stop - start)).transpose(0, 1)
            factors = by_part, right[start:last].unflatten(0, (-1, stop - start))
            total = torch.bmm(*factors) if total is None else total.baddbmm_(*factors)
        assert total is not None
        return tree_sum_stacked_(total)

    def _multiply(self, input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``input_ @ weight.T + bias`` with the library that suits the whole layer's product."""
        input_ = input_.contiguous()
        if products.prefers_onednn(input_, weight, self._num_shares * input_.numel() * self.size) or _needs_onednn(
            weight
        ):
            return products.onednn_linear(input_, weight, bias)
        return F.linear(input_, weight, bias)

    def _weight_gradient(self, grad_output: Tensor, input_: Tensor) -> Tensor:
        """Compute ``grad_output.T @ input_`` of contiguous factors with the library that suits the whole product."""
        whole = input_ if self.split == "output" else grad_output
        size = whole.numel() * self.size
        if products.prefers_onednn(input_.t(), grad_output.t(), size) or _needs_onednn(input_):
            return products.onednn_linear(grad_output.t(), input_.t(), None)
        return grad_output.t() @ input_


def whole_product(left: Tensor, right: Tensor) -> Tensor:
    """Compute ``left @ right``, ``[n, k]`` and ``[k, m]``, in one product, by the library that suits its size."""
    onednn = products.prefers_onednn(left[:0], right[:0], left.numel() * right.size(1))
    return _product(left, right, onednn or _needs_onednn(left))


def _product(left: Tensor, right: Tensor, onednn: bool) -> Tensor:
    if not onednn:
        return left @ right
    right = right.t()
    # oneDNN may use its slow reference code for a matrix that is neither row-major nor column-major.
    return products.onednn_linear(left, right if right.t().is_contiguous() else right.contiguous(), None)


def _needs_onednn(factor: Tensor) -> bool:
    return products.sums_by_threads(factor) and products.why_not_onednn() is None
