"""The linear loss with this rank's logits kept: three matrix products.

The logits' memory becomes that of their exponentials ``E = exp(y - m_r)`` in one pass, before the other ranks are
heard of. The softmax over the whole vocabulary is then ``ρ E`` with one ``ρ = exp(m_r - M) / S`` for each token, so
that both gradients are products with ``E`` and numbers per token:

- hidden: ``ρ (E W) + a W[target]``, the product computed while the statistics travel;
- weight: ``Eᵀ (g ρ hidden)`` for any incoming gradient ``g``, with ``a / ρ`` in the target's place.

``a`` is the gradient in the target's column, known to all its digits only once the loss is. Where ``ρ`` is so small
that ``a / ρ`` might overflow, a floor takes its place: the rest of such a row is below the rounding of the result.

With a softcap ``E`` is multiplied by its slope. Label smoothing takes ``rest`` from every column: without a softcap
that is the same for all columns, and a sum of the weight's rows, or of the hidden states, does it. With both, and in
fp16, which has no room for ``a / ρ``, the statistics are waited for and the gradient proper takes the logits' place.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.kernels import products
from shardwise.kernels.dispatch import loss_kernels
from shardwise.kernels.main_grad import add_product_, main_grad_of, placeholder
from shardwise.nn.loss.linear_head import Head, finished_hidden_gradient, sum_of_rows, times_rows

# What all of a row's exponentials may be off by together, as a share of a gradient of 1; each well under one rounding.
_FLOOR = {torch.float64: 2.0**-60, torch.float32: 2.0**-30, torch.bfloat16: 2.0**-16}


class LocalLogitsLoss(Function):
    """Loss of each token, ``[n]``, from hidden states ``[n, h]``."""

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
        # What is left are padded columns, which take no probability, and whose weights may hold anything.
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
                # Not scatter_, which copies the whole matrix on a CPU.
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

        # The hidden gradient's reduction is in flight meanwhile.
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
