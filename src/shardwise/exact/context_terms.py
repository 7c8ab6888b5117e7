"""Exact mode with context parallelism: gradients of parameters are computed from all positions of a sample.

A gradient of a weight is a sum over positions. A sum of the ranks' sums would round in another order. So the ranks
exchange the terms: one rank has those of all positions, in order, and computes the sum of a single rank. For the weight
of a linear layer, each rank computes some rows or columns. For other parameters, the first rank computes the gradient.
Elsewhere a rank's gradient is -0.0, which changes no bit of a sum.

Attention is computed head by head: the ranks exchange positions for heads, so a rank attends with some heads at all
positions. Everything else is computed token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import all_gather, all_to_all
from shardwise.core.sequence_view import ContextShard
from shardwise.core.sharding import Interval


@dataclass(frozen=True)
class Place:
    """Stands in for a process group where only the number of a rank and the number of ranks are asked for."""

    number: int
    ranks: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


def gathered(own: Tensor, *, group: ProcessGroup, dim: int = 0) -> Tensor:
    """Gather the positions of all context-parallel ranks, in the order of the sequence; without gradient.

    Along ``dim`` the tensor may have several rows for each position, such as ``s * b``.
    """
    whole = all_gather(own.detach().contiguous(), group=group, dim=dim)
    return ContextShard(whole.size(dim), group).in_order(whole, dim=dim)


def own_columns(rows: Tensor, columns: Sequence[Sequence[Interval]], *, group: ProcessGroup) -> Tensor:
    """Exchange this rank's rows ``[n, i]`` for its columns of the rows of all ranks, ``[n * c, own]``.

    Args:
        rows: rows of this rank's positions.
        columns: intervals of columns of each rank.
        group: the context-parallel ranks.
    """
    sent = [torch.cat([rows[:, start:stop] for start, stop in of_rank], dim=1) for of_rank in columns]
    own = sent[group.rank()].size(1)
    received = all_to_all(
        torch.cat([each.reshape(-1) for each in sent]),
        group=group,
        input_sizes=[each.numel() for each in sent],
        output_sizes=[rows.size(0) * own] * group.size(),
    )
    whole = received.view(-1, own)
    return ContextShard(whole.size(0), group).in_order(whole, dim=0)


class _WholeLosses(Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, group: ProcessGroup) -> Tensor:
        whole = gathered(losses, group=group, dim=1)
        ctx.shard = ContextShard(whole.size(1), group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.shard.own(grad, dim=1), None


def whole_losses(losses: Tensor, *, group: ProcessGroup) -> Tensor:
    """Gather losses ``[b, s/c]`` to ``[b, s]``; the backward returns the gradients of this rank's positions."""
    whole: Tensor = _WholeLosses.apply(losses, group)
    return whole


def with_whole_gradients(
    output: Tensor,
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    params: Sequence[Tensor],
    *,
    gather: Callable[[Tensor, int], Tensor],
    group: ProcessGroup,
    dim: int = 0,
) -> Tensor:
    """Return ``output``, whose backward gives the parameters the gradients of all positions.

    Args:
        output: ``function`` of this rank's inputs, computed without gradients of the parameters.
        function: function of the inputs at all positions, and of the parameters.
        inputs: inputs at this rank's positions.
        params: parameters, with gradients that the first rank computes.
        gather: gathers a tensor's positions along a dimension.
        group: the context-parallel ranks.
        dim: dimension of the positions in the inputs and the output.
    """
    if not torch.is_grad_enabled() or not any(param.requires_grad for param in params):
        return output
    options = function, gather, dim, group.rank() == 0, len(inputs)
    result: Tensor = _WholeGradients.apply(output, options, *inputs, *params)
    return result


class _WholeGradients(Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, options: Any, *tensors: Tensor) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(*tensors)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        function, gather, dim, computes, number = ctx.options
        saved = ctx.saved_tensors
        inputs, params = saved[:number], saved[number:]
        needs = ctx.needs_input_grad[2 + number :]
        *inputs, whole = (gather(each, dim) for each in (*inputs, grad))
        gradients = [
            torch.full_like(param, -0.0) if needed else None for param, needed in zip(params, needs, strict=True)
        ]
        if computes:
            leaves = [param.detach().requires_grad_(needed) for param, needed in zip(params, needs, strict=True)]
            with torch.enable_grad():
                output = function(*inputs, *leaves)
            found = iter(torch.autograd.grad(output, [leaf for leaf in leaves if leaf.requires_grad], whole))
            gradients = [next(found) if needed else None for needed in needs]
        return grad, None, *(None,) * number, *gradients
