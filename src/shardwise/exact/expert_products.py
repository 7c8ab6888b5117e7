"""Products of experts whose bits do not depend on which ranks hold which experts.

An expert multiplies the tokens that one micro-batch sends to it in one product, in their order. The number of rows is
rounded up with zeros, because the way in which libraries multiply few rows depends on their number and on that of
threads. So a product has one shape at every layout, and a token has the same output among any others. A rank may hold
an expert for several data-parallel ranks, the *sources* of tokens. Then each source has products and a gradient. On one
rank these gradients are those of different micro-batches, so they are not added here but given to the tree over
micro-batches (``training.gradients.GradientTrees``).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.core.communication.trees import tree_sum
from shardwise.core.typed import computed_locally
from shardwise.exact.products import FewRows, whole_product

# Number of rows of a product, and its beginning in memory, in bytes, are multiples of these.
_ROWS, _BYTES = 16, 64


def linear_by_source(
    input_: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counts: Sequence[Sequence[int]],
    *,
    transposed: bool = False,
    is_counted: bool = True,
) -> Tensor:
    """Multiply each run of rows by one of the matrices of a weight, and add the matrix's bias.

    Args:
        input_: ``[n, i]``: for each source the rows of each matrix, one run after the other.
        weight: ``[e * o, i]``, ``e`` matrices one after the other; ``[e * i, o]`` if ``transposed``.
        bias: ``[e * o]`` or None.
        counts: ``[sources][e]``, number of rows of each run.
        transposed: whether the weight has the transposes of the matrices.
        is_counted: whether the gradients of weight and bias count; otherwise another rank has the same, and they
            are -0.0 here, which changes no bit of a sum.

    Returns:
        ``[n, o]``. In the backward, a weight that has the method ``take_gradient_of_source`` gets the gradients of all
        sources but the first by it; otherwise a tree sums the sources.
    """
    options = counts, transposed, is_counted
    output: Tensor = _LinearBySource.apply(input_, weight, bias, options)
    return output


class _LinearBySource(Function):
    spmd_typecheck = computed_locally("input_", "weight", "bias")

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, bias: Tensor | None, options: Any) -> Tensor:
        counts, transposed, ctx.is_counted = options
        ctx.counts, ctx.transposed, ctx.params = counts, transposed, (weight, bias)
        ctx.save_for_backward(input_)
        matrices = _matrices(weight, len(counts[0]), transposed)
        output, few = input_.new_empty(len(input_), matrices[0].size(1)), FewRows()
        for _, expert, rows in _runs(counts):
            own = whole_product(few.filled(_filled(input_[rows])), matrices[expert])[: rows.stop - rows.start]
            output[rows] = own if bias is None else own + bias.view(len(matrices), -1)[expert]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (input_,) = ctx.saved_tensors
        (weight, bias), counts, transposed = ctx.params, ctx.counts, ctx.transposed
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        num, of_input = len(counts[0]), None
        if needs_input:
            matrices, of_input = _matrices(weight, num, transposed), torch.empty_like(input_)
            for _, expert, rows in _runs(counts):
                product = whole_product(_filled(grad[rows]), matrices[expert].t())
                of_input[rows] = product[: rows.stop - rows.start]
        terms: list[list[Tensor]] = []
        for param, needed in ((weight, needs_weight), (bias, needs_bias)):
            is_empty = not needed or not ctx.is_counted
            terms.append([] if is_empty else [torch.zeros_like(param) for _ in counts])
        for source, expert, rows in _runs(counts):
            if terms[0]:
                left, right = (input_, grad) if transposed else (grad, input_)
                own = terms[0][source].unflatten(0, (num, -1))[expert]
                own.copy_(whole_product(_filled(left[rows]).t(), _filled(right[rows])))
            if terms[1]:
                terms[1][source].view(num, -1)[expert].copy_(grad[rows].contiguous().sum(dim=0))
        return (
            of_input,
            _first_source_gradient(weight, terms[0]) if needs_weight else None,
            _first_source_gradient(bias, terms[1]) if needs_bias else None,
            None,
        )


def _first_source_gradient(param: Tensor, terms: Sequence[Tensor]) -> Tensor:
    """Give the gradients of all sources but the first to those who sum them, and return the rest of the gradient."""
    if not terms:
        return torch.full_like(param, -0.0)
    take = getattr(param, "take_gradient_of_source", None)
    if take is None:
        return tree_sum(terms)
    for source, term in enumerate(terms[1:], 1):
        take(term, source=source)
    return terms[0]


def _runs(counts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, slice]]:
    """Yield source, number of the matrix, and rows of each run that has any."""
    start = 0
    for source, of_source in enumerate(counts):
        for expert, count in enumerate(of_source):
            if count:
                yield source, expert, slice(start, start + count)
            start += count


def _matrices(weight: Tensor, num: int, transposed: bool) -> list[Tensor]:
    """Return the right factors ``[i, o]``, which begin in memory as they would on every other rank."""
    each = weight.detach().unflatten(0, (num, -1)).unbind()
    placed = [one.clone() if one.storage_offset() * one.itemsize % _BYTES else one for one in each]
    return placed if transposed else [one.t() for one in placed]


def _filled(rows: Tensor) -> Tensor:
    """Copy rows to a matrix whose number of rows is a multiple of ``_ROWS``, with zeros in the others."""
    filled = rows.new_zeros(-(-len(rows) // _ROWS) * _ROWS, rows.size(1))
    filled[: len(rows)] = rows
    return filled
