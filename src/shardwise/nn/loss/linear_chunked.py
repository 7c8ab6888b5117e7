"""The linear loss a slice of the vocabulary at a time: four matrix products, and the memory of one slice of logits.

Forward, slice by slice: the logits, their statistics, and the product of their exponentials with the weight, summed
under a running maximum as in online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). The statistics travel
while the last slice's product is computed; then the hidden gradient is done but for the incoming factor of each token.

Backward, while the hidden gradient's reduction is in flight: the logits of each slice again, their gradient in their
own memory, and the slice's rows of the weight gradient, each written once. (Slices of tokens would add to the whole
weight gradient each time, in fp32 if nothing is to be lost: a second tensor of its size.)

Without a weight gradient the backward computes nothing at all, and there are two products.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.core.sharding import Interval, balanced_sizes, intervals_of_sizes
from shardwise.kernels import products
from shardwise.kernels.dispatch import loss_kernels
from shardwise.kernels.host_memory import empty_in_huge_pages
from shardwise.kernels.loss_reference import compute_dtype, finite
from shardwise.kernels.main_grad import add_product_, main_grad_of, placeholder
from shardwise.nn.loss.linear_head import Head, finished_hidden_gradient, times_rows
from shardwise.nn.loss.vocabulary import columns_between

# Bytes of one slice of logits: enough columns for an efficient product on the device.
_SLICE_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
_MIN_COLUMNS = 256


class ChunkedLoss(Function):
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
        max_bytes: int,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden = head.gathered(hidden)
        options = head.options
        smooth, capped = options.label_smoothing > 0, options.softcap is not None
        own: Tensor | None = None
        gather = product = sums = None
        ctx.slices = _slices(hidden, head.num_valid, max_bytes)
        for start, stop in ctx.slices:
            logits = _logits(hidden, weight, bias, start, stop)
            local = columns_between(target_local, start, stop)
            kernels = loss_kernels(logits, softcap=options.softcap)
            later = kernels.row_statistics(logits, local, want_sum=smooth, **head.options.of_kernels)
            before = own
            own = later if before is None else merged_statistics(before, later, start, stop - start)
            if stop == head.num_valid:
                # The gather is in flight during the last slice's product.
                gather = head.start_gather(own, ignored)
            if needs_hidden:
                maximum = own[:, 0]
                ones, zeros = torch.ones_like(maximum), torch.zeros_like(maximum)
                if smooth and capped:
                    # What is taken from every column is not the same for all: it has the column's slope.
                    slopes, nowhere = torch.empty_like(logits), torch.full_like(local, -1)
                    kernels.gradient_(slopes, logits, nowhere, maximum, zeros, zeros, -ones, **head.options.of_kernels)
                    sums = _plus_product(sums, slopes, weight[start:stop])
                    del slopes
                kernels.gradient_(logits, logits, local, maximum, ones, zeros, **head.options.of_kernels)
                if before is not None and product is not None:
                    product.mul_((before[:, 0] - finite(maximum)).exp().unsqueeze(1))
                product = _plus_product(product, logits, weight[start:stop])
            # Frees this slice's logits before the next slice's are made.
            del logits
        assert own is not None
        assert gather is not None
        combined = head.combined(gather.wait(), target, ignored, hidden, weight, bias)

        factor = combined.weight * (own[:, 0] - combined.maximum).exp()
        at_target, rest = combined.at_target, combined.rest
        grad_hidden, valid_weight = None, weight[: head.num_valid]
        if product is not None:
            if rest is not None:
                at_target = at_target + rest
                if sums is None:
                    rest = rest / options.temperature
                    sums = valid_weight.sum(dim=0, dtype=factor.dtype)
            at_target = at_target * head.target_slope(own)
            grad_hidden = finished_hidden_gradient(product, valid_weight, target_local, factor, at_target, rest, sums)
        if needs_weight or needs_bias:
            numbers = (target_local, own[:, 0], factor, combined.at_target, combined.rest)
            ctx.save_for_backward(grad_hidden, hidden, weight, bias, *numbers)
        else:
            ctx.save_for_backward(grad_hidden)
        ctx.head = head
        return combined.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad_hidden, *saved = ctx.saved_tensors
        head: Head = ctx.head
        needs_hidden = ctx.needs_input_grad[0]
        grad_output = grad_output.to(compute_dtype(grad_output.dtype))
        grad_weight = grad_bias = pending = None
        if needs_hidden:
            pending = head.start_reduction(times_rows(grad_hidden, grad_output))
        if saved:
            # The hidden gradient's reduction is in flight meanwhile.
            grad_weight, grad_bias = _weight_gradients(ctx, grad_output, saved)
        if needs_hidden:
            assert pending is not None
            grad_hidden = pending.wait()
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _weight_gradients(ctx: Any, grad_output: Tensor, saved: list[Any]) -> tuple[Tensor | None, Tensor | None]:
    hidden, weight, bias, target_local, maximum, factor, at_target, rest = saved
    _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    head: Head = ctx.head
    fuses = head.main_grad_weight is not None
    grad_weight = empty_in_huge_pages(weight.shape, weight) if needs_weight and not fuses else None
    main_grad = main_grad_of(head.main_grad_weight) if needs_weight and head.main_grad_weight is not None else None
    grad_bias = torch.zeros_like(bias) if needs_bias and bias is not None else None
    factor, at_target = grad_output * factor, grad_output * at_target
    rest = None if rest is None else grad_output * rest
    for start, stop in ctx.slices:
        logits = _logits(hidden, weight, bias, start, stop)
        local = columns_between(target_local, start, stop)
        kernels = loss_kernels(logits, softcap=head.options.softcap)
        kernels.gradient_(logits, logits, local, maximum, factor, at_target, rest, **head.options.of_kernels)
        if grad_weight is not None:
            torch.mm(logits.t(), hidden, out=grad_weight[start:stop])
        elif main_grad is not None:
            add_product_(main_grad[start:stop], logits, hidden)
        if grad_bias is not None:
            grad_bias[start:stop] = logits.sum(dim=0, dtype=factor.dtype)
        del logits
    if grad_weight is not None:
        grad_weight[head.num_valid :] = 0.0
    elif needs_weight and head.main_grad_weight is not None:
        grad_weight = placeholder(head.main_grad_weight)
    return grad_weight, grad_bias


def merged_statistics(before: Tensor, later: Tensor, num_before: int, num_later: int) -> Tensor:
    """The statistics of columns of which ``before`` and ``later`` have seen ``num_before`` and ``num_later``."""
    maximum = torch.maximum(before[:, 0], later[:, 0])
    base = finite(maximum)
    down_before, down_later = before[:, 0] - base, later[:, 0] - base
    numbers = [
        maximum,
        before[:, 1] * down_before.exp() + later[:, 1] * down_later.exp(),
        torch.maximum(before[:, 2] + down_before, later[:, 2] + down_later),
    ]
    if before.size(1) == 4:
        numbers.append(before[:, 3] + num_before * down_before + later[:, 3] + num_later * down_later)
    return torch.stack(numbers, dim=1)


def _slices(hidden: Tensor, num_columns: int, max_bytes: int) -> tuple[Interval, ...]:
    """The intervals of columns that are computed one after the other, of about equal size."""
    of_device = _SLICE_BYTES.get(hidden.device.type, _SLICE_BYTES["cuda"])
    column_bytes = max(hidden.size(0) * hidden.element_size(), 1)
    columns = max(min(max_bytes, of_device) // column_bytes, _MIN_COLUMNS)
    num_slices = max(1, -(-num_columns // columns))
    return intervals_of_sizes(balanced_sizes(num_columns, num_slices))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
    bias = None if bias is None else bias[start:stop]
    return products.linear_in_aligned_rows(hidden, weight[start:stop], bias)


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """``total + left @ right``, in fp32 (fp64 for fp64 factors)."""
    dtype = compute_dtype(left.dtype)
    if total is None:
        total = left.new_zeros(left.size(0), right.size(1), dtype=dtype)
    if left.dtype == dtype:
        return total.addmm_(left, right)
    if left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    # On a CPU each slice's product is rounded before it is added: narrow products are several times as fast there.
    return total.add_(left.mm(right))
