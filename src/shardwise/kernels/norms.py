"""RMSNorm in few passes over memory on a CPU; on CUDA, a residual addition and the norm after it in one pass.

PyTorch has one kernel for RMSNorm on CUDA. On a CPU its forward and backward are single operations: about twenty passes
over tensors as large as the input, and autograd saves many of these. The function here saves the input and one number
per row; forward and backward take half to a quarter of the time (one core of an EPYC). A C loop does large fp32 inputs.

With ``r = rsqrt(mean(x^2) + eps)`` per row of ``n``, ``y = x r w``, and for an incoming ``g``

    dw = sum_rows(g x r),    dx = g w r - x r^3 sum(g x w) / n

Source: Zhang & Sennrich 2019 (arXiv:1910.07467), equation 4.

``reduce_norm_`` defines the work between two products of inference in fused mode, where the ranks can access each
other's memory. Each rank's buffer holds its partial sum ``[n, h]``, and each rank owns some of the rows. For its rows a
rank sums the partial sums of all ranks and adds the residual and a bias. This is the new residual, and the rank writes
its norm into the same rows of every buffer. One pass over each row thus does reduce-scatter, residual, norm and
all-gather. Each row has one owner, so no row is read after it was written. On CUDA ``fused_reduce_norm_`` runs one
Triton kernel between two barriers: all products are in the buffers before it, and all norms after it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.core.typed import computed_locally
from shardwise.kernels import compiled, dispatch

# Largest row, in the dtype of the computation, that the registers of a program hold.
_MAX_ROW_BYTES = 1 << 15
# Each program of the exchange holds a whole row.
MAX_WIDTH = 1 << 14


def rms_norm(input_: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    """Compute ``x * rsqrt(mean(x^2) + eps) * weight`` over the last dimension.

    This implementation runs in fp32 and fp64 on a CPU, outside ``torch.compile`` and autocast. Otherwise
    ``torch.nn.functional.rms_norm`` runs, whose results differ by rounding.

    Args:
        input_: ``[..., n]``.
        weight: ``[n]``.
        eps: added to the mean square; None means the dtype's machine epsilon.

    Returns:
        ``[..., n]``.
    """
    if dispatch.RMS_NORM.runs(input_, weight):
        output: Tensor = _RMSNorm.apply(input_, weight, torch.finfo(input_.dtype).eps if eps is None else eps)
        return output
    return F.rms_norm(input_, weight.shape, weight, eps)


def add_rms_norm(residual: Tensor, added: Tensor, weight: Tensor, eps: float | None = None) -> tuple[Tensor, Tensor]:
    """Return ``residual + added``, and ``rms_norm`` of this sum, over ``[..., n]``.

    The definition runs where ``dispatch.ADD_NORM_TRITON`` does not. On CUDA one kernel computes both; two operations
    would read the sum once more, in the backward too. ``eps`` None means the dtype's machine epsilon.
    """

    def fits() -> bool:
        row_bytes = weight.numel() * max(4, weight.element_size())
        return residual.shape == added.shape and weight.shape == residual.shape[-1:] and row_bytes <= _MAX_ROW_BYTES

    kernels = dispatch.ADD_NORM_TRITON.kernels(residual, added, weight, fits=fits)
    if kernels is None:
        total = residual + added
        return total, rms_norm(total, weight, eps)
    eps = torch.finfo(residual.dtype).eps if eps is None else eps
    both: tuple[Tensor, Tensor] = _AddRMSNorm.apply(residual, added, weight, eps, kernels)
    return both


class _AddRMSNorm(Function):
    spmd_typecheck = computed_locally("residual", "added", "weight")

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, added: Tensor, weight: Tensor, eps: float, kernels: Any
    ) -> tuple[Tensor, Tensor]:
        total, normed, scale = kernels.add_rms_norm(residual, added, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        ctx.kernels = kernels
        # Otherwise autograd creates zeros for an unused result, and the kernel reads them.
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, grad_normed: Tensor | None) -> Any:
        if grad_normed is None:
            return grad_total, grad_total, None, None, None
        total, weight, scale = ctx.saved_tensors
        grad, grad_weight = ctx.kernels.add_rms_norm_gradient(
            total, weight, scale, grad_normed, grad_total, needs_weight=ctx.needs_input_grad[2]
        )
        return grad, grad, grad_weight, None, None


class _RMSNorm(Function):
    spmd_typecheck = computed_locally("input_", "weight")

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.compiled = dispatch.ELEMENTWISE.runs(
            input_, fits=lambda: input_.size(-1) % 2 == 0 and input_.is_contiguous() and weight.is_contiguous()
        )
        if ctx.compiled:
            output, scale = compiled.rms_norm(input_, weight, eps)
            ctx.save_for_backward(input_, weight, scale)
            return output
        squares = torch.linalg.vector_norm(input_, dim=-1, keepdim=True).square_()
        scale = squares.div_(input_.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(input_, weight, scale)
        result: Tensor = (input_ * scale).mul_(weight)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input_, weight, scale = ctx.saved_tensors
        needs_input, needs_weight, _ = ctx.needs_input_grad
        if ctx.compiled:
            gradients = compiled.rms_norm_gradient(
                input_, grad_output, weight, scale, needs_input=needs_input, needs_weight=needs_weight
            )
            return *gradients, None
        width = input_.size(-1)
        products = grad_output * input_
        # Sum each row's products with the weight before the weight gradient overwrites the products.
        sums = products.matmul(weight).unsqueeze_(-1) if needs_input else None
        # ``sum`` adds pairwise; a matrix product with the scales would be faster, but six times less exact.
        grad_weight = products.mul_(scale).reshape(-1, width).sum(0) if needs_weight else None
        grad_input = None
        if sums is not None:
            factors = sums.mul_(scale**3).mul_(-1.0 / width)
            grad_input = torch.mul(grad_output, weight, out=products).mul_(scale).addcmul_(input_, factors)
        return grad_input, grad_weight, None


def reduce_norm_(
    buffers: Sequence[Tensor],
    start: int,
    residual: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Do the work of the rank that owns the rows from ``start`` on.

    Args:
        buffers: each rank's partial sum, ``[n, h]``; the owned rows are overwritten with the norm of the new residual.
        start: first owned row.
        residual: ``[m, h]``, residual of the owned rows; not modified.
        bias: ``[h]`` or None, added once.
        norm_bias: ``[h]``, bias of LayerNorm; None for RMSNorm.

    Returns:
        The new residual, ``[m, h]``. Sums and norm are in fp32 (fp64 for fp64). The norm uses the rounded residual.
    """
    rows = slice(start, start + residual.size(0))
    wide = torch.promote_types(residual.dtype, torch.float32)
    total = residual.to(wide) if bias is None else residual.to(wide) + bias.to(wide)
    for buffer in buffers:
        total = total + buffer[rows].to(wide)
    new = total.to(residual.dtype)
    centered = new.to(wide)
    if norm_bias is not None:
        centered = centered - centered.mean(-1, keepdim=True)
    normed = centered * (centered.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(wide)
    if norm_bias is not None:
        normed = normed + norm_bias.to(wide)
    for buffer in buffers:
        buffer[rows] = normed.to(buffer.dtype)
    return new


def runs_fused(buffer: Tensor) -> bool:
    """True if ``fused_reduce_norm_`` accepts a buffer ``[..., h]`` in symmetric memory; the same on every rank."""
    return dispatch.REDUCE_NORM.runs(buffer, fits=lambda: 0 < buffer.size(-1) <= MAX_WIDTH)


def fused_reduce_norm_(
    handle: Any,
    addresses: Tensor,
    start: int,
    residual: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Run ``reduce_norm_`` on every rank at once.

    ``addresses`` are those of each rank's buffer in this rank's address space, int64 ``[t]``; ``handle`` is PyTorch's
    symmetric-memory handle of the buffers.
    """
    from shardwise.kernels import norms_triton

    handle.barrier(channel=0)
    new: Tensor = norms_triton.reduce_norm_(addresses, start, residual.contiguous(), bias, weight, norm_bias, eps)
    handle.barrier(channel=0)
    return new
