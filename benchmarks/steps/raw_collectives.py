"""The training step of the dense modules with collectives of ``torch.distributed`` written by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from steps.baselines import gradients_of, make_adamw, split_parameters
from steps.dense_llama import DenseLlama
from steps.problem import MAX_GRAD_NORM, Problem, Step, Weights


def make_raw(problem: Problem, group: ProcessGroup) -> Step:
    """Create a step with two collectives around each block of the narrow model, without overlap."""
    t, rank = group.size(), group.rank()
    model = DenseLlama(problem.sizes, shards=t).load(_shards(problem.weights, t, rank))
    first_id, num_ids = rank * model.tok_embeddings.num_embeddings, model.tok_embeddings.num_embeddings
    for name, module in model.named_modules():
        if name.endswith((".attention", ".feed_forward")) or name == "output":
            module.register_forward_pre_hook(lambda _, inputs: _Copy.apply(*inputs, group))
        if name.endswith((".attention", ".feed_forward")):
            module.register_forward_hook(lambda _, __, output: _Reduce.apply(output, group))
    local_labels = problem.labels.flatten() - first_id
    local_ids = problem.ids - first_id
    elsewhere = (local_ids < 0) | (local_ids >= num_ids)
    local_ids = local_ids.masked_fill(elsewhere, 0)
    elsewhere = elsewhere.unsqueeze(-1)
    model.tok_embeddings.register_forward_hook(
        lambda _, __, output: _Reduce.apply(output.masked_fill_(elsewhere, 0.0), group)
    )
    matrices, norms = split_parameters(model)
    optimizer = make_adamw(matrices, norms)

    def step() -> tuple[Tensor, Tensor]:
        logits = model(local_ids).flatten(0, 1)
        loss: Tensor = _CrossEntropy.apply(logits, local_labels, group).mean()
        loss.backward()
        squares = get_total_norm(gradients_of(matrices)).square()
        dist.all_reduce(squares, group=group)
        norm = (squares + get_total_norm(gradients_of(norms)).square()).sqrt()
        clip_grads_with_norm_(model.parameters(), MAX_GRAD_NORM, norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def _shards(weights: Weights, t: int, rank: int) -> Weights:
    def shard(name: str, whole: Tensor) -> Tensor:
        if whole.dim() == 1:
            return whole
        return whole.chunk(t, dim=1 if name.endswith(("wo.weight", "w2.weight")) else 0)[rank]

    return {name: shard(name, whole) for name, whole in weights.items()}


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return input_.view_as(input_)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad_input = grad_output.contiguous()
        dist.all_reduce(grad_input, group=ctx.group)
        return grad_input, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(input_)
        dist.all_reduce(input_, group=group)
        return input_

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output, None


class _CrossEntropy(Function):
    """Loss with two all-reduces: the largest logit, then the sum of exponentials together with the target's logit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, local_labels: Tensor, group: ProcessGroup) -> Tensor:
        here = (local_labels >= 0) & (local_labels < logits.size(1))
        index = local_labels.masked_fill(~here, 0).unsqueeze(1)
        largest = logits.amax(dim=1, keepdim=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest
        target = shifted.gather(1, index).squeeze(1) * here
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=1), target])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(1)), index, here)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        probabilities, index, here = ctx.saved_tensors
        probabilities.scatter_add_(1, index, -here.unsqueeze(1).to(probabilities.dtype))
        return probabilities.mul_(grad_output.unsqueeze(1)), None, None
