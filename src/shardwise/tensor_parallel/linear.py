"""The linear map inside a tensor-parallel region, with its communication, as one autograd function.

Fusing the move with the matrix product saves a copy (the product is reduced where it lies), an autograd node, and lets
the backward's communication run while the weight gradient is computed.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.collectives.primitives import (
    Pending,
    all_gather,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    reduce_scatter,
    reduce_scatter_async,
)


class LinearParallelism(Enum):
    """What a tensor-parallel linear communicates.

    ================== ========================== ====================================================
    member             forward                    backward
    ================== ========================== ====================================================
    COLUMN             nothing (I -> V)           all-reduce of the input gradient
    COLUMN_SEQUENCE    all-gather of the input    the same again, reduce-scatter of the input gradient
    ROW                all-reduce of the output   nothing
    ROW_SEQUENCE       reduce-scatter of output   all-gather of the output gradient
    ================== ========================== ====================================================
    """

    COLUMN = "column"
    COLUMN_SEQUENCE = "column_sequence"
    ROW = "row"
    ROW_SEQUENCE = "row_sequence"


class TensorParallelLinear(Function):
    """``input @ weight.T + bias`` with the communication of ``parallelism``.

    With COLUMN_SEQUENCE only this rank's shard of the input is kept for the backward, which gathers it again
    (Korthikanti et al. 2022, section 4.2.2). A frozen weight keeps no input at all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parallelism: LinearParallelism,
        group: ProcessGroup,
    ) -> Tensor:
        ctx.parallelism = parallelism
        ctx.group = group
        needs_weight_grad = ctx.needs_input_grad[1]
        ctx.save_for_backward(input_ if needs_weight_grad else None, weight)
        return _forward(input_, weight, bias, parallelism, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        input_, weight = ctx.saved_tensors
        needs_input_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        parallelism, group = ctx.parallelism, ctx.group

        gathered_input: Pending | None = None
        if parallelism is LinearParallelism.COLUMN_SEQUENCE and needs_weight_grad:
            # In flight during the product for the input gradient.
            gathered_input = all_gather_async(input_, group=group, dim=0)
        elif parallelism is LinearParallelism.ROW_SEQUENCE:
            grad_output = all_gather(grad_output, group=group, dim=0)

        grad_input = grad_weight = grad_bias = None
        pending: Pending | None = None
        if needs_input_grad:
            grad_input = grad_output.matmul(weight)
            if parallelism is LinearParallelism.COLUMN:
                pending = all_reduce_async(grad_input, group=group, may_overwrite=True)
            elif parallelism is LinearParallelism.COLUMN_SEQUENCE:
                pending = reduce_scatter_async(grad_input, group=group, dim=0)

        # In flight: the input gradient's reduction, while the weight's and bias's gradients are computed.
        if needs_weight_grad:
            if gathered_input is not None:
                input_ = gathered_input.wait()
            grad_weight = _flat(grad_output).t().mm(_flat(input_))
        if needs_bias_grad:
            grad_bias = _flat(grad_output).sum(dim=0)
        if pending is not None:
            grad_input = pending.wait()
        return grad_input, grad_weight, grad_bias, None, None


def _flat(tensor: Tensor) -> Tensor:
    # Not -1 for the rows: it is ambiguous where a rank holds no features.
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.size(-1))


def tensor_parallel_linear(
    input_: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    parallelism: LinearParallelism,
    group: ProcessGroup,
) -> Tensor:
    """``input_ @ weight.T + bias`` on one rank's shard of the weight, with the communication of ``parallelism``.

    Args:
        input_: ``[s, b, i]`` (``[s/t, b, i]`` with COLUMN_SEQUENCE); not modified.
        weight: ``[o, i]``, this rank's shard.
        bias: ``[o]`` or None; with ROW it would be added once per rank, so it must be None there.
        parallelism: which communication.
        group: the ranks that share the layer.

    Returns:
        ``[s, b, o]`` (``[s/t, b, o]`` with ROW_SEQUENCE).

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198).
    """
    if group.size() == 1 or not torch.is_grad_enabled():
        # Nothing to communicate in a backward: autograd's own linear is all that is needed, and quicker.
        return _forward(input_, weight, bias, parallelism, group)
    if torch.is_autocast_enabled(input_.device.type):
        # Autocast ends with the forward; what the backward multiplies must have one dtype by then.
        input_, weight, bias = _autocast(input_), _autocast(weight), None if bias is None else _autocast(bias)
    output: Tensor = TensorParallelLinear.apply(input_, weight, bias, parallelism, group)
    return output


def _autocast(tensor: Tensor) -> Tensor:
    # As PyTorch's own linear: fp64 stays.
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _forward(
    input_: Tensor, weight: Tensor, bias: Tensor | None, parallelism: LinearParallelism, group: ProcessGroup
) -> Tensor:
    if parallelism is LinearParallelism.COLUMN_SEQUENCE:
        input_ = all_gather(input_, group=group, dim=0)
    output = F.linear(input_, weight, bias)
    if parallelism is LinearParallelism.ROW:
        return all_reduce(output, group=group, may_overwrite=True)
    if parallelism is LinearParallelism.ROW_SEQUENCE:
        return reduce_scatter(output, group=group, dim=0)
    return output
