"""The linear loss that keeps this rank's logits, with three matrix products, and the parts that both plans share.

One pass overwrites the logits with their exponentials ``E = exp(y - m_r)``, before the other ranks' statistics arrive.
The softmax over the whole vocabulary is then ``ρ E`` with one ``ρ = exp(m_r - M) / S`` for each token, so that both
gradients are products with ``E`` and numbers per token:

- hidden: ``ρ (E W) + a W[target]``, where the product overlaps with the gather of the statistics;
- weight: ``Eᵀ (g ρ hidden)`` for any incoming gradient ``g``, with ``a / ρ`` in the target's column of ``E``.

``a`` is the gradient in the target's column, which is known to full precision only with the loss. If ``ρ`` is so small
that ``a / ρ`` might overflow, a floor replaces ``ρ``: the rest of such a row is below the rounding of the result.

With a softcap ``E`` is multiplied by its slope. Label smoothing subtracts ``rest`` from every column. Without a softcap
``rest`` is the same for all columns, so a sum of the weight's rows, or of the hidden states, is enough. With both, and
in fp16, where ``a / ρ`` may overflow, the loss waits for the statistics, and overwrites the logits with the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import (
    all_gather,
    all_gather_async,
    all_reduce_async,
    reduce_scatter_async,
)
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.layout import I, V, hidden_layout
from shardwise.core.sharding import Interval
from shardwise.core.typed import check_move
from shardwise.kernels import products
from shardwise.kernels.dispatch import loss_kernels
from shardwise.kernels.loss_reference import compute_dtype, row_blocks
from shardwise.kernels.products import add_product_, main_grad_of, placeholder
from shardwise.nn.loss.options import LossChecks, LossOptions
from shardwise.nn.loss.vocabulary import Combined, combine


@dataclass(frozen=True)
class Head:
    """An output layer and its loss, without the tensors.

    Attributes:
        ranges: every rank's ids.
        sequence_parallel: whether hidden states are a shard of the tokens.
        sizes: each rank's number of tokens with sequence parallelism; None if equal.
        main_grad_weight: parameter whose ``main_grad`` receives the weight gradient; None to return the gradient.
        group: the ranks that split the vocabulary.
    """

    ranges: Sequence[Interval]
    options: LossOptions
    sequence_parallel: bool
    sizes: Sequence[int] | None
    main_grad_weight: Tensor | None
    checks: LossChecks
    group: ProcessGroup

    @property
    def own_ids(self) -> Interval:
        """This rank's ids."""
        return self.ranges[self.group.rank()]

    @property
    def num_valid(self) -> int:
        """Number of this rank's columns without padding."""
        start, stop = self.own_ids
        return stop - start

    def gathered(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all tokens, ``[n, h]``."""
        if not self.sequence_parallel:
            return hidden
        return all_gather(hidden, group=self.group, dim=0, sizes=self.sizes)

    def start_reduction(self, grad_hidden: Tensor) -> Pending:
        """Start the sum of the hidden gradient over the ranks; each rank gets the part of its hidden states."""
        if self.sequence_parallel:
            return reduce_scatter_async(grad_hidden, group=self.group, dim=0, sizes=self.sizes)
        return all_reduce_async(grad_hidden, group=self.group, may_overwrite=True)

    def start_gather(self, own: Tensor, ignored: Tensor) -> Pending:
        """Start the gather of all ranks' statistics, the loss's one collective; marks ignored tokens in ``own``."""
        self.checks.mark_ignored_(own, ignored, self.group)
        return all_gather_async(own.unsqueeze(0), group=self.group, dim=0)

    def combined(
        self, every: Tensor, target: Tensor, ignored: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Combined:
        """Compute the loss and the numbers of its gradient from every rank's statistics."""

        # Recomputed, because the logits were overwritten or freed.
        def row_of(token: int) -> Tensor:
            return F.linear(hidden[token], weight, bias)[: self.num_valid]

        self.checks.run(every, row_of, target, ignored, self.own_ids, self.group)
        return combine(every, self.ranges, ignored, self.options)

    def target_slope(self, own: Tensor) -> Tensor:
        """Return ``dy/dx`` at the target's logit, from this rank's statistics; arbitrary if it has no target."""
        slope = torch.ones_like(own[:, 0])
        if self.options.softcap is not None:
            capped = (own[:, 2] + own[:, 0]) * (self.options.temperature / self.options.softcap)
            slope = 1.0 - capped.square()
        return slope / self.options.temperature


def check_layouts(
    outputs: Any,
    *,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    target_local: Tensor,
    ignored: Tensor,
    head: Head,
) -> None:
    """Check the layouts of a linear loss under ``spmd_types``."""
    ids = {"target": target, "target_local": target_local, "ignored": ignored}
    outside = hidden_layout(sequence_parallel=head.sequence_parallel)
    check_move(outputs, head.group, I, (hidden, outside), (weight, V(dim=0)), (bias, V(dim=0)), **ids)


def times_rows(matrix: Tensor, factor: Tensor) -> Tensor:
    """Multiply each row of ``matrix`` by its factor, in the factor's dtype, and round once."""
    result = torch.empty_like(matrix)
    for rows in row_blocks(matrix):
        result[rows] = matrix[rows] * factor[rows].unsqueeze(1)
    return result


def sum_of_rows(matrix: Tensor, factor: Tensor) -> Tensor:
    """Return ``Σ matrix[n] · factor[n]`` over the rows, in the factor's dtype."""
    total = factor.new_zeros(matrix.size(1))
    for rows in row_blocks(matrix):
        total = total + (matrix[rows] * factor[rows].unsqueeze(1)).sum(dim=0)
    return total


def finished_hidden_gradient(
    product: Tensor,
    weight: Tensor,
    target_local: Tensor,
    factor: Tensor,
    at_target: Tensor,
    rest: Tensor | None,
    sum_of_weight: Tensor | None,
) -> Tensor:
    """Compute the hidden gradient from a product that was computed before the whole softmax was known.

    Returns ``factor · product + at_target · weight[target] - rest · sum_of_weight``, in the weight's dtype.
    ``product``, ``[n, h]``, is the exponentials times the weight ``[v, h]``. ``target_local`` has columns, -1 for
    targets on other ranks. ``factor``, ``at_target`` and ``rest`` have one number per token. ``sum_of_weight`` is
    ``[h]`` or ``[n, h]``.
    """
    result = product if product.dtype == weight.dtype else torch.empty_like(product, dtype=weight.dtype)
    columns = target_local.clamp(min=0)
    at_target = at_target.masked_fill(target_local < 0, 0.0)
    for rows in row_blocks(product):
        part = product[rows].to(compute_dtype(weight.dtype)) * factor[rows].unsqueeze(1)
        if weight.size(0):
            part.addcmul_(weight[columns[rows]].to(part.dtype), at_target[rows].unsqueeze(1))
        if rest is not None and sum_of_weight is not None:
            part.sub_(rest[rows].unsqueeze(1) * (sum_of_weight if sum_of_weight.dim() == 1 else sum_of_weight[rows]))
        result[rows] = part
    return result


# Bound of the error in the sum of a row's exponentials, relative to a gradient of 1; well under one rounding.
_FLOOR = {torch.float64: 2.0**-60, torch.float32: 2.0**-30, torch.bfloat16: 2.0**-16}


class LocalLogitsLoss(Function):
    """Loss of each token, ``[n]``, from hidden states ``[n, h]``."""

    spmd_typecheck = staticmethod(check_layouts)

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        target_local: Tensor,
        ignored: Tensor,
        head: Head,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden = head.gathered(hidden)
        logits = products.linear_in_aligned_rows(hidden, weight, bias)
        # The other columns are padding, which has no probability. Their weights are arbitrary.
        valid, valid_weight, options = logits[:, : head.num_valid], weight[: head.num_valid], head.options
        if head.num_valid < logits.size(1):
            logits[:, head.num_valid :] = 0.0
        kernels = loss_kernels(valid, softcap=options.softcap)
        smooth = options.label_smoothing > 0
        overlaps = logits.dtype in _FLOOR and not (smooth and options.softcap is not None)

        own = kernels.row_statistics(
            valid, target_local, want_sum=smooth, exponentiate_=overlaps, **head.options.of_kernels
        )
        gather = head.start_gather(own, ignored)
        product = products.input_gradient(valid, valid_weight) if overlaps and needs_hidden else None
        combined = head.combined(gather.wait(), target, ignored, hidden, weight, bias)

        factor = combined.weight * (own[:, 0] - combined.maximum).exp()
        at_target, rest = combined.at_target, combined.rest
        if overlaps:
            if rest is not None:
                at_target = at_target + rest
                rest = rest / options.temperature
            at_target = at_target * head.target_slope(own)
            if product is not None:
                sums = None if rest is None else valid_weight.sum(dim=0, dtype=factor.dtype)
                product = finished_hidden_gradient(product, valid_weight, target_local, factor, at_target, rest, sums)
            if head.num_valid and (needs_weight or needs_bias):
                owned = target_local >= 0
                # A sum of exponentials is at least 1, unless all logits are -inf.
                floor = _FLOOR[logits.dtype] / own[:, 1].clamp(min=1.0)
                factor = torch.where(owned & (factor.abs() < floor), floor, factor)
                place = torch.arange(logits.size(0), device=logits.device), target_local.clamp(min=0)
                replacement = torch.where(owned, (at_target / factor).to(logits.dtype), valid[place])
                # Not scatter_, because on a CPU it copies the whole matrix.
                valid.index_put_(place, replacement)
        else:
            kernels.gradient_(valid, valid, target_local, own[:, 0], factor, at_target, rest, **head.options.of_kernels)
            factor, rest = torch.ones_like(factor), None
            product = products.input_gradient(valid, valid_weight) if needs_hidden else None

        keeps = needs_weight or needs_bias
        ctx.save_for_backward(hidden if needs_weight else None, logits if keeps else None, product, factor, rest)
        ctx.head = head
        return combined.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        hidden, logits, product, factor, rest = ctx.saved_tensors
        head: Head = ctx.head
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_output = grad_output.to(factor.dtype)
        grad_hidden = grad_weight = grad_bias = pending = None
        if needs_hidden:
            pending = head.start_reduction(times_rows(product, grad_output))

        # The following overlaps with the reduction of the hidden gradient.
        factor = grad_output * factor
        rest = None if rest is None else grad_output * rest
        if needs_weight:
            scaled = times_rows(hidden, factor)
            sums = None if rest is None else sum_of_rows(hidden, rest)
            if head.main_grad_weight is not None:
                main_grad = main_grad_of(head.main_grad_weight)
                add_product_(main_grad, logits, scaled)
                if sums is not None:
                    main_grad[: head.num_valid].sub_(sums)
                grad_weight = placeholder(head.main_grad_weight)
            elif sums is None:
                grad_weight = products.weight_gradient(logits, scaled)
            else:
                grad_weight = torch.addmm(-sums.to(scaled.dtype), logits.t(), scaled)
                grad_weight[head.num_valid :] = 0.0
        if needs_bias:
            grad_bias = logits.t().mm(factor.to(logits.dtype).unsqueeze(1)).squeeze(1)
            if rest is not None:
                grad_bias[: head.num_valid] -= rest.sum()
        if pending is not None:
            grad_hidden = pending.wait()
        return grad_hidden, grad_weight, grad_bias, None, None, None, None
