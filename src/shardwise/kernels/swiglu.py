"""SwiGLU: single operations of PyTorch, or one loop or kernel that keeps gate and up and nothing else."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.kernels import dispatch
from shardwise.kernels.blocks import in_blocks


def swiglu(inner: Tensor, *, at_any_size: bool = False) -> Tensor:
    """``silu(gate) * up`` (Shazeer 2020, arXiv:2002.05202).

    The definition is what runs where ``dispatch.swiglu_kernels`` finds nothing faster: as single operations it keeps
    gate, up and the activated gate for the backward, and rounds the activated gate to the tensors' dtype.

    Args:
        inner: ``[..., 2f]``, the gates first.
        at_any_size: let neither the number of elements nor where a row ends change a bit of one.

    Returns:
        ``[..., f]``.
    """
    kernels = dispatch.swiglu_kernels(inner, at_any_size=at_any_size)
    if kernels is None:
        gate, up = inner.chunk(2, dim=-1)
        return (in_blocks(F.silu, gate) if at_any_size else F.silu(gate)) * up
    output: Tensor = _SwiGLU.apply(inner, kernels)
    return output


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, kernels: Any) -> Tensor:
        ctx.save_for_backward(inner)
        ctx.kernels = kernels
        output: Tensor = kernels.swiglu(inner)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (inner,) = ctx.saved_tensors
        return ctx.kernels.swiglu_gradient(inner, grad_output), None
