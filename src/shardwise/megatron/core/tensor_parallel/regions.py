"""The moves between layouts as the autograd functions that programs written for Megatron know by name.

What each does stands in ``shardwise.core.communication.moves``. ``symbolic`` is the forward without autograd.
``backward`` asks of a context that a program made only its ``group`` and returns as many values to it as Megatron's;
autograd, whose contexts have ``sizes``, gets one for each argument.

With ``use_global_buffer`` (True for the ambient topology's buffer, or a ``GlobalMemoryBuffer``) the result lies in the
buffer's tensor "mpu" and is overwritten by the next such call; autograd refuses a backward that would read overwritten
values.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, split_for_rank
from shardwise.core.communication.context import GlobalMemoryBuffer
from shardwise.core.communication.moves import _Copy, _Reduce, split_sizes
from shardwise.megatron.core.parallel_state import get_global_memory_buffer
from shardwise.megatron.errors import AssertedTopologyError

Sizes = Sequence[int] | None


class _Region(Function):
    """A move between layouts."""

    @classmethod
    def symbolic(cls, graph: Any, *args: Any, **options: Any) -> Any:
        """What ``forward`` returns of these arguments, without autograd."""
        return cls.forward(types.SimpleNamespace(), *args, **options)


class _CopyToModelParallelRegion(_Copy, _Region):
    """I -> R."""


class _ReduceFromModelParallelRegion(_Reduce, _Region):
    """P -> I."""


def _region(name: str, moves: str, forward: Callable[..., Tensor], adjoint: Callable[..., Tensor], dim: int) -> Any:
    """The autograd function of a move along ``dim``.

    Args:
        name: of the class.
        moves: from which layout to which.
        forward: the collective of the forward.
        adjoint: that of the backward.
        dim: -1 or 0.
    """
    knows_sizes = forward is not all_gather

    def forward_(ctx: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        ctx.group = group
        ctx.sizes = split_sizes(input_, dim, group, sizes) if knows_sizes else sizes
        return forward(input_, group=group, dim=dim, sizes=ctx.sizes)

    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad_input = adjoint(grad_output, group=ctx.group, dim=dim, sizes=getattr(ctx, "sizes", None))
        return (grad_input, None, None) if hasattr(ctx, "sizes") else (grad_input, None)

    namespace = {
        "__doc__": moves,
        "__module__": __name__,
        "forward": staticmethod(forward_),
        "backward": staticmethod(once_differentiable(backward)),
    }
    return types.new_class(name, (_Region,), exec_body=lambda body: body.update(namespace))


_ScatterToModelParallelRegion = _region(
    "_ScatterToModelParallelRegion", "I -> V along the last dimension.", split_for_rank, all_gather, -1
)
_GatherFromModelParallelRegion = _region(
    "_GatherFromModelParallelRegion", "V -> I along the last dimension.", all_gather, split_for_rank, -1
)
_ScatterToSequenceParallelRegion = _region(
    "_ScatterToSequenceParallelRegion", "I -> V along the first dimension.", split_for_rank, all_gather, 0
)
_AllGatherFromTensorParallelRegion = _region(
    "_AllGatherFromTensorParallelRegion", "V -> R along the last dimension.", all_gather, reduce_scatter, -1
)
_ReduceScatterToTensorParallelRegion = _region(
    "_ReduceScatterToTensorParallelRegion", "P -> V along the last dimension.", reduce_scatter, all_gather, -1
)


class _GatherFromSequenceParallelRegion(_Region):
    """V -> R along the first dimension; V -> I with ``tensor_parallel_output_grad=False``."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: ProcessGroup,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: Sizes = None,
        use_global_buffer: GlobalMemoryBuffer | bool = False,
    ) -> Tensor:
        ctx.group = group
        ctx.tensor_parallel_output_grad, ctx.output_split_sizes = tensor_parallel_output_grad, output_split_sizes
        return _in_buffer(all_gather(input_, group=group, sizes=output_split_sizes), use_global_buffer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        adjoint = reduce_scatter if getattr(ctx, "tensor_parallel_output_grad", True) else split_for_rank
        sizes = getattr(ctx, "output_split_sizes", None)
        return adjoint(grad_output, group=ctx.group, dim=0, sizes=sizes), None, None, None, None


class _ReduceScatterToSequenceParallelRegion(_Region):
    """P -> V along the first dimension."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: ProcessGroup,
        input_split_sizes: Sizes = None,
        use_global_buffer: GlobalMemoryBuffer | bool = False,
    ) -> Tensor:
        ctx.group = group
        ctx.input_split_sizes = split_sizes(input_, 0, group, input_split_sizes)
        return _in_buffer(reduce_scatter(input_, group=group, sizes=input_split_sizes), use_global_buffer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        sizes = getattr(ctx, "input_split_sizes", None)
        return all_gather(grad_output, group=ctx.group, sizes=sizes), None, None, None


class _AllToAll(_Region):
    """V -> V: rows exchanged between all ranks."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, input_: Tensor, output_split_sizes: Sizes = None, input_split_sizes: Sizes = None
    ) -> Tensor:
        ctx.group, ctx.output_split_sizes, ctx.input_split_sizes = group, output_split_sizes, input_split_sizes
        return all_to_all(input_, group=group, output_sizes=output_split_sizes, input_sizes=input_split_sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        received, sent = getattr(ctx, "input_split_sizes", None), getattr(ctx, "output_split_sizes", None)
        return None, _AllToAll.symbolic(None, ctx.group, grad_output, received, sent), None, None


def _in_buffer(result: Tensor, buffer: GlobalMemoryBuffer | bool) -> Tensor:
    """``result``, copied into the buffer if there is one."""
    if buffer is False:
        return result
    buffer = get_global_memory_buffer() if buffer is True else buffer
    return buffer.get_tensor(result.shape, result.dtype, "mpu", device=result.device).copy_(result)


def _given(group: ProcessGroup | None) -> ProcessGroup:
    if group is None:
        raise AssertedTopologyError(
            "group is None; this function is given its group: pass parallel_state.get_tensor_model_parallel_group()"
        )
    return group


# The forwards alone, under Megatron's names. They take no part in autograd.


def _reduce(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of every rank's tensor; the argument stays as it is."""
    return all_reduce(input_, group=_given(group))


def _split_along_last_dim(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's part of the last dimension."""
    return split_for_rank(input_, group=_given(group), dim=-1)


def _split_along_first_dim(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's part of the first dimension."""
    return split_for_rank(input_, group=_given(group), dim=0)


def _gather_along_last_dim(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """Every rank's tensor, side by side along the last dimension."""
    return all_gather(input_, group=_given(group), dim=-1)


def _gather_along_first_dim(
    input_: Tensor, group: ProcessGroup | None, output_split_sizes: Sizes = None, use_global_buffer: bool = False
) -> Tensor:
    """Every rank's tensor, one after the other along the first dimension."""
    return _in_buffer(all_gather(input_, group=_given(group), sizes=output_split_sizes), use_global_buffer)


def _reduce_scatter_along_first_dim(
    input_: Tensor, group: ProcessGroup | None, input_split_sizes: Sizes = None, use_global_buffer: bool = False
) -> Tensor:
    """This rank's part, along the first dimension, of the sum of every rank's tensor."""
    return _in_buffer(reduce_scatter(input_, group=_given(group), sizes=input_split_sizes), use_global_buffer)


def _reduce_scatter_along_last_dim(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's part, along the last dimension, of the sum of every rank's tensor."""
    return reduce_scatter(input_, group=_given(group), dim=-1)
