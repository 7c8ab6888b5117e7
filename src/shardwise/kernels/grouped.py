"""Products of runs of rows with one matrix each, as experts need them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.core.typed import computed_locally
from shardwise.kernels.fake_device import counts_on_host, device_type_of

Delay = Callable[[Tensor, Tensor, Tensor], None]
"""Function of input rows ``[n, i]``, the output's gradient ``[n, o]`` and the counts ``[e]`` of runs."""

# Dtypes in which PyTorch multiplies all runs at once, by the device.
_DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}
# Rows of its matrices begin at multiples of this many bytes.
_ALIGNMENT = 16


def why_not_grouped(device_type: str, dtype: torch.dtype, widths: Sequence[int]) -> str | None:
    """Return why runs of rows of these widths are multiplied one by one; None if ``grouped_mm`` multiplies all."""
    if dtype not in _DTYPES.get(device_type, ()):
        return f"grouped_mm has no {str(dtype).removeprefix('torch.')} on {device_type}"
    wrong = [width for width in widths if width * dtype.itemsize % _ALIGNMENT]
    return f"rows of {wrong[0]} elements are no multiple of {_ALIGNMENT} bytes" if wrong else None


class _Delayed(Function):
    """``grouped_linear`` whose backward passes on what the gradient of the weights needs, instead of computing it."""

    spmd_typecheck = computed_locally("input_", "weights", "counts")

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weights: Tensor, counts: Tensor, delay: Delay) -> Tensor:
        ctx.save_for_backward(input_, weights, counts)
        ctx.delay = delay
        return grouped_linear(input_, weights, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        input_, weights, counts = ctx.saved_tensors
        grad = grad.contiguous()
        ctx.delay(input_, grad, counts)
        grad_input = grouped_linear(grad, weights.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
        return grad_input, None, None, None


def grouped_weight_gradient(grad_output: Tensor, input_: Tensor, counts: Tensor) -> Tensor:
    """Multiply, for each run, the transpose of its rows of ``grad_output`` by its rows of ``input_``.

    ``[n, o]`` and ``[n, i]``, the runs one after the other, with ``counts [e]`` (int64, rows of each run) to ``[e, o,
    i]``. Without ``grouped_mm`` the host reads the counts.
    """
    widths = (grad_output.size(1), input_.size(1))
    if why_not_grouped(device_type_of(input_), input_.dtype, widths) is None:
        return F.grouped_mm(grad_output.t(), input_, offs=counts.cumsum(0).to(torch.int32))
    lengths = counts_on_host(counts, len(input_))
    runs = zip(grad_output.split(lengths), input_.split(lengths), strict=True)
    return torch.stack([left.t() @ right for left, right in runs])


def grouped_linear(
    input_: Tensor, weights: Tensor, counts: Tensor, biases: Tensor | None = None, *, delay: Delay | None = None
) -> Tensor:
    """Multiply each run of rows by the transpose of its matrix, and add its bias.

    Args:
        input_: ``[n, i]``, the runs one after the other.
        weights: ``[e, o, i]``, a matrix for each run.
        counts: ``[e]`` int64, number of rows of each run; together ``n``. Without ``grouped_mm`` the host reads it.
        biases: ``[e, o]``, a bias for each run, or None.
        delay: function that the backward calls instead of computing the gradient of the weights; None to compute it.
    """
    if delay is not None:
        output: Tensor = _Delayed.apply(input_, weights, counts, delay)
    elif why_not_grouped(device_type_of(input_), input_.dtype, weights.shape[1:]) is None:
        ends = counts.cumsum(0).to(torch.int32)
        output = F.grouped_mm(input_, weights.transpose(1, 2), offs=ends)
        if output.requires_grad:
            # The gradient may be expanded, which grouped_mm's backward does not take.
            output.register_hook(Tensor.contiguous)
    else:
        runs = input_.split(counts_on_host(counts, len(input_)))
        # ``unbind`` has one gradient for all matrices; that of each index would be as large as all of them.
        output = torch.cat([F.linear(run, weight) for run, weight in zip(runs, weights.unbind(), strict=True)])
    if biases is None:
        return output
    numbers = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=len(output))
    # In fp32 at least, because a GPU sums the rows of a gradient in the dtype of the rows.
    wide = biases.to(torch.promote_types(biases.dtype, torch.float32))
    return output + wide.index_select(0, numbers).to(output.dtype)
