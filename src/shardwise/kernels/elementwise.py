"""SwiGLU and the rotation of pairs of elements, by several PyTorch operations or by one loop or kernel.

A rotation applies to the pairs ``(i, i + r/2)`` of the first ``r`` elements of a head, or with ``interleaved`` to the
pairs ``(2i, 2i + 1)``; the other elements do not change. The gradient is rotated back. The kernel rotates queries and
keys while it splits a query-key-value projection.

``blockwise`` computes elementwise functions whose bits depend neither on where a tensor begins or ends nor on the
number of threads. On a CPU PyTorch computes most elements of a tensor with vector instructions. For the last few of
each thread's share it calls the C library, which rounds exponentials and error functions differently. Blocks that are
small enough for one thread, and a multiple of the vector length, need only vector instructions.

``softmax_of_rows`` computes the softmax whose gradient does not depend on the number of threads either.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.core.typed import computed_locally
from shardwise.kernels import compiled, dispatch

# Numbers in the vectors of PyTorch's loops in fp32.
_LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
# PyTorch gives each thread at least 2^15 elements, and its widest loop processes 64 at once.
_BLOCK = 1 << 14
VECTORS = 64


def rotate(input_: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, at_any_size: bool = False) -> Tensor:
    """Rotate every head of ``[s, b, heads, d]`` by the angles of its position, ``[s, 1 or b, 1, r/2]``.

    ``interleaved`` rotates pairs of adjacent elements. ``at_any_size`` chooses the implementation without regard to the
    number of heads.
    """
    result: Tensor = _Rotate.apply(input_, cos, sin, interleaved, at_any_size)
    return result


def split_and_rotate(
    mixed: Tensor, cos: Tensor, sin: Tensor, *, queries_per_group: int, head_dim: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into queries, keys and values, and rotate the queries and keys.

    The kernel makes all three new tensors in one pass, so the projection's output can be freed. With single operations
    the values remain a view of it, and so do the queries if each key has one query.

    Args:
        mixed: ``[s, b, groups * (n + 2) * d]``: for each group ``n`` queries, a key and a value; not modified.
        cos, sin: ``[s, 1 or b, 1, r/2]``.
        interleaved: whether to rotate pairs of adjacent elements.

    Returns:
        Queries ``[s, b, groups * n, d]``, and keys and values ``[s, b, groups, d]``.
    """
    kernels = dispatch.ELEMENTWISE_TRITON.kernels(mixed, cos, sin, fits=lambda: _angles_fit(mixed, cos, sin))
    if kernels is not None:
        made: tuple[Tensor, Tensor, Tensor] = _SplitAndRotate.apply(
            mixed, cos, sin, queries_per_group, head_dim, interleaved, kernels
        )
        return made
    query, key, value = split(mixed, queries_per_group=queries_per_group, head_dim=head_dim)
    return rotate(query, cos, sin, interleaved=interleaved), rotate(key, cos, sin, interleaved=interleaved), value


