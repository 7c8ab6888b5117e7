"""The moves between layouts (``core.layout``): a move converts a tensor, and its backward converts the gradient.

A move saves no activation and does not modify its input. A dimension that the number of ranks does not divide is split
by the balanced rule or by explicit sizes. A gather of uneven shards needs explicit sizes, because the ranks do not
exchange sizes. Moves support first derivatives only. PyTorch's collectives would compute a wrong second derivative, so
the moves raise an error instead.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.communication import collectives, trees
from shardwise.core.communication.collectives import all_gather, all_reduce, split_for_rank
from shardwise.core.layout import I, Layout, P, R, V
from shardwise.core.sharding import checked_dim, uneven_sizes
from shardwise.core.typed import check_move

Sizes = Sequence[int] | None
"""Every rank's size along the dimension of a move; None if the move derives the sizes."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result", covariant=True)


class Move(Protocol[_Arguments, _Result]):
    """A function that converts a tensor from one layout to another.

    Attributes:
        source: layout of the input.
        target: layout of the output.
    """

    source: Layout
    target: Layout

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result: ...


def _move_between(
    source: Layout, target: Layout
) -> Callable[[Callable[_Arguments, _Result]], Move[_Arguments, _Result]]:
    """Set the layouts of a move as attributes of the function."""

    def state(function: Callable[_Arguments, _Result]) -> Move[_Arguments, _Result]:
        move = cast(Move[_Arguments, _Result], function)
        move.source, move.target = source, target
        return move

    return state


class _Copy(Function):
    @staticmethod
    def spmd_typecheck(outputs: Any, *, tensor: Tensor, group: ProcessGroup) -> None:
        check_move(outputs, group, R, (tensor, I))

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, group=ctx.group), None


class _Reduce(Function):
    @staticmethod
    def spmd_typecheck(outputs: Any, *, tensor: Tensor, group: ProcessGroup) -> None:
        check_move(outputs, group, I, (tensor, P))

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(tensor, group=group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Copies(Function):
    @staticmethod
    def spmd_typecheck(outputs: Any, *, tensor: Tensor, group: ProcessGroup | None) -> None:
        check_move(outputs, group, R, (tensor, I))

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, number: int, group: ProcessGroup | None) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for _ in range(number))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = trees.tree_sum(grads)
        return total if ctx.group is None else all_reduce(total, group=ctx.group), None, None


class _Move(Function):
    """A move between shards and the whole tensor, with one collective in the forward and another in the backward."""

    @staticmethod
    def spmd_typecheck(outputs: Any, *, tensor: Tensor, move: Move[Any, Tensor], group: ProcessGroup) -> None:
        check_move(outputs, group, move.target, (tensor, move.source))

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        move: Move[Any, Tensor],
        group: ProcessGroup,
        forward: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.adjoint = adjoint
        return forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.adjoint(grad), None, None, None, None


def split_sizes(tensor: Tensor, dim: int, group: ProcessGroup, sizes: Sizes = None) -> Sizes:
    """Return ``sizes``, or the balanced sizes of ``tensor`` along ``dim``; None if all ranks have the same size."""
    return sizes or uneven_sizes(tensor.size(checked_dim(dim, tensor.shape)), group.size())


@_move_between(I, R)
def copy(tensor: Tensor, *, group: ProcessGroup) -> Tensor:
    """Enter a region in which every rank computes its part from a replicated tensor.

    Layout I -> R: forward identity, backward all-reduce.

    Args:
        tensor: any shape, the same on every rank.
        group: the ranks that share the region.

    Returns:
        The same values.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), operator f.
    """
    result: Tensor = _Copy.apply(tensor, group)
    return result


@_move_between(I, R)
def copies(tensor: Tensor, number: int, *, group: ProcessGroup | None) -> tuple[Tensor, ...]:
    """Return one view of a replicated tensor for each part that this rank computes from it.

    Layout I -> R, within a rank and between ranks. The forward is the identity. The backward sums the gradient over
    this rank's parts and all-reduces it, both by the tree over all parts.

    Args:
        tensor: any shape, the same on every rank.
        number: number of parts on this rank, a power of two.
        group: the ranks that have the other parts; the group sums by the tree (``trees.sum_in_parts``). None if this
            rank has all parts.

    Returns:
        ``number`` views.
    """
    result: tuple[Tensor, ...] = _Copies.apply(tensor, number, group)
    return result


