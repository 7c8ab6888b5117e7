"""Tensor-parallel linear function: the matrix product and its communication as one autograd function.

Fusing the move with the product saves an autograd node and, because the product is reduced in place, a copy. It also
overlaps the backward's communication with the computation of the weight gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.communication.collectives import (
    all_gather,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    reduce_scatter,
    reduce_scatter_async,
)
from shardwise.core.communication.context import context_of
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.layout import I, Layout, V, hidden_layout
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import uneven_sizes
from shardwise.core.typed import check_move
from shardwise.kernels.products import Products, add_product_, autocast, main_grad_of
from shardwise.nn.overlapped import gather_matmul, matmul_scatter
from shardwise.nn.quantization import QuantizedTensor, quantized_linear
from shardwise.nn.recompute import is_kept_briefly
from shardwise.nn.weight_gradient import WeightGradient, WeightGradientQueue


class LinearParallelism(Enum):
    """The communication of a tensor-parallel linear.

    ================== ========================== ==============================================================
    member             forward                    backward
    ================== ========================== ==============================================================
    LOCAL              nothing                    nothing
    COLUMN             nothing (I -> V)           all-reduce of the input gradient
    COLUMN_SEQUENCE    all-gather of the input    all-gather of the input, reduce-scatter of the input gradient
    ROW                all-reduce of the output   nothing
    ROW_SEQUENCE       reduce-scatter of output   all-gather of the output gradient
    ================== ========================== ==============================================================
    """

    LOCAL = "local"
    COLUMN = "column"
    COLUMN_SEQUENCE = "column_sequence"
    ROW = "row"
    ROW_SEQUENCE = "row_sequence"

    @property
    def outside(self) -> Layout | None:
        """Layout of a column layer's input and a row layer's output, ``[s, b, h]``; None for LOCAL."""
        if self is LinearParallelism.LOCAL:
            return None
        return hidden_layout(sequence_parallel=self in _OVERLAPPED)


_USUAL = Products()
_OVERLAPPED = (LinearParallelism.COLUMN_SEQUENCE, LinearParallelism.ROW_SEQUENCE)


@dataclass(frozen=True)
class LinearPlan:
    """How a linear layer multiplies and communicates; the layer's constructor makes it.

    Attributes:
        parallelism: the communication; LOCAL on one rank.
        group: the ranks that share the layer; None only with LOCAL.
        products: implementation of the products.
        overlap: whether products may overlap with communication; COLUMN_SEQUENCE and ROW_SEQUENCE then do.
        fuse, queues: destination of the weight's gradient, as in ``WeightGradient``.
    """

    parallelism: LinearParallelism
    group: ProcessGroup | None
    products: Products = _USUAL
    overlap: bool = False
    fuse: bool = False
    queues: tuple[WeightGradientQueue, ...] = ()

    @property
    def overlaps(self) -> bool:
        """True if products and communication overlap."""
        return self.overlap and self.parallelism in _OVERLAPPED

    def with_products(self, products: Products) -> LinearPlan:
        """Return the plan with other products, without overlap if these have none."""
        return replace(self, products=products, overlap=products.overlaps(wanted=self.overlap))

    def aligned(self, input_: Tensor, weight: Tensor) -> LinearPlan:
        """Return the plan with aligned output rows, if autograd records and alignment matters."""
        products = self.products.aligned(input_, weight)
        return self if products is self.products else self.with_products(products)


# Shapes of shards: s rows of the sequence, i input and o output features of the whole layer, and t ranks, each with its
# shard s/t, i/t or o/t of a split dimension.
#
#                    input         weight      output        input gradient of the backward
#   LOCAL            [s, b, i]     [o, i]      [s, b, o]     [s, b, i]
#   COLUMN           [s, b, i]     [o/t, i]    [s, b, o/t]   [s, b, i], all-reduced
#   COLUMN_SEQUENCE  [s/t, b, i]   [o/t, i]    [s, b, o/t]   [s/t, b, i], reduce-scattered
#   ROW              [s, b, i/t]   [o, i/t]    [s, b, o]     [s, b, i/t]
#   ROW_SEQUENCE     [s, b, i/t]   [o, i/t]    [s/t, b, o]   [s, b, i/t], of the gathered output gradient
#
# ``sizes`` has every rank's s/t where the balanced rule does not say it.
class TensorParallelLinear(Function):
    """``input @ weight.T + bias`` with the communication of a plan.

    With COLUMN_SEQUENCE the forward saves only this rank's shard of the input, and the backward gathers it again
    (Korthikanti et al. 2022, section 4.2.2). If saved tensors are recomputed just before the backward, the forward
    saves the gathered input instead, so the backward needs no second gather. No input is saved for a frozen weight.
    """

    @staticmethod
    def spmd_typecheck(outputs: Any, *, input_: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> None:
        parallelism, group, outside = plan.parallelism, plan.group, plan.parallelism.outside
        is_column = parallelism in (LinearParallelism.COLUMN, LinearParallelism.COLUMN_SEQUENCE)
        if outside is None:
            check_move(outputs, None, I, (input_, I), (weight, I), (bias, I))
        elif is_column:
            check_move(outputs, group, V(dim=-1), (input_, outside), (weight, V(dim=0)), (bias, V(dim=0)))
        else:
            check_move(outputs, group, outside, (input_, V(dim=-1)), (weight, V(dim=1)))

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        sizes: Sequence[int] | None,
        weight_gradient: WeightGradient | None,
    ) -> Tensor:
        ctx.plan, ctx.weight_gradient = plan, weight_gradient
        parallelism, group = plan.parallelism, plan.group
        kept = input_ if ctx.needs_input_grad[1] else None
        gathers = parallelism is LinearParallelism.COLUMN_SEQUENCE
        # The computation of a deferred gradient gathers the input.
        defers = weight_gradient is not None and weight_gradient.may_wait
        keeps_gathered = gathers and kept is not None and is_kept_briefly() and not defers
        output, whole = _multiply(input_, weight, bias, plan, sizes, keeps_gathered=keeps_gathered)
        if keeps_gathered:
            kept = whole
        if kept is not None and weight_gradient is not None:
            weight_gradient.announce(kept)
        ctx.gathers_again = gathers and not keeps_gathered
        if group is not None and parallelism is LinearParallelism.ROW_SEQUENCE:
            sizes = uneven_sizes(input_.size(0), group.size())
        ctx.sizes = sizes
        ctx.save_for_backward(kept, weight)
        # PyTorch does not allow in-place writes to a view that an autograd function returns.
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        input_, weight = ctx.saved_tensors
        needs_input_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        plan, sizes = ctx.plan, ctx.sizes
        parallelism, group, products = plan.parallelism, plan.group, plan.products
        weight_gradient: WeightGradient | None = ctx.weight_gradient
        grad_input = grad_weight = grad_bias = None
        # The output may have another dtype (``ProductsIn``).
        grad_output = grad_output.to(weight.dtype)

        if parallelism is LinearParallelism.ROW_SEQUENCE:
            if plan.overlaps and needs_input_grad:
                grad_input, gathered = gather_matmul("row backward", grad_output, weight.t(), group=group, sizes=sizes)
                grad_output = cast(Tensor, gathered)
            else:
                grad_output = all_gather(grad_output, group=group, dim=0, sizes=sizes)
        if needs_weight_grad and weight_gradient is not None and weight_gradient.defer(input_, grad_output):
            needs_weight_grad = False
            grad_weight = weight_gradient.placeholder()
        gathered_input: Pending | None = None
        if ctx.gathers_again and needs_weight_grad:
            # The gather overlaps with the product for the input gradient.
            buffer = context_of(group).buffers
            gathered_input = all_gather_async(input_, group=group, dim=0, sizes=sizes, buffer=buffer)

        pending: Pending | None = None
        if plan.overlaps and needs_input_grad:
            if parallelism is LinearParallelism.COLUMN_SEQUENCE:
                pending = matmul_scatter("column backward", grad_output, weight.t(), group=group)
        elif needs_input_grad:
            grad_input = products.input_gradient(grad_output, weight)
            if parallelism is LinearParallelism.COLUMN:
                pending = all_reduce_async(grad_input, group=group, may_overwrite=True)
            elif parallelism is LinearParallelism.COLUMN_SEQUENCE:
                pending = reduce_scatter_async(grad_input, group=group, dim=0, sizes=sizes)

        # The computation of the weight gradient overlaps with the reduction of the input gradient.
        if needs_weight_grad:
            if gathered_input is not None:
                input_ = gathered_input.wait()
            if weight_gradient is not None and weight_gradient.fuse:
                # In the dtype of `main_grad`, which may be wider, so that micro-batches are summed without rounding.
                add_product_(main_grad_of(weight_gradient.weight), _flat(grad_output), _flat(input_))
                grad_weight = weight_gradient.placeholder()
            else:
                grad_weight = products.weight_gradient(_flat(grad_output), _flat(input_))
        if needs_bias_grad:
            grad_bias = products.bias_gradient(_flat(grad_output))
        if pending is not None:
            grad_input = pending.wait()
        return grad_input, grad_weight, grad_bias, None, None, None


def _flat(tensor: Tensor) -> Tensor:
    # Not -1 for the rows, which is ambiguous if a rank holds no features.
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.size(-1))


def tensor_parallel_linear(
    input_: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    parallelism: LinearParallelism,
    group: ProcessGroup | None,
    sequence: SequenceView | None = None,
    weight_gradient: WeightGradient | None = None,
    products: Products = _USUAL,
    overlaps: bool = False,
) -> Tensor:
    """Compute ``input_ @ weight.T + bias`` for this rank's shard of the weight, with the communication of a layer.

    Args:
        input_: ``[s, b, i]`` (``[s/t, b, i]`` with COLUMN_SEQUENCE); not modified.
        weight: ``[o, i]``, this rank's shard.
        bias: ``[o]`` or None; must be None with ROW and ROW_SEQUENCE, where every rank would add it.
        parallelism: the communication.
        group: the ranks that share the layer; may be None with LOCAL.
        sequence: used with COLUMN_SEQUENCE; None if all ranks hold the same number of positions.
        weight_gradient: destination of the weight's gradient; autograd's usual one if None.
        products: implementation of the products.
        overlaps: whether to overlap products and communication of COLUMN_SEQUENCE and ROW_SEQUENCE, if ``products`` are
            the default.

    Returns:
        ``[s, b, o]`` (``[s/t, b, o]`` with ROW_SEQUENCE, by the balanced rule).

    Raises:
        ShardingError: ``sequence`` does not fit this rank's shard.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198).
    """
    if group is None or group.size() == 1:
        parallelism = LinearParallelism.LOCAL
    plan = LinearPlan(parallelism, group, products, products.overlaps(wanted=overlaps))
    return planned_linear(input_, weight, bias, plan, sequence, weight_gradient)


def planned_linear(
    input_: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    sequence: SequenceView | None = None,
    weight_gradient: WeightGradient | None = None,
) -> Tensor:
    """Compute ``tensor_parallel_linear`` by a plan."""
    sizes: Sequence[int] | None = None
    if sequence is not None and plan.parallelism is LinearParallelism.COLUMN_SEQUENCE:
        sizes = sequence.sizes_to_gather(input_)
    if isinstance(weight, QuantizedTensor):
        return plan.products.cast(_quantized(input_, weight, bias, plan.parallelism, plan.group, sizes))
    if not torch.is_grad_enabled():
        if plan.overlaps and torch.is_autocast_enabled(input_.device.type):
            input_, weight, bias = autocast(input_, weight, bias)
        return _multiply(input_, weight, bias, plan, sizes)[0]
    if plan.parallelism is LinearParallelism.LOCAL and weight_gradient is None:
        # Autograd's own linear has the right backward here, and is faster.
        return plan.products.recorded(input_, weight, bias, functools.partial(_recorded, input_, weight, bias, plan))
    factors = (input_, weight, bias)
    if torch.is_autocast_enabled(input_.device.type):
        factors = autocast(*factors)
    if not (plan.parallelism in (LinearParallelism.ROW, LinearParallelism.ROW_SEQUENCE) and is_kept_briefly()):
        output: Tensor = TensorParallelLinear.apply(*factors, plan, sizes, weight_gradient)
        return output
    # Recomputation stops after the last saved tensor. The product saves tensors and the move saves none, so as two
    # nodes they let the recomputation of a function that ends with a row layer skip the move.
    local = replace(plan, parallelism=LinearParallelism.LOCAL)
    output = TensorParallelLinear.apply(*factors, local, sizes, weight_gradient)
    return reduce_product(output, plan.parallelism, plan.group)


def _recorded(input_: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    factors = (input_, weight, bias)
    if torch.is_autocast_enabled(input_.device.type):
        factors = autocast(*factors)
    output: Tensor = TensorParallelLinear.apply(*factors, plan, None, None)
    return output


def _quantized(
    input_: Tensor,
    weight: QuantizedTensor,
    bias: Tensor | None,
    parallelism: LinearParallelism,
    group: ProcessGroup | None,
    sizes: Sequence[int] | None,
) -> Tensor:
    if group is not None and parallelism is LinearParallelism.COLUMN_SEQUENCE:
        input_ = moves.gather_for_parts(input_, dim=0, group=group, sizes=sizes)
    elif group is not None and parallelism is LinearParallelism.COLUMN:
        input_ = moves.copy(input_, group=group)
    return reduce_product(quantized_linear(input_, weight, bias), parallelism, group)


def reduce_product(output: Tensor, parallelism: LinearParallelism, group: ProcessGroup | None) -> Tensor:
    """Sum the ranks' products, as a separate move, for ROW and ROW_SEQUENCE; no-op for the others."""
    if group is not None and parallelism is LinearParallelism.ROW:
        return moves.reduce(output, group=group)
    if group is not None and parallelism is LinearParallelism.ROW_SEQUENCE:
        return moves.reduce_scatter(output, dim=0, group=group)
    return output


