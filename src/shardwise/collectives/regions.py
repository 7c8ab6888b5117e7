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
autograd. ``backward`` asks of a context that a program made only its ``group`` and returns as many values to it as the
reference; autograd, whose contexts have ``sizes``, gets one for each argument. Moves have first derivatives only:
PyTorch's collectives would give a wrong second one, so it is refused.

Sizes: a dimension that the ranks do not divide is split by the balanced rule, or by the sizes given; a gather of uneven
shards must be told them, since no sizes are exchanged.

With a ``GlobalMemoryBuffer`` as ``use_global_buffer`` the forward's result lies in its tensor "mpu" and is overwritten
by the next such call; autograd refuses a backward that would read the overwritten values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.collectives.buffers import GlobalMemoryBuffer
from shardwise.collectives.primitives import all_gather, all_reduce, all_to_all, reduce_scatter, split_for_rank
from shardwise.errors import ConfigError
from shardwise.sharding import checked_dim, uneven_sizes

Sizes = Sequence[int] | None
Buffer = GlobalMemoryBuffer | bool
"""Where a move's result lies: False for memory of its own."""


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
        ctx.sizes = sizes or _uneven(input_, -1, group)
        return split_for_rank(input_, group=group, dim=-1, sizes=ctx.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return _gradients(ctx, all_gather(grad_output, group=ctx.group, dim=-1, sizes=_sizes(ctx)))


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
        return _gradients(ctx, split_for_rank(grad_output, group=ctx.group, dim=-1, sizes=_sizes(ctx)))


class _ScatterToSequenceParallelRegion(Function):
    """I -> V along the first dimension: split forward, all-gather backward."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        return split_for_rank(input_, group=group, dim=0, sizes=sizes)

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        ctx.group = group
        ctx.sizes = sizes or _uneven(input_, 0, group)
        return split_for_rank(input_, group=group, dim=0, sizes=ctx.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return _gradients(ctx, all_gather(grad_output, group=ctx.group, dim=0, sizes=_sizes(ctx)))


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
        use_global_buffer: Buffer = False,
    ) -> Tensor:
        return _in_buffer(all_gather(input_, group=group, dim=0, sizes=output_split_sizes), use_global_buffer)

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: ProcessGroup,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: Sizes = None,
        use_global_buffer: Buffer = False,
    ) -> Tensor:
        ctx.group = group
        ctx.tensor_parallel_output_grad = tensor_parallel_output_grad
        ctx.output_split_sizes = output_split_sizes
        return _in_buffer(all_gather(input_, group=group, dim=0, sizes=output_split_sizes), use_global_buffer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        move = reduce_scatter if getattr(ctx, "tensor_parallel_output_grad", True) else split_for_rank
        sizes = getattr(ctx, "output_split_sizes", None)
        return move(grad_output, group=ctx.group, dim=0, sizes=sizes), None, None, None, None


class _ReduceScatterToSequenceParallelRegion(Function):
    """P -> V along the first dimension: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def symbolic(
        graph: Any,
        input_: Tensor,
        group: ProcessGroup,
        input_split_sizes: Sizes = None,
        use_global_buffer: Buffer = False,
    ) -> Tensor:
        return _in_buffer(reduce_scatter(input_, group=group, dim=0, sizes=input_split_sizes), use_global_buffer)

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: ProcessGroup,
        input_split_sizes: Sizes = None,
        use_global_buffer: Buffer = False,
    ) -> Tensor:
        ctx.group = group
        ctx.input_split_sizes = input_split_sizes or _uneven(input_, 0, group)
        return _in_buffer(reduce_scatter(input_, group=group, dim=0, sizes=input_split_sizes), use_global_buffer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        sizes = getattr(ctx, "input_split_sizes", None)
        return all_gather(grad_output, group=ctx.group, dim=0, sizes=sizes), None, None, None


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
        return _gradients(ctx, reduce_scatter(grad_output, group=ctx.group, dim=-1, sizes=_sizes(ctx)))


class _ReduceScatterToTensorParallelRegion(Function):
    """P -> V along the last dimension: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        return reduce_scatter(input_, group=group, dim=-1, sizes=sizes)

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        ctx.group = group
        ctx.sizes = sizes or _uneven(input_, -1, group)
        return reduce_scatter(input_, group=group, dim=-1, sizes=ctx.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return _gradients(ctx, all_gather(grad_output, group=ctx.group, dim=-1, sizes=_sizes(ctx)))


class _AllToAll(Function):
    """V -> V: rows exchanged between all ranks; the backward is the inverse exchange."""

    @staticmethod
    def symbolic(
        graph: Any,
        group: ProcessGroup,
        input_: Tensor,
        output_split_sizes: Sizes = None,
        input_split_sizes: Sizes = None,
    ) -> Tensor:
        return all_to_all(input_, group=group, output_sizes=output_split_sizes, input_sizes=input_split_sizes)

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
            grad_output,
            group=ctx.group,
            output_sizes=getattr(ctx, "input_split_sizes", None),
            input_sizes=getattr(ctx, "output_split_sizes", None),
        )
        return None, grad_input, None, None


def _uneven(input_: Tensor, dim: int, group: ProcessGroup) -> Sizes:
    """Every rank's size where they differ; ShardingError for a scalar, which cannot be split."""
    return uneven_sizes(input_.size(checked_dim(dim, input_.shape)), group.size())


def _sizes(ctx: Any) -> Sizes:
    sizes: Sizes = getattr(ctx, "sizes", None)
    return sizes


def _gradients(ctx: Any, grad_input: Tensor) -> Any:
    """The gradient of a move's tensor, and None for its other arguments: group and, in autograd's contexts, sizes."""
    return (grad_input, None, None) if hasattr(ctx, "sizes") else (grad_input, None)


def _in_buffer(result: Tensor, buffer: Buffer) -> Tensor:
    """``result``, copied into the communication buffer if there is one."""
    if buffer is False:
        return result
    if not isinstance(buffer, GlobalMemoryBuffer):
        raise ConfigError(
            f"use_global_buffer is {buffer!r}; this function needs the buffer itself, such as "
            "parallel_state.get_global_memory_buffer()"
        )
    return buffer.get_tensor(result.shape, result.dtype, "mpu", device=result.device).copy_(result)
