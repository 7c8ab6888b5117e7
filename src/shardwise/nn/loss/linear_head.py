"""What both plans of the linear loss share: moves of the hidden states, and products with one number per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import (
    all_gather,
    all_gather_async,
    all_reduce_async,
    reduce_scatter_async,
)
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.sharding import Interval
from shardwise.kernels.loss_reference import compute_dtype, row_blocks
from shardwise.nn.loss.checks import LossChecks
from shardwise.nn.loss.combine import Combined, combine
from shardwise.nn.loss.options import LossOptions


@dataclass(frozen=True)
class Head:
    """An output layer and its loss, but for the tensors.

    Attributes:
        ranges: every rank's ids.
        options: of the loss.
        sequence_parallel: hidden states are a shard of the tokens.
        sizes: how many tokens each rank holds then; None if all hold as many.
        main_grad_weight: the parameter whose ``main_grad`` the weight gradient is added to; None to return it.
        checks: of logits and targets.
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
        """How many of this rank's columns are no padding."""
        start, stop = self.own_ids
        return stop - start

    def gathered(self, hidden: Tensor) -> Tensor:
        """The hidden states of all tokens, ``[n, h]``."""
        if not self.sequence_parallel:
            return hidden
        return all_gather(hidden, group=self.group, dim=0, sizes=self.sizes)

    def start_reduction(self, grad_hidden: Tensor) -> Pending:
        """Start to sum the hidden gradient over the ranks; each gets that of its own hidden states."""
        if self.sequence_parallel:
            return reduce_scatter_async(grad_hidden, group=self.group, dim=0, sizes=self.sizes)
        return all_reduce_async(grad_hidden, group=self.group, may_overwrite=True)

    def start_gather(self, own: Tensor, ignored: Tensor) -> Pending:
        """Start to bring every rank's statistics here: the one collective of the loss. ``own`` is marked in place."""
        self.checks.mark_ignored_(own, ignored, self.group)
        return all_gather_async(own.unsqueeze(0), group=self.group, dim=0)

    def combined(
        self,
        every: Tensor,
        target: Tensor,
        ignored: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Combined:
        """The loss and what its gradient needs, from every rank's statistics."""

        # The logits are gone.
        def row_of(token: int) -> Tensor:
            return F.linear(hidden[token], weight, bias)[: self.num_valid]

        self.checks.run(every, row_of, target, ignored, self.own_ids, self.group)
        return combine(every, self.ranges, ignored, self.options)

    def target_slope(self, own: Tensor) -> Tensor:
        """``dy/dx`` at the target's logit, from this rank's statistics; any number where it has no target."""
        slope = torch.ones_like(own[:, 0])
        if self.options.softcap is not None:
            capped = (own[:, 2] + own[:, 0]) * (self.options.temperature / self.options.softcap)
            slope = 1.0 - capped.square()
        return slope / self.options.temperature


def times_rows(matrix: Tensor, factor: Tensor) -> Tensor:
    """``matrix · factor`` with one factor for each row, multiplied in the factor's dtype and rounded once."""
    result = torch.empty_like(matrix)
    for rows in row_blocks(matrix):
        result[rows] = matrix[rows] * factor[rows].unsqueeze(1)
    return result


def sum_of_rows(matrix: Tensor, factor: Tensor) -> Tensor:
    """``Σ matrix[n] · factor[n]`` over the rows, in the factor's dtype."""
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
    """The hidden gradient from the product that was computed before the whole softmax was known.

    ``factor · product + at_target · weight[target] - rest · sum_of_weight``, in the weight's dtype, each term with one
    number per token.

    Args:
        product: ``[n, h]``, the exponentials times the weight, without the target's.
        weight: ``[v, h]``.
        target_local: ``[n]`` columns, -1 where the target is not among them.
        factor: ``[n]``.
        at_target: ``[n]``; not looked at where there is no target.
        rest: ``[n]`` or None.
        sum_of_weight: ``[h]``, or ``[n, h]``, or None: what ``rest`` multiplies.
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
