"""Parameters that every rank holds whole, in a group that sums over parts (``core.communication.trees``).

Their gradient is a sum over tokens. The sequence is cut into ``exact_parts`` parts, and each part's tokens are summed
by themselves. With sequence parallelism a rank has some of the parts, without it all of them.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.trees import exact_parts, tree_sum, tree_sum_stacked_
from shardwise.core.errors import ShardingError
from shardwise.kernels import compiled, dispatch
from shardwise.nn.norm import HeadsRMSNorm, NormFunction

# MKL multiplies fewer than 12 rows in other ways at other numbers of threads.
_FEW = 16


def apply_norm(norm: nn.Module, input_: Tensor, *, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """``norm(input_)``, part by part of the sequence.

    Args:
        norm: one of ``nn.norm.NORMS``.
        input_: ``[s, b, h]``, or ``[s/t, b, h]`` with sequence parallelism.
        group: the ranks that share the sequence; it sums over parts.
        sequence_parallel: whether each rank holds its shard of it.

    Raises:
        ShardingError: the parts are not of one size.
    """
    number = _num_parts(input_, group, sequence_parallel)
    return norm_by_parts(norm, input_, number, group if sequence_parallel and group.size() > 1 else None)


def norm_by_parts(norm: nn.Module, input_: Tensor, number: int, others: ProcessGroup | None = None) -> Tensor:
    """``apply_norm`` where this rank has ``number`` parts of the sequence, and ``others`` have the rest."""
    function = NormFunction.of(norm)
    if _is_compiled(function, input_):
        # What a row gets does not depend on the others; only the weight's gradient goes by parts.
        normed: Tensor = _RMSNormByParts.apply(input_, function.whole_weight, function.eps, number, others)
        return normed
    weights = moves.copies(function.weight, number, group=others)
    biases = (None,) * number if function.bias is None else moves.copies(function.bias, number, group=others)
    functions = (
        dataclasses.replace(function, weight=weight, bias=bias) for weight, bias in zip(weights, biases, strict=True)
    )
    return torch.cat([_norm_by_rows(each, part) for each, part in zip(functions, input_.chunk(number), strict=True)])


def add_bias(output: Tensor, bias: Tensor, *, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """``output + bias``, in a group that sums over parts; ``output`` as ``apply_norm``'s input."""
    number = _num_parts(output, group, sequence_parallel)
    return add_bias_by_parts(output, bias, number, group if sequence_parallel and group.size() > 1 else None)


def add_bias_by_parts(output: Tensor, bias: Tensor, number: int, others: ProcessGroup | None = None) -> Tensor:
    """``add_bias`` where this rank has ``number`` parts of the sequence, and ``others`` have the rest."""
    result: Tensor = _AddBias.apply(output, bias, number, others)
    return result


