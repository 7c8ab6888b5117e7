"""The block written by hand by a competent user: autograd functions around ``F.linear`` and ``torch.distributed``.

It handles only this case: no uneven shards, no frozen weights, no autocast, no checks. The collective of the input
gradient overlaps with the computation of the weight gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from blocks.problem import Block, Candidate, Problem


def make_bare(problem: Problem, group: ProcessGroup, *, sequence_parallel: bool = False) -> Candidate:
    """Create this rank's block from the whole weights."""
    t, rank = group.size(), group.rank()
    weights = problem.weights
    column_bias = weights["column.bias"].chunk(t)[rank] if problem.sizes.bias else None
    column = _ColumnSequence if sequence_parallel else _Column
    row = _RowSequence if sequence_parallel else _Row
    module = Block(
        _Linear(column, weights["column.weight"].chunk(t, dim=0)[rank], column_bias, group),
        problem.sizes.between(problem.block),
        _Linear(row, weights["row.weight"].chunk(t, dim=1)[rank], weights.get("row.bias"), group),
    )
    partial = ("row.bias",) if sequence_parallel else ()
    return Candidate(module, problem, group, sequence_parallel=sequence_parallel, partial=partial)


class _Linear(nn.Module):
    def __init__(self, function: type[Function], weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> None:
        super().__init__()
        self.function = function
        self.weight = Parameter(weight.clone(memory_format=torch.contiguous_format))
        self.bias = None if bias is None else Parameter(bias.clone())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.function.apply(x, self.weight, self.bias, self.group)
        return output


class _Column(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.group = bias is not None, group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad = grad.flatten(0, 1)
        grad_weight = grad.t() @ x.flatten(0, 1)
        grad_bias = grad.sum(0) if ctx.has_bias else None
        work.wait()
        return grad_x, grad_weight, grad_bias, None


class _Row(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        output = F.linear(x, weight)
        dist.all_reduce(output, group=group)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        grad = grad.flatten(0, 1)
        return grad_x, grad.t() @ x.flatten(0, 1), grad.sum(0) if ctx.has_bias else None, None


class _ColumnSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.group = bias is not None, group
        whole = x.new_empty(group.size() * x.size(0), *x.shape[1:])
        dist.all_gather_single(whole, x, group=group)
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        whole = x.new_empty(ctx.group.size() * x.size(0), *x.shape[1:])
        gather = dist.all_gather_single(whole, x, group=ctx.group, async_op=True)
        grad_whole = grad @ weight
        grad_x = torch.empty_like(x)
        scatter = dist.reduce_scatter_single(grad_x, grad_whole, group=ctx.group, async_op=True)
        grad = grad.flatten(0, 1)
        gather.wait()
        grad_weight = grad.t() @ whole.flatten(0, 1)
        grad_bias = grad.sum(0) if ctx.has_bias else None
        scatter.wait()
        return grad_x, grad_weight, grad_bias, None


class _RowSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.group = bias is not None, group
        whole = F.linear(x, weight)
        output = whole.new_empty(whole.size(0) // group.size(), *whole.shape[1:])
        dist.reduce_scatter_single(output, whole, group=group)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        # The bias is added only to this rank's tokens, so its gradient is a partial sum.
        grad_bias = grad.flatten(0, 1).sum(0) if ctx.has_bias else None
        whole = grad.new_empty(ctx.group.size() * grad.size(0), *grad.shape[1:])
        dist.all_gather_single(whole, grad.contiguous(), group=ctx.group)
        return whole @ weight, whole.flatten(0, 1).t() @ x.flatten(0, 1), grad_bias, None
