"""The allocations of kernels on CUDA, for a plan that computes with fake CPU tensors (``dispatch.planning_for``).

Each function has the name and the arguments of the original in ``loss_triton``, ``elementwise_triton``,
``norms_triton`` or ``flexible_attention``, and allocates the same without values: results, sums, and copies of strided
arguments while it runs.
``functions_on_cuda`` does the same for attention, RMSNorm and dropout: PyTorch's kernels for them on CUDA keep other
tensors for the backward than its operations on a CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from shardwise.kernels.elementwise import rows_of, with_columns_together
from shardwise.kernels.loss_reference import compute_dtype
from shardwise.kernels.partial_attention import is_causal_bias

# As in ``norms_triton``.
_PROGRAMS = 264


def row_statistics(logits: Tensor, target_local: Tensor, *, want_sum: bool = False, **options: Any) -> Tensor:
    return logits.new_empty(logits.size(0), 4 if want_sum else 3, dtype=compute_dtype(logits.dtype))


def gradient_(*tensors: Any, **options: Any) -> None:
    """As ``loss_reference.gradient_``, which allocates nothing."""


def swiglu(inner: Tensor) -> Tensor:
    """Allocate the ``[..., f]`` product of SwiGLU on ``[..., 2 f]``."""
    output = inner.new_empty(*inner.shape[:-1], inner.size(-1) // 2)
    _read = rows_of(inner)
    return output


def swiglu_gradient(inner: Tensor, grad_output: Tensor) -> Tensor:
    """The gradient of ``swiglu``'s input."""
    gradient = inner.new_empty(inner.shape)
    _read = rows_of(inner), rows_of(grad_output)
    return gradient


def rotate(input_: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, backwards: bool) -> Tensor:
    output = input_.new_empty(input_.shape)
    _read = with_columns_together(input_), cos.contiguous(), sin.contiguous()
    return output


def split_and_rotate(
    mixed: Tensor, cos: Tensor, sin: Tensor, per_group: int, head_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    s, b, rows = mixed.shape
    groups = rows // (head_dim * (per_group + 2))
    query, key, value = (mixed.new_empty(s, b, heads, head_dim) for heads in (groups * per_group, groups, groups))
    _read = with_columns_together(mixed), cos.contiguous(), sin.contiguous()
    return query, key, value


def split_and_rotate_gradient(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """The gradient of ``split_and_rotate``'s input."""
    s, b, _, head_dim = key.shape
    gradient = query.new_empty(s, b, (query.size(2) + 2 * key.size(2)) * head_dim)
    _read = *map(with_columns_together, (query, key, value)), cos.contiguous(), sin.contiguous()
    return gradient


def add_rms_norm(residual: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, its norm, and a number for each row."""
    _read = rows_of(residual), rows_of(added)
    total, normed = (residual.new_empty(residual.shape) for _ in range(2))
    return total, normed, residual.new_empty(residual.shape[:-1].numel(), dtype=compute_dtype(residual.dtype))


def add_rms_norm_gradient(
    total: Tensor, weight: Tensor, scale: Tensor, grad_normed: Tensor, grad_total: Tensor | None, *, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of either term of the sum and of the weight."""
    rows = rows_of(grad_normed)
    _read = None if grad_total is None else rows_of(grad_total)
    gradient = torch.empty_like(total)
    sums = scale.new_empty(min(rows.size(0), _PROGRAMS) if needs_weight else 0, rows.size(1))
    return gradient, sums.sum(0).to(weight.dtype) if needs_weight else None


def attend(
    query: Tensor, key: Tensor, value: Tensor, functions: Callable[[], Any], *, scale: float, has_sums: bool
) -> tuple[Tensor, Tensor | None]:
    """As ``flexible_attention.attend``; its functions, and the blocks of its mask, take little memory."""
    grouped = query.size(1) > key.size(1)
    output = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=grouped)
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32) if has_sums else None


def functions_on_cuda(count_flops: Callable[[int], None]) -> dict[str, Callable[..., Tensor]]:
    """Replacements for functions of ``torch.nn.functional`` that keep what PyTorch's kernels on CUDA keep."""
    attention, dropout = F.scaled_dot_product_attention, F.dropout

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        # In fp64 CUDA has explicit products only.
        if query.dtype == torch.float64:
            return attention(query, key, value, attn_mask, **options)
        mask = None if is_causal_bias(attn_mask) else attn_mask
        output: Tensor = _Attention.apply(query, key, value, mask, count_flops)
        return output

    def norm(input_: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        output: Tensor = _RMSNorm.apply(input_, weight)
        return output

    def drop(input_: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        output: Tensor = _Dropout.apply(input_) if training and p > 0 else dropout(input_, p, training, inplace)
        return output

    return {"scaled_dot_product_attention": attend, "rms_norm": norm, "dropout": drop}


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, count_flops: Callable[[int], None]
    ) -> Tensor:
        # Flash attention's output lies by tokens, as its queries do.
        output = torch.empty_like(query)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums, mask)
        # As PyTorch's counter: two products, each of all queries with all keys.
        ctx.count_flops, ctx.flops = count_flops, 4 * query.numel() * key.size(2)
        count_flops(ctx.flops)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        # Five products; one repeats the forward's.
        ctx.count_flops(ctx.flops * 5 // 2)
        # Gradients of grouped keys and values are made for each query, and summed.
        wide = (torch.empty_like(query) for _ in range(2)) if key.size(1) < query.size(1) else ()
        held = list(wide)
        gradients = tuple(torch.empty_like(each) for each in (query, key, value))
        del held
        return *gradients, None, None


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor | None) -> Tensor:
        scale = input_.new_empty(*input_.shape[:-1], 1, dtype=compute_dtype(input_.dtype))
        ctx.save_for_backward(input_, weight, scale)
        return torch.empty_like(input_)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input_, weight, _ = ctx.saved_tensors
        return torch.empty_like(input_), None if weight is None else torch.empty_like(weight)


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor) -> Tensor:
        ctx.save_for_backward(input_.new_empty(input_.shape, dtype=torch.bool))
        return torch.empty_like(input_)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.empty_like(gradient)
