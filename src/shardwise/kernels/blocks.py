"""Elementwise functions whose bits do not depend on where a tensor begins or ends, nor on the number of threads.

PyTorch computes most elements of a tensor on a CPU by vectors, and the last few of each thread's share by the C
library, which rounds exponentials and error functions otherwise. In blocks that are small enough for one thread, and
whole vectors long, all elements go one way.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# PyTorch gives a thread 2^15 elements at least, and its widest loop takes 64 at once.
_BLOCK = 1 << 14
_VECTORS = 64
_RUN = 1 << 12


def in_blocks(function: Callable[[Tensor], Tensor], input_: Tensor) -> Tensor:
    """``function(input_)``, block by block on a CPU.

    Args:
        function: elementwise, with a gradient.
        input_: any shape.

    Returns:
        A new tensor of the same shape.
    """
    if not input_.is_cpu:
        return function(input_)
    output: Tensor = _InBlocks.apply(input_, function)
    return output


def sum_at_any_threads(input_: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of all elements. Where all are one sum, PyTorch's threads share it, in an order that depends on how many.

    Args:
        input_: any shape.
        dtype: to sum in; the input's if None.
    """
    flat = input_.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % _RUN)).view(-1, _RUN).sum(dim=1, dtype=dtype).sum()


class _InBlocks(Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(input_)
        ctx.function = function
        return torch.cat([function(block) for block in _blocks(input_)])[: input_.numel()].view(input_.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (input_,) = ctx.saved_tensors
        gradients: list[Tensor] = []
        for block, grad in zip(_blocks(input_), _blocks(grad_output), strict=True):
            with torch.enable_grad():
                leaf = block.detach().requires_grad_()
                output = ctx.function(leaf)
            gradients += torch.autograd.grad(output, leaf, grad)
        return torch.cat(gradients)[: input_.numel()].view(input_.shape), None


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """All elements in order, in blocks of whole vectors; the last is filled up with zeros."""
    flat = tensor.detach().reshape(-1)
    blocks: tuple[Tensor, ...] = F.pad(flat, (0, -flat.numel() % _VECTORS)).split(_BLOCK)
    return blocks