def split(mixed: Tensor, *, queries_per_group: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split as ``split_and_rotate`` does, without the rotation; returns views, except of several queries per key."""
    s, b, _ = mixed.shape
    mixed = mixed.view(s, b, -1, queries_per_group + 2, head_dim)
    query, key, value = mixed.split((queries_per_group, 1, 1), dim=3)
    return query.reshape(s, b, -1, head_dim), key.squeeze(3), value.squeeze(3)


class _Rotate(Function):
    spmd_typecheck = computed_locally("input_", "cos", "sin")

    @staticmethod
    def forward(ctx: Any, input_: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, at_any_size: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.options = interleaved, at_any_size
        return _rotate(input_, cos, sin, *ctx.options, backwards=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grad_output, cos, sin, *ctx.options, backwards=True), None, None, None, None


class _SplitAndRotate(Function):
    spmd_typecheck = computed_locally("mixed", "cos", "sin")

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_queries: int,
        head_dim: int,
        interleaved: bool,
        kernels: Any,
    ) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.kernels = interleaved, kernels
        return kernels.split_and_rotate(mixed, cos, sin, num_queries, head_dim, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return ctx.kernels.split_and_rotate_gradient(*gradients, cos, sin, ctx.interleaved), *(None,) * 6


def _rotate(
    input_: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, at_any_size: bool, *, backwards: bool
) -> Tensor:
    if not interleaved:
        turned_halves = compiled.rotate_halves(input_, cos, sin, backwards=backwards, at_any_size=at_any_size)
        if turned_halves is not None:
            return turned_halves
    kernels = dispatch.ELEMENTWISE_TRITON.kernels(input_, cos, sin, fits=lambda: _angles_fit(input_, cos, sin))
    if kernels is not None:
        turned_heads: Tensor = kernels.rotate(input_, cos, sin, interleaved, backwards=backwards)
        return turned_heads
    if backwards:
        sin = -sin
    rotated = 2 * cos.size(-1)
    first, second = _pairs(input_, rotated, interleaved)
    if torch.compiler.is_compiling():
        # The compiler does not trace writes into parts of a tensor, and does not need them.
        turned = (first * cos - second * sin, second * cos + first * sin)
        together = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
        return torch.cat((together, input_[..., rotated:]), dim=-1) if rotated < input_.size(-1) else together
    output = torch.empty(input_.shape, dtype=input_.dtype, device=input_.device)
    to_first, to_second = _pairs(output, rotated, interleaved)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    if rotated < input_.size(-1):
        output[..., rotated:] = input_[..., rotated:]
    return output


def _angles_fit(input_: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """True if angles are ``[s, 1 or b, 1, r/2]`` for heads ``[s, b, ...]``."""
    s, b = input_.shape[:2]
    return cos.shape == sin.shape and cos.dim() == 4 and cos.shape[:3] in ((s, 1, 1), (s, b, 1))


def _pairs(tensor: Tensor, rotated: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second element of each pair."""
    if interleaved:
        return tensor[..., 0:rotated:2], tensor[..., 1:rotated:2]
    return tensor[..., : rotated // 2], tensor[..., rotated // 2 : rotated]


def swiglu(inner: Tensor, *, at_any_size: bool = False) -> Tensor:
    """Compute ``silu(gate) * up`` (Shazeer 2020, arXiv:2002.05202) of ``[..., 2f]``, the gates first.

    The definition runs if ``dispatch`` chooses nothing faster. Its single operations keep gate, up and the activated
    gate for the backward, and round the activated gate to the tensors' dtype. ``at_any_size`` gives an element the same
    bits for any number of elements and any row length.
    """
    is_even, cpu = inner.size(-1) % 2 == 0, dispatch.ELEMENTWISE
    size = cpu.min_size if at_any_size else None
    kernels = cpu.kernels(
        inner, size=size, fits=lambda: inner.is_contiguous() and is_even
    ) or dispatch.ELEMENTWISE_TRITON.kernels(inner, fits=lambda: is_even)
    if kernels is None:
        gate, up = inner.chunk(2, dim=-1)
        return (blockwise(F.silu, gate) if at_any_size else F.silu(gate)) * up
    output: Tensor = _SwiGLU.apply(inner, kernels)
    return output


class _SwiGLU(Function):
    spmd_typecheck = computed_locally("inner")

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


def blockwise(function: Callable[[Tensor], Tensor], input_: Tensor) -> Tensor:
    """Compute an elementwise function with a gradient, block by block on a CPU."""
    if not input_.is_cpu:
        return function(input_)
    output: Tensor = _InBlocks.apply(input_, function)
    return output


class _InBlocks(Function):
    spmd_typecheck = computed_locally("input_")

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
    """Split all elements, in order, into blocks of whole vectors; zeros pad the last block."""
    flat = tensor.detach().reshape(-1)
    blocks: tuple[Tensor, ...] = F.pad(flat, (0, -flat.numel() % VECTORS)).split(_BLOCK)
    return blocks


def softmax_of_rows(input_: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute ``input_.softmax(-1, dtype=dtype)``, whose gradient has the same bits at any number of threads.

    PyTorch's gradient sums ``gradient * output`` over a row, vector by vector. One thread and several threads run two
    copies of this loop, which round the products of a last vector that is not full in two ways: one copy fuses product
    and sum. On a CPU, zeros therefore fill the last vector of rows that are longer than a vector.
    """
    input_ = input_ if dtype is None else input_.to(dtype)
    if not input_.is_cpu or input_.size(-1) <= _LANES or input_.size(-1) % _LANES == 0:
        return input_.softmax(dim=-1)
    output: Tensor = _SoftmaxOfRows.apply(input_)
    return output


class _SoftmaxOfRows(Function):
    spmd_typecheck = computed_locally("input_")

    @staticmethod
    def forward(ctx: Any, input_: Tensor) -> Tensor:
        output = input_.softmax(dim=-1)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        grad, whole = (F.pad(each, (0, -output.size(-1) % _LANES)) for each in (grad_output, output))
        gradient = torch._softmax_backward_data(grad, whole, -1, output.dtype)
        return gradient[..., : output.size(-1)].contiguous()


def rows_of(tensor: Tensor) -> Tensor:
    """Return ``[n, width]``: a view if rows are evenly spaced and columns adjacent, otherwise a copy."""
    return with_columns_together(tensor.reshape(-1, tensor.size(-1)))


def with_columns_together(tensor: Tensor) -> Tensor:
    """Return the tensor if its columns are adjacent, otherwise a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.size(-1) == 1 else tensor.contiguous()
