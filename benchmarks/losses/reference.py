"""The reference's algorithm in its simplest form: an fp32 copy of the logits and three all-reduces.

The all-reduces compute the maximum of the local maxima; the sum of the target's logit, which one rank has; and the sum
of the exponentials. fp32 logits are overwritten, others are copied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup


class ReferenceCrossEntropy(Function):
    """Loss of each token: ``[n, v/t]`` to ``[n]``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int, group: ProcessGroup) -> Tensor:
        ctx.dtype = logits.dtype
        wide = logits.detach().float()
        maximum = wide.amax(dim=-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        wide -= maximum.unsqueeze(-1)

        elsewhere = (target < start) | (target >= start + wide.size(-1))
        column = (target - start).masked_fill_(elsewhere, 0)
        predicted = wide.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill_(elsewhere, 0.0)
        dist.all_reduce(predicted, group=group)
        exponentials = wide.exp_()
        sum_exp = exponentials.sum(dim=-1)
        dist.all_reduce(sum_exp, group=group)

        ctx.save_for_backward(exponentials.div_(sum_exp.unsqueeze(-1)), elsewhere, column)
        return sum_exp.log() - predicted

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        softmax, elsewhere, column = ctx.saved_tensors
        softmax[torch.arange(softmax.size(0)), column] -= 1.0 - elsewhere.float()
        return softmax.mul_(grad_output.unsqueeze(-1)).to(ctx.dtype), None, None, None
