"""The moves between layouts under Megatron's names; ``shardwise.core.communication.moves`` has the table of layouts.

``group`` defaults to the ambient tensor-parallel group; without one a move raises TopologyError. No move modifies its
argument.

The autograd functions of the moves have Megatron's names too. ``symbolic`` is the forward without autograd. With a
context made by a program, ``backward`` reads only ``group`` and returns as many values as Megatron's. With a context of
autograd, which has ``sizes``, it returns one value for each argument.

With ``use_global_buffer`` (True for the ambient topology's buffer, or a ``GlobalMemoryBuffer``) the result is in the
buffer's tensor "mpu". The next such call overwrites it; a backward that needs overwritten values raises RuntimeError.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.communication import collectives, moves
from shardwise.core.communication.collectives import all_gather, all_reduce, reduce_scatter, split_for_rank
from shardwise.core.communication.context import GlobalMemoryBuffer
from shardwise.core.errors import ShardingError
from shardwise.core.sharding import balanced_sizes
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.tensor_parallel.attributes import (  # noqa: F401
    dist_all_gather_func,
    dist_reduce_scatter_func,
    divide,
)
from shardwise.megatron.errors import AssertedTopologyError
from shardwise.megatron.surface import offer

_resolve = parallel_state.resolve_tensor_model_parallel_group

Sizes = Sequence[int] | None


def copy_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Enter a tensor-parallel region with a tensor of any shape that every rank holds.

    Layout I -> R: forward identity, backward all-reduce.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), operator f.
    """
    return moves.copy(input_, group=_resolve(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum a partial result of any shape over the tensor-parallel group.

    Layout P -> I: forward all-reduce, backward identity.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), operator g.
    """
    return moves.reduce(input_, group=_resolve(group))


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Keep this rank's part of the last dimension: ``[..., n]`` to ``[..., n/t]``.

    Layout I -> V: forward split, backward all-gather.

    Args:
        sizes: every rank's size; balanced if None. ShardingError unless their sum is ``n``.
    """
    return moves.scatter(input_, dim=-1, group=_resolve(group), sizes=sizes)


def gather_from_tensor_model_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Concatenate the ranks' parts along the last dimension: ``[..., n/t]`` to ``[..., n]``.

    Layout V -> I: forward all-gather, backward split.

    Args:
        sizes: every rank's size; None means equal sizes. ShardingError if they contradict this rank's size.
    """
    return moves.gather(input_, dim=-1, group=_resolve(group), sizes=sizes)


def scatter_to_sequence_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Keep this rank's part of the first dimension: ``[s, ...]`` to ``[s/t, ...]``.

    Layout I -> V: forward split, backward all-gather.

    Args:
        sizes: every rank's size; balanced if None. ShardingError unless their sum is ``s``.
    """
    return moves.scatter(input_, dim=0, group=_resolve(group), sizes=sizes)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: ProcessGroup | None = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Concatenate the ranks' parts along the first dimension: ``[s/t, ...]`` to ``[s, ...]``.

    Layout V -> R: forward all-gather, backward reduce-scatter. With ``tensor_parallel_output_grad=False``, V -> I:
    backward split.

    Args:
        input_: this rank's part.
        tensor_parallel_output_grad: whether a tensor-parallel region follows, so that the gradient is a partial sum.
        group: tensor-parallel group; the ambient one if None.
        output_split_sizes: every rank's size; None means equal sizes. ShardingError if they contradict this rank's.
        use_global_buffer: whether to return a tensor in the "mpu" buffer, for values not needed after the next call.
    """
    result: Tensor = _GatherFromSequenceParallelRegion.apply(
        input_, _resolve(group), tensor_parallel_output_grad, output_split_sizes, use_global_buffer
    )
    return result


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: ProcessGroup | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Sum a partial result over the group and keep this rank's part of the first dimension.

    Layout P -> V, ``[s, ...]`` to ``[s/t, ...]``: forward reduce-scatter, backward all-gather.

    Args:
        input_: this rank's partial sum.
        group: tensor-parallel group; the ambient one if None.
        input_split_sizes: every rank's size; balanced if None. ShardingError unless their sum is ``s``.
        use_global_buffer: as in ``gather_from_sequence_parallel_region``.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), operator g-bar.
    """
    group, sizes = _resolve(group), input_split_sizes
    result: Tensor = _ReduceScatterToSequenceParallelRegion.apply(input_, group, sizes, use_global_buffer)
    return result


def all_gather_last_dim_from_tensor_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Like ``gather_from_tensor_model_parallel_region``, but for use in a tensor-parallel region.

    Layout V -> R: forward all-gather, backward reduce-scatter.
    """
    return moves.gather_for_parts(input_, dim=-1, group=_resolve(group), sizes=sizes)


def reduce_scatter_last_dim_to_tensor_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Sum a partial result over the group and keep this rank's part of the last dimension.

    Layout P -> V, ``[..., n]`` to ``[..., n/t]``: forward reduce-scatter, backward all-gather.

    Args:
        sizes: every rank's size; balanced if None. ShardingError unless their sum is ``n``.
    """
    return moves.reduce_scatter(input_, dim=-1, group=_resolve(group), sizes=sizes)


def all_to_all(
    group: ProcessGroup | None,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_nccl_stream: bool = False,
) -> Tensor:
    """Send consecutive rows to each rank and receive rows from each rank.

    Layout V -> V; the backward is the inverse exchange.

    Args:
        group: the ranks that take part; None raises AssertedTopologyError, as in Megatron.
        input_: ``[sum(input_split_sizes), ...]``.
        output_split_sizes_: numbers of rows received from each rank; equal parts if None.
        input_split_sizes: numbers of rows sent to each rank; equal parts if None.
        use_nccl_stream: no effect; the result is complete when the call returns.

    Returns:
        ``[sum(output_split_sizes_), ...]``.
    """
    return moves.all_to_all(
        input_, group=_checked_group(group), output_sizes=output_split_sizes_, input_sizes=input_split_sizes
    )


def all_to_all_sp2hp(input_: Tensor, group: ProcessGroup | None = None, *, num_tokens: int | None = None) -> Tensor:
    """Convert a part of the tokens with all features to all tokens with a part of the features.

    Layout V -> V, one all-to-all; the backward is the inverse exchange, ``all_to_all_hp2sp``.

    Args:
        input_: ``[n/t, h]``; leading dimensions are flattened into one.
        group: tensor-parallel group; the ambient one if None.
        num_tokens: ``n``, split by the balanced rule. None means that all parts are equal, and ``t`` divides ``h``.

    Returns:
        ``[n, h/t]``, features by the balanced rule.

    Raises:
        ShardingError: without ``num_tokens``, ``t`` does not divide ``h``; with it, this rank's part is not balanced.

    Source: Jacobs et al. 2023 (arXiv:2309.14509), section 3.
    """
    group, input_ = _resolve(group), input_.flatten(0, -2)
    rows, columns = _shares(input_, 0, num_tokens, "tokens", group)
    own_rows, own_columns = rows[group.rank()], columns[group.rank()]
    sent = torch.cat([part.reshape(-1) for part in input_.split(columns, dim=1)])
    received = moves.all_to_all(
        sent, group=group, output_sizes=[n * own_columns for n in rows], input_sizes=[own_rows * n for n in columns]
    )
    return received.view(sum(rows), own_columns)


def all_to_all_hp2sp(input_: Tensor, group: ProcessGroup | None = None, *, hidden_size: int | None = None) -> Tensor:
    """Convert all tokens with a part of the features to a part of the tokens with all features.

    Layout V -> V, one all-to-all; the backward is the inverse exchange, ``all_to_all_sp2hp``.

    Args:
        input_: ``[n, h/t]``; leading dimensions are flattened into one.
        group: tensor-parallel group; the ambient one if None.
        hidden_size: ``h``, split by the balanced rule. None means that all parts are equal, and ``t`` divides ``n``.

    Returns:
        ``[n/t, h]``, tokens by the balanced rule.

    Raises:
        ShardingError: without ``hidden_size``, ``t`` does not divide ``n``; with it, this rank's part is not balanced.

    Source: Jacobs et al. 2023 (arXiv:2309.14509), section 3.
    """
    group, input_ = _resolve(group), input_.flatten(0, -2)
    columns, rows = _shares(input_, 1, hidden_size, "features", group)
    own_rows, own_columns = rows[group.rank()], columns[group.rank()]
    sizes = [own_rows * n for n in columns]
    # Consecutive rows are contiguous, so they are sent without a copy.
    sent = [n * own_columns for n in rows]
    received = moves.all_to_all(input_.reshape(-1), group=group, output_sizes=sizes, input_sizes=sent)
    parts = zip(received.split(sizes), columns, strict=True)
    return torch.cat([part.view(own_rows, n) for part, n in parts], dim=1)


def _shares(
    input_: Tensor, dim: int, total: int | None, what: str, group: ProcessGroup
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks' sizes of a matrix split along ``dim``, with ``total`` as its size, and along the other dim."""
    t, rank, own, other = group.size(), group.rank(), input_.size(dim), input_.size(1 - dim)
    if total is None:
        divide(other, t)
    sizes = (own,) * t if total is None else balanced_sizes(total, t)
    if sizes[rank] != own:
        raise ShardingError(f"rank {rank} of {t} has {own} {what}; its balanced share of {total} is {sizes[rank]}")
    return sizes, balanced_sizes(other, t)


def _checked_group(group: ProcessGroup | None) -> ProcessGroup:
    if group is None:
        raise AssertedTopologyError(
            "group is None; pass a group, such as parallel_state.get_tensor_model_parallel_group()"
        )
    return group


class _Region(Function):
    """Base class of the moves between layouts."""

    @classmethod
    def symbolic(cls, graph: Any, *args: Any, **options: Any) -> Any:
        """Return the result of ``forward`` without autograd."""
        return cls.forward(types.SimpleNamespace(), *args, **options)


class _CopyToModelParallelRegion(moves._Copy, _Region):
    """I -> R."""


class _ReduceFromModelParallelRegion(moves._Reduce, _Region):
    """P -> I."""


def _along(dim: int, move: Callable[..., Tensor], adjoint: Callable[..., Tensor]) -> Callable[[type[_Region]], Any]:
    """Set the forward and backward of an autograd function to two collectives along ``dim``."""

    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
        ctx.group = group
        ctx.sizes = sizes if move is all_gather else moves.split_sizes(input_, dim, group, sizes)
        return move(input_, group=group, dim=dim, sizes=ctx.sizes)

    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad_input = adjoint(grad_output, group=ctx.group, dim=dim, sizes=getattr(ctx, "sizes", None))
        return (grad_input, None, None) if hasattr(ctx, "sizes") else (grad_input, None)

    def complete(region: Any) -> Any:
        region.forward, region.backward = staticmethod(forward), staticmethod(once_differentiable(backward))
        return region

    return complete


@_along(-1, split_for_rank, all_gather)
class _ScatterToModelParallelRegion(_Region):
    """I -> V along the last dimension."""


@_along(-1, all_gather, split_for_rank)
class _GatherFromModelParallelRegion(_Region):
    """V -> I along the last dimension."""


@_along(0, split_for_rank, all_gather)
class _ScatterToSequenceParallelRegion(_Region):
    """I -> V along the first dimension."""


@_along(-1, all_gather, reduce_scatter)
class _AllGatherFromTensorParallelRegion(_Region):
    """V -> R along the last dimension."""


@_along(-1, reduce_scatter, all_gather)
class _ReduceScatterToTensorParallelRegion(_Region):
    """P -> V along the last dimension."""


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
        ctx.input_split_sizes = moves.split_sizes(input_, 0, group, input_split_sizes)
        return _in_buffer(reduce_scatter(input_, group=group, sizes=input_split_sizes), use_global_buffer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        sizes = getattr(ctx, "input_split_sizes", None)
        return all_gather(grad_output, group=ctx.group, sizes=sizes), None, None, None


class _AllToAll(_Region):
    """V -> V: exchange of rows between all ranks."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, input_: Tensor, output_split_sizes: Sizes = None, input_split_sizes: Sizes = None
    ) -> Tensor:
        ctx.group, ctx.output_split_sizes, ctx.input_split_sizes = group, output_split_sizes, input_split_sizes
        return collectives.all_to_all(
            input_, group=group, output_sizes=output_split_sizes, input_sizes=input_split_sizes
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        received, sent = getattr(ctx, "input_split_sizes", None), getattr(ctx, "output_split_sizes", None)
        return None, _AllToAll.symbolic(None, ctx.group, grad_output, received, sent), None, None


def _in_buffer(result: Tensor, buffer: GlobalMemoryBuffer | bool) -> Tensor:
    """Return ``result``, copied into the buffer if there is one."""
    if buffer is False:
        return result
    buffer = parallel_state.get_global_memory_buffer() if buffer is True else buffer
    return buffer.get_tensor(result.shape, result.dtype, "mpu", device=result.device).copy_(result)


# Only the forwards, under Megatron's names and without autograd.


def _reduce(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the sum of all ranks' tensors; the argument is not modified."""
    return all_reduce(input_, group=_checked_group(group))


def _split_along_last_dim(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return this rank's part of the last dimension."""
    return split_for_rank(input_, group=_checked_group(group), dim=-1)


def _split_along_first_dim(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return this rank's part of the first dimension."""
    return split_for_rank(input_, group=_checked_group(group), dim=0)


def _gather_along_last_dim(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """Concatenate all ranks' tensors along the last dimension."""
    return all_gather(input_, group=_checked_group(group), dim=-1)


def _gather_along_first_dim(
    input_: Tensor, group: ProcessGroup | None, output_split_sizes: Sizes = None, use_global_buffer: bool = False
) -> Tensor:
    """Concatenate all ranks' tensors along the first dimension."""
    return _in_buffer(all_gather(input_, group=_checked_group(group), sizes=output_split_sizes), use_global_buffer)


def _reduce_scatter_along_first_dim(
    input_: Tensor, group: ProcessGroup | None, input_split_sizes: Sizes = None, use_global_buffer: bool = False
) -> Tensor:
    """Sum all ranks' tensors and return this rank's part along the first dimension."""
    return _in_buffer(reduce_scatter(input_, group=_checked_group(group), sizes=input_split_sizes), use_global_buffer)


def _reduce_scatter_along_last_dim(input_: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum all ranks' tensors and return this rank's part along the last dimension."""
    return reduce_scatter(input_, group=_checked_group(group), dim=-1)


offer(globals())
