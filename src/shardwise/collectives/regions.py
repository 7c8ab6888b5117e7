"""The table of layouts as autograd functions: each moves a tensor between two layouts, its backward moves the gradient.

========= ===================== ======================
layout    values on the ranks   gradient on the ranks
========= ===================== ======================
I         the same              the same
R         the same              a partial sum
V         each its shard        each its shard
P         a partial sum         the same
========= ===================== ======================

The class names are those that programs written against the reference know. Each class keeps on ``ctx`` what its
backward reads (``group`` and sizes) and nothing else: no move saves an activation. ``symbolic`` is the forward without
autograd. Moves have first derivatives only: PyTorch's collectives would give a wrong second one, so it is refused.

Sizes: a dimension that the ranks do not divide is split by the balanced rule, or by the sizes given; a gather of uneven
shards must be told them, since no sizes are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.collectives.primitives import all_gather, all_reduce, all_to_all, reduce_scatter, split_for_rank
from shardwise.sharding import balanced_sizes

Sizes = Sequence[int] | None


class _CopyToModelParallelRegion(Function):
    """I -> R: identity forward, all-reduce backward (operator f of Shoeybi et al. 2019)."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        return input_

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return input_

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return all_reduce(grad_output, group=ctx.group), None


class _ReduceFromModelParallelRegion(Function):
    """P -> I: all-reduce forward, identity backward (operator g of Shoeybi et al. 2019)."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(input_, group=group)

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(input_, group=group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output, None


class _ScatterToModelParallelRegion(Function):
    """I -> V along the last dimension: split forward, all-gather backward."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        return split_for_rank(input_, group=group, dim=-1, sizes=sizes)

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        ctx.group = group
        ctx.sizes = _uneven_sizes(input_.size(-1), group, sizes)
        return split_for_rank(input_, group=group, dim=-1, sizes=ctx.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return all_gather(grad_output, group=ctx.group, dim=-1, sizes=getattr(ctx, "sizes", None)), None, None


class _GatherFromModelParallelRegion(Function):
    """V -> I along the last dimension: all-gather forward, split backward."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        return all_gather(input_, group=group, dim=-1, sizes=sizes)

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        ctx.group = group
        ctx.sizes = sizes
        return all_gather(input_, group=group, dim=-1, sizes=sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return split_for_rank(grad_output, group=ctx.group, dim=-1, sizes=getattr(ctx, "sizes", None)), None, None


class _ScatterToSequenceParallelRegion(Function):
    """I -> V along the first dimension: split forward, all-gather backward."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        return split_for_rank(input_, group=group, dim=0, sizes=sizes)

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        ctx.group = group
        ctx.sizes = _uneven_sizes(input_.size(0), group, sizes)
        return split_for_rank(input_, group=group, dim=0, sizes=ctx.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return all_gather(grad_output, group=ctx.group, dim=0, sizes=getattr(ctx, "sizes", None)), None, None


class _GatherFromSequenceParallelRegion(Function):
    """V -> R along the first dimension: all-gather forward, reduce-scatter backward.

    With ``tensor_parallel_output_grad=False`` what follows is computed alike on every rank, so the move is V -> I and
    the backward only splits.
    """

    @staticmethod
    def symbolic(
        graph: Any,
        input_: Tensor,
        group: ProcessGroup,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: Sizes = None,
    ) -> Tensor:
        return all_gather(input_, group=group, dim=0, sizes=output_split_sizes)

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: ProcessGroup,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: Sizes = None,
    ) -> Tensor:
        ctx.group = group
        ctx.tensor_parallel_output_grad = tensor_parallel_output_grad
        ctx.output_split_sizes = output_split_sizes
        return all_gather(input_, group=group, dim=0, sizes=output_split_sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        move = reduce_scatter if ctx.tensor_parallel_output_grad else split_for_rank
        return move(grad_output, group=ctx.group, dim=0, sizes=ctx.output_split_sizes), None, None, None


class _ReduceScatterToSequenceParallelRegion(Function):
    """P -> V along the first dimension: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup, input_split_sizes: Sizes = None) -> Tensor:
        return reduce_scatter(input_, group=group, dim=0, sizes=input_split_sizes)

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, input_split_sizes: Sizes = None) -> Tensor:
        ctx.group = group
        ctx.input_split_sizes = _uneven_sizes(input_.size(0), group, input_split_sizes)
        return reduce_scatter(input_, group=group, dim=0, sizes=ctx.input_split_sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return all_gather(grad_output, group=ctx.group, dim=0, sizes=ctx.input_split_sizes), None, None


class _AllGatherFromTensorParallelRegion(Function):
    """V -> R along the last dimension: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        return all_gather(input_, group=group, dim=-1, sizes=sizes)

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        ctx.group = group
        ctx.sizes = sizes
        return all_gather(input_, group=group, dim=-1, sizes=sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return reduce_scatter(grad_output, group=ctx.group, dim=-1, sizes=getattr(ctx, "sizes", None)), None, None


class _ReduceScatterToTensorParallelRegion(Function):
    """P -> V along the last dimension: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        return reduce_scatter(input_, group=group, dim=-1, sizes=sizes)

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        ctx.group = group
        ctx.sizes = _uneven_sizes(input_.size(-1), group, sizes)
        return reduce_scatter(input_, group=group, dim=-1, sizes=ctx.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return all_gather(grad_output, group=ctx.group, dim=-1, sizes=getattr(ctx, "sizes", None)), None, None


class _AllToAll(Function):
    """V -> V: rows exchanged between all ranks; the backward is the inverse exchange."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, input_: Tensor, output_split_sizes: Sizes = None, input_split_sizes: Sizes = None
    ) -> Tensor:
        ctx.group = group
        ctx.output_split_sizes = output_split_sizes
        ctx.input_split_sizes = input_split_sizes
        return all_to_all(input_, group=group, output_sizes=output_split_sizes, input_sizes=input_split_sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad_input = all_to_all(
            grad_output, group=ctx.group, output_sizes=ctx.input_split_sizes, input_sizes=ctx.output_split_sizes
        )
        return None, grad_input, None, None


def _uneven_sizes(size: int, group: ProcessGroup, sizes: Sizes) -> Sizes:
    """The sizes that the backward's gather must be told: None where all ranks hold the same."""
    t = group.size()
    if sizes is not None:
        return sizes
    return None if size % t == 0 else balanced_sizes(size, t)
