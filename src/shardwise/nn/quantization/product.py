"""The product with a quantised weight, which is made of its codes block by block and never there as a whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.nn.quantization.tensor import QuantizedTensor


def quantized_linear(input_: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """``input_ @ weight.T + bias``. The backward makes the weight of its codes again; neither it nor the input is kept.

    Args:
        input_: ``[..., i]``; not modified.
        weight: ``[o, i]``, which gets no gradient.
        bias: ``[o]`` or None.

    Returns:
        ``[..., o]``.
    """
    output: Tensor = _QuantizedLinear.apply(input_, weight.detach())
    return output if bias is None else output + bias.to(output.dtype)


class _QuantizedLinear(Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: QuantizedTensor) -> Tensor:
        ctx.weight = weight
        ctx.dtype = input_.dtype
        output = input_.new_empty(*input_.shape[:-1], weight.size(0))
        for rows in weight.row_blocks():
            output[..., rows] = F.linear(input_, weight.dequantize(rows).to(input_.dtype))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        weight: QuantizedTensor = ctx.weight
        flat = grad_output.reshape(-1, weight.size(0)) if weight.size(0) else None
        total = None
        blocks = list(weight.row_blocks())
        # The sum over blocks of rows must not be rounded between them.
        wide = torch.promote_types(ctx.dtype, torch.float32) if len(blocks) > 1 else ctx.dtype
        for rows in blocks:
            assert flat is not None
            part = (flat[:, rows].to(ctx.dtype) @ weight.dequantize(rows).to(ctx.dtype)).to(wide)
            total = part if total is None else total.add_(part)
        shape = (*grad_output.shape[:-1], weight.size(1))
        grad = grad_output.new_zeros(shape) if total is None else total.view(shape)
        return grad.to(ctx.dtype), None