@_move_between(P, I)
def reduce(tensor: Tensor, *, group: ProcessGroup) -> Tensor:
    """Sum a partial result over the ranks of a group.

    Layout P -> I: forward all-reduce, backward identity.

    Args:
        tensor: any shape, this rank's partial sum.
        group: the ranks that hold the other parts.

    Returns:
        The sum, the same on every rank.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), operator g.
    """
    result: Tensor = _Reduce.apply(tensor, group)
    return result


@_move_between(I, V())
def scatter(tensor: Tensor, *, dim: int, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
    """Keep this rank's shard of a replicated tensor.

    Layout I -> V: forward split, backward all-gather.

    Args:
        tensor: the whole tensor, the same on every rank.
        dim: dimension that is split.
        group: the ranks that share the tensor.
        sizes: every rank's size along ``dim``; balanced if None.

    Returns:
        This rank's shard, contiguous.

    Raises:
        ShardingError: ``sizes`` do not sum to the dimension, or there is no such dimension.
    """
    along: dict[str, Any] = {"dim": dim, "group": group, "sizes": split_sizes(tensor, dim, group, sizes)}
    result: Tensor = _Move.apply(tensor, scatter, group, partial(split_for_rank, **along), partial(all_gather, **along))
    return result


@_move_between(V(), I)
def gather(tensor: Tensor, *, dim: int, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
    """Concatenate the shards of all ranks.

    Layout V -> I: forward all-gather, backward split.

    Args:
        tensor: this rank's shard.
        dim: dimension of the concatenation.
        group: the ranks that hold the other shards.
        sizes: every rank's size along ``dim``. None means that all ranks have this rank's size.

    Returns:
        The whole tensor, the same on every rank.

    Raises:
        ShardingError: ``sizes`` contradicts this rank's size, or ``dim`` is out of range.
    """
    along: dict[str, Any] = {"dim": dim, "group": group, "sizes": sizes}
    result: Tensor = _Move.apply(tensor, gather, group, partial(all_gather, **along), partial(split_for_rank, **along))
    return result


@_move_between(V(), R)
def gather_for_parts(tensor: Tensor, *, dim: int, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
    """Concatenate the shards of all ranks, for a region in which every rank computes its part from the whole tensor.

    Layout V -> R: forward all-gather, backward reduce-scatter.

    Args:
        tensor, dim, group, sizes: as for ``gather``.

    Returns:
        The whole tensor, the same on every rank.

    Raises:
        ShardingError: ``sizes`` contradicts this rank's size, or ``dim`` is out of range.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), operator g.
    """
    along: dict[str, Any] = {"dim": dim, "group": group, "sizes": sizes}
    adjoint = partial(collectives.reduce_scatter, **along)
    result: Tensor = _Move.apply(tensor, gather_for_parts, group, partial(all_gather, **along), adjoint)
    return result


@_move_between(P, V())
def reduce_scatter(tensor: Tensor, *, dim: int, group: ProcessGroup, sizes: Sizes = None) -> Tensor:
    """Sum a partial result over the ranks and keep this rank's shard.

    Layout P -> V: forward reduce-scatter, backward all-gather.

    Args:
        tensor: this rank's partial sum, with the shape of the whole tensor.
        dim: dimension that is split.
        group: the ranks that hold the other parts.
        sizes: every rank's size along ``dim``; balanced if None.

    Returns:
        This rank's shard of the sum.

    Raises:
        ShardingError: ``sizes`` do not sum to the dimension, or there is no such dimension.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), operator g-bar.
    """
    along: dict[str, Any] = {"dim": dim, "group": group, "sizes": split_sizes(tensor, dim, group, sizes)}
    result: Tensor = _Move.apply(
        tensor, reduce_scatter, group, partial(collectives.reduce_scatter, **along), partial(all_gather, **along)
    )
    return result


@_move_between(V(), V())
def all_to_all(tensor: Tensor, *, group: ProcessGroup, output_sizes: Sizes = None, input_sizes: Sizes = None) -> Tensor:
    """Send a block of rows to every rank and receive one from every rank, in rank order.

    Layout V -> V; the backward is the inverse exchange.

    Args:
        tensor: ``[sum(input_sizes), ...]``.
        group: the ranks that take part.
        output_sizes: rows received from each rank; equal parts if None.
        input_sizes: rows sent to each rank; equal parts if None.

    Returns:
        ``[sum(output_sizes), ...]``.

    Raises:
        ShardingError: the sizes are not one per rank, or do not sum to the rows.
    """
    exchange = partial(collectives.all_to_all, group=group, output_sizes=output_sizes, input_sizes=input_sizes)
    inverse = partial(collectives.all_to_all, group=group, output_sizes=input_sizes, input_sizes=output_sizes)
    result: Tensor = _Move.apply(tensor, all_to_all, group, exchange, inverse)
    return result
