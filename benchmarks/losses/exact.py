"""Errors of a candidate's gradients against exact gradients, computed in blocks of tokens in higher precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from losses.problem import Problem

_TOKENS_PER_BLOCK = 64


class ExactGradients:
    """The exact gradients of a problem's summed loss.

    Args:
        problem: problem of this rank.
        logits_of: returns the logits of some of the tokens, ``[b, v/t]``, in the precision for the computation.
        group: process group of the ranks that split the vocabulary.
    """

    def __init__(self, problem: Problem, logits_of: Callable[[slice], Tensor], group: ProcessGroup) -> None:
        self._problem, self._logits_of, self._group = problem, logits_of, group
        own = torch.cat([logits_of(rows).logsumexp(dim=1) for rows in self._blocks()])
        every = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(every, own, group=group)
        self._log_sum_exp = torch.stack(every).logsumexp(dim=0)

    def logits_error(self, gradients: Sequence[Tensor]) -> float:
        """Return the largest error of a candidate's logits gradient, relative to the largest gradient."""
        (actual,) = gradients
        error = largest = 0.0
        for rows in self._blocks():
            exact = self._of_logits(rows)
            error = max(error, float((actual[rows] - exact).abs().amax()))
            largest = max(largest, float(exact.abs().amax()))
        return self._over_ranks(error, largest)

    def head_error(self, gradients: Sequence[Tensor]) -> float:
        """Return the largest error of a candidate's hidden and weight gradients, relative to their largest elements."""
        hidden, weight = self._problem.hidden, self._problem.weight
        dtype = self._log_sum_exp.dtype
        grad_hidden = torch.zeros(hidden.shape, dtype=dtype)
        grad_weight = torch.zeros(weight.shape, dtype=dtype)
        wide = weight.to(dtype)
        for rows in self._blocks():
            exact = self._of_logits(rows)
            grad_hidden[rows] = exact @ wide
            grad_weight.addmm_(exact.t(), hidden[rows].to(dtype))
        dist.all_reduce(grad_hidden, group=self._group)
        return max(
            self._over_ranks(float((actual - exact).abs().amax()), float(exact.abs().amax()))
            for actual, exact in zip(gradients, (grad_hidden, grad_weight), strict=True)
        )

    def _blocks(self) -> Iterator[slice]:
        for start in range(0, self._problem.sizes.num_tokens, _TOKENS_PER_BLOCK):
            yield slice(start, start + _TOKENS_PER_BLOCK)

    def _of_logits(self, rows: slice) -> Tensor:
        gradient = (self._logits_of(rows) - self._log_sum_exp[rows].unsqueeze(1)).exp_()
        column = self._problem.target[rows] - self._problem.start
        owned = (column >= 0) & (column < gradient.size(1))
        gradient[owned.nonzero().squeeze(1), column[owned]] -= 1.0
        return gradient

    def _over_ranks(self, error: float, largest: float) -> float:
        both = torch.tensor([error, largest], dtype=torch.float64)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        return float(both[0] / both[1])