def linear_by_rows(input_: Tensor, weight: Tensor, *, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """``input_ @ weight.T`` by a weight that every rank holds, in a group that sums over parts.

    Args:
        input_: as ``apply_norm``'s.
        weight: ``[o, i]``, the same on every rank; multiplied in the input's dtype.
        group: the ranks that share the sequence.
        sequence_parallel: whether each rank holds its shard of it.

    Raises:
        ShardingError: the parts are not of one size.
    """
    number = _num_parts(input_, group, sequence_parallel)
    return linear_by_parts(input_, weight, number, group if sequence_parallel and group.size() > 1 else None)


def linear_by_parts(input_: Tensor, weight: Tensor, number: int, others: ProcessGroup | None = None) -> Tensor:
    """``linear_by_rows`` where this rank has ``number`` parts of the sequence, and ``others`` have the rest."""
    weights = moves.copies(weight, number, group=others)
    return torch.cat(
        [_linear(part, each.to(part.dtype)) for part, each in zip(input_.chunk(number), weights, strict=True)]
    )


def _linear(input_: Tensor, weight: Tensor) -> Tensor:
    """The product for any number of rows. Those of few rows have other bits at other numbers of threads."""
    rows = input_.flatten(0, -2)
    few = rows.size(0) if rows.size(0) < _FEW else None
    if few is not None:
        rows = F.pad(rows, (0, 0, 0, _FEW - few))
    return F.linear(rows, weight)[:few].view(*input_.shape[:-1], weight.size(0))


def norm_heads(norm: nn.Module, heads: Tensor, *, group: ProcessGroup) -> Tensor:
    """A norm of queries or keys in a group that sums over parts.

    What is summed over all ranks' heads is cut into as many parts of whole heads as there can be.

    Args:
        norm: of each head by itself, one of ``nn.norm.NORMS``, or of all heads together.
        heads: ``[s, b, heads/t, d]``, as many on each rank.
        group: the ranks that share the heads.
    """
    parts, local = exact_parts(group), heads.size(2)
    assert parts is not None
    number, others = min(parts // group.size(), local & -local), group if group.size() > 1 else None
    if isinstance(norm, HeadsRMSNorm):
        return _norm_heads_together(norm, heads, number, others)
    function = NormFunction.of(norm)
    weights = moves.copies(function.weight, number, group=others)
    biases = (None,) * number if function.bias is None else moves.copies(function.bias, number, group=others)
    normed = [
        _norm_by_rows(dataclasses.replace(function, weight=weight, bias=bias), part.contiguous())
        for weight, bias, part in zip(weights, biases, heads.chunk(number, 2), strict=True)
    ]
    return torch.cat(normed, 2)


def _norm_heads_together(norm: HeadsRMSNorm, heads: Tensor, number: int, others: ProcessGroup | None) -> Tensor:
    parts = [part.contiguous() for part in heads.chunk(number, 2)]
    sums = [norm.squares_of(part) for part in parts]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    squares = moves.copies(sums[0] if others is None else moves.reduce(sums[0], group=others), number, group=others)
    weights, width, first = moves.copies(norm.weight, number, group=others), heads.size(2) // number, norm.heads[0]
    normed = [
        norm.norm_some(part, square, weight, (first + i * width, first + (i + 1) * width))
        for i, (part, square, weight) in enumerate(zip(parts, squares, weights, strict=True))
    ]
    return torch.cat(normed, 2)


def _norm_by_rows(norm: NormFunction, input_: Tensor) -> Tensor:
    if norm.normalization == "RMSNorm":
        return norm(input_)
    output: Tensor = _LayerNormByRows.apply(input_, norm.whole_weight, norm.bias, norm.eps)
    return output


def _is_compiled(norm: NormFunction, input_: Tensor) -> bool:
    """Whether our loops norm the rows, at any number of them."""
    if norm.normalization != "RMSNorm" or input_.size(-1) % 2:
        return False
    return dispatch.ELEMENTWISE.runs(input_, norm.weight, size=dispatch.ELEMENTWISE.min_size)


class _RMSNormByParts(Function):
    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, weight: Tensor, eps: float, number: int, group: ProcessGroup | None
    ) -> Tensor:
        input_ = input_.contiguous()
        output, scale = compiled.rms_norm(input_, weight, eps)
        ctx.save_for_backward(input_, weight, scale)
        ctx.number, ctx.group = number, group
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        input_, weight, scale = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        grad_input, total = compiled.rms_norm_gradient(
            input_, grad, weight, scale, needs_input=needs_input, needs_weight=needs_weight, num_parts=ctx.number
        )
        if total is not None:
            total = tree_sum_stacked_(total)
            total = total if ctx.group is None else all_reduce(total, group=ctx.group)
        return grad_input, total, None, None, None


class _LayerNormByRows(Function):
    """LayerNorm whose gradients of weight and bias are sums over the rows in one order, however many threads add."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        output, mean, scale = torch.native_layer_norm(input_, weight.shape, weight, bias, eps)
        ctx.save_for_backward(input_, weight, bias, mean, scale)
        result: Tensor = output
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        input_, weight, bias, mean, scale = ctx.saved_tensors
        grad = grad.contiguous()
        numbers = (grad, input_, weight.shape, mean, scale, weight, bias)
        grad_input = torch.ops.aten.native_layer_norm_backward(*numbers, [True, False, False])[0]
        normed = (input_ - mean) * scale
        return grad_input, *(x.flatten(0, -2).sum(0).to(weight.dtype) for x in (grad * normed, grad)), None


class _AddBias(Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: Tensor, number: int, group: ProcessGroup | None) -> Tensor:
        ctx.number, ctx.group, ctx.dtype = number, group, bias.dtype
        return output + bias.to(output.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = None
        if ctx.needs_input_grad[1]:
            total = tree_sum([part.flatten(0, -2).sum(0) for part in grad.contiguous().chunk(ctx.number)])
            total = (total if ctx.group is None else all_reduce(total, group=ctx.group)).to(ctx.dtype)
        return grad, total, None, None


def _num_parts(input_: Tensor, group: ProcessGroup, sequence_parallel: bool) -> int:
    """The number of parts of the sequence whose tokens this rank has."""
    parts = exact_parts(group)
    assert parts is not None
    number = parts // group.size() if sequence_parallel else parts
    if input_.size(0) % number == 0:
        return number
    if torch.is_grad_enabled():
        raise ShardingError(
            f"exact: {input_.size(0)} positions of a sequence cannot be cut into {number} equal parts on each of "
            f"{group.size()} ranks; use a length that is a multiple of {parts}, or fewer exact_parts"
        )
    # There is no gradient to sum.
    return 1