def _multiply(
    input_: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    sizes: Sequence[int] | None,
    *,
    keeps_gathered: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the forward without autograd; if ``keeps_gathered``, also return the gathered rows of all ranks."""
    parallelism, group, products = plan.parallelism, plan.group, plan.products
    if group is None or parallelism is LinearParallelism.LOCAL:
        return products.linear(input_, weight, bias), input_
    if parallelism is LinearParallelism.COLUMN_SEQUENCE:
        # If the gathered rows are dropped after the product, they go into a buffer that all layers share.
        buffer = None if keeps_gathered else context_of(group).buffers
        if plan.overlap:
            return gather_matmul(
                "column forward",
                input_,
                weight,
                bias,
                group=group,
                sizes=sizes,
                buffer=buffer,
                needs_whole=keeps_gathered,
            )
        input_ = all_gather_async(input_, group=group, dim=0, sizes=sizes, buffer=buffer).wait()
    elif plan.overlap and parallelism is LinearParallelism.ROW_SEQUENCE:
        return matmul_scatter("row forward", input_, weight, group=group).wait(), input_
    output = products.linear(input_, weight, bias)
    if parallelism is LinearParallelism.ROW:
        output = all_reduce(output, group=group, may_overwrite=True)
    elif parallelism is LinearParallelism.ROW_SEQUENCE:
        output = reduce_scatter(output, group=group, dim=0)
    return output, input_
