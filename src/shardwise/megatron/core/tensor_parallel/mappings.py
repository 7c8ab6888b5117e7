"""The moves between layouts under Megatron's names; a group that is left out is the ambient tensor-parallel one.

What they do, and the table of layouts, stand in ``shardwise.core.communication.moves``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.errors import ShardingError
from shardwise.core.sharding import balanced_sizes
from shardwise.megatron.core.parallel_state import resolve_tensor_model_parallel_group as _resolve
from shardwise.megatron.core.tensor_parallel.attributes import (  # noqa: F401
    dist_all_gather_func,
    dist_reduce_scatter_func,
    divide,
)
from shardwise.megatron.core.tensor_parallel.regions import (  # noqa: F401
    _AllGatherFromTensorParallelRegion,
    _AllToAll,
    _CopyToModelParallelRegion,
    _gather_along_first_dim,
    _gather_along_last_dim,
    _GatherFromModelParallelRegion,
    _GatherFromSequenceParallelRegion,
    _given,
    _reduce,
    _reduce_scatter_along_first_dim,
    _reduce_scatter_along_last_dim,
    _ReduceFromModelParallelRegion,
    _ReduceScatterToSequenceParallelRegion,
    _ReduceScatterToTensorParallelRegion,
    _ScatterToModelParallelRegion,
    _ScatterToSequenceParallelRegion,
    _split_along_first_dim,
    _split_along_last_dim,
)

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


def copy_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Enter a tensor-parallel region with a tensor that every rank holds.

    Layout I -> R: forward identity, backward all-reduce.

    Args:
        input_: any shape; not modified.
        group: tensor-parallel group; the ambient one if None.

    Returns:
        The same values.

    Raises:
        TopologyError: no group given and none initialised.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), operator f.
    """
    return moves.copy(input_, group=_resolve(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum a partial result over the tensor-parallel group.

    Layout P -> I: forward all-reduce, backward identity.

    Args:
        input_: any shape, this rank's partial sum; not modified.
        group: tensor-parallel group; the ambient one if None.

    Returns:
        The sum, the same on every rank.

    Raises:
        TopologyError: no group given and none initialised.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), operator g.
    """
    return moves.reduce(input_, group=_resolve(group))


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Keep this rank's part of the last dimension.

    Layout I -> V: forward split, backward all-gather.

    Args:
        input_: ``[..., n]``, the same on every rank.
        group: tensor-parallel group; the ambient one if None.
        sizes: every rank's size; balanced if None.

    Returns:
        ``[..., n/t]``.

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: ``sizes`` do not sum to ``n``.
    """
    return moves.scatter(input_, dim=-1, group=_resolve(group), sizes=sizes)


def gather_from_tensor_model_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Concatenate the ranks' parts along the last dimension.

    Layout V -> I: forward all-gather, backward split.

    Args:
        input_: ``[..., n/t]``.
        group: tensor-parallel group; the ambient one if None.
        sizes: every rank's size; all as this rank's if None.

    Returns:
        ``[..., n]``, the same on every rank.

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: ``sizes`` do not have this rank's size.
    """
    return moves.gather(input_, dim=-1, group=_resolve(group), sizes=sizes)


def scatter_to_sequence_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Keep this rank's part of the first dimension.

    Layout I -> V: forward split, backward all-gather.

    Args:
        input_: ``[s, ...]``, the same on every rank.
        group: tensor-parallel group; the ambient one if None.
        sizes: every rank's size; balanced if None.

    Returns:
        ``[s/t, ...]``.

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: ``sizes`` do not sum to ``s``.
    """
    return moves.scatter(input_, dim=0, group=_resolve(group), sizes=sizes)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: ProcessGroup | None = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Concatenate the ranks' parts along the first dimension.

    Layout V -> R: forward all-gather, backward reduce-scatter; with ``tensor_parallel_output_grad=False`` V -> I and
    the backward splits.

    Args:
        input_: ``[s/t, ...]``.
        tensor_parallel_output_grad: whether what follows is a tensor-parallel region, whose gradient is a partial sum.
        group: tensor-parallel group; the ambient one if None.
        output_split_sizes: every rank's size; all as this rank's if None.
        use_global_buffer: return a tensor in the reusable "mpu" buffer, which the next call with a buffer overwrites:
            for values that are dead by then. A backward that would read overwritten values raises RuntimeError.

    Returns:
        ``[s, ...]``, the same on every rank.

    Raises:
        TopologyError: no group or buffer given and none initialised.
        ShardingError: ``output_split_sizes`` do not have this rank's size.
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

    Layout P -> V: forward reduce-scatter, backward all-gather.

    Args:
        input_: ``[s, ...]``, this rank's partial sum.
        group: tensor-parallel group; the ambient one if None.
        input_split_sizes: every rank's size; balanced if None.
        use_global_buffer: as in ``gather_from_sequence_parallel_region``.

    Returns:
        ``[s/t, ...]``.

    Raises:
        TopologyError: no group or buffer given and none initialised.
        ShardingError: ``input_split_sizes`` do not sum to ``s``.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), operator g-bar.
    """
    result: Tensor = _ReduceScatterToSequenceParallelRegion.apply(
        input_, _resolve(group), input_split_sizes, use_global_buffer
    )
    return result


def all_gather_last_dim_from_tensor_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Concatenate the ranks' parts along the last dimension, for use in a tensor-parallel region.

    Layout V -> R: forward all-gather, backward reduce-scatter.

    Args:
        input_: ``[..., n/t]``.
        group: tensor-parallel group; the ambient one if None.
        sizes: every rank's size; all as this rank's if None.

    Returns:
        ``[..., n]``, the same on every rank.

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: ``sizes`` do not have this rank's size.
    """
    return moves.gather_for_parts(input_, dim=-1, group=_resolve(group), sizes=sizes)


def reduce_scatter_last_dim_to_tensor_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Sum a partial result over the group and keep this rank's part of the last dimension.

    Layout P -> V: forward reduce-scatter, backward all-gather.

    Args:
        input_: ``[..., n]``, this rank's partial sum.
        group: tensor-parallel group; the ambient one if None.
        sizes: every rank's size; balanced if None.

    Returns:
        ``[..., n/t]``.

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: ``sizes`` do not sum to ``n``.
    """
    return moves.reduce_scatter(input_, dim=-1, group=_resolve(group), sizes=sizes)


def all_to_all(
    group: ProcessGroup | None,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_nccl_stream: bool = False,
) -> Tensor:
    """Send a run of rows to every rank and receive one from each.

    Layout V -> V; the backward is the inverse exchange.

    Args:
        group: the ranks; must be given, as in Megatron.
        input_: ``[sum(input_split_sizes), ...]``.
        output_split_sizes_: rows received from each rank; equal parts if None.
        input_split_sizes: rows sent to each rank; equal parts if None.
        use_nccl_stream: changes nothing; the result is there when the call returns.

    Returns:
        ``[sum(output_split_sizes_), ...]``.

    Raises:
        AssertedTopologyError: ``group`` is None.
    """
    return moves.all_to_all(
        input_, group=_given(group), output_sizes=output_split_sizes_, input_sizes=input_split_sizes
    )


def all_to_all_sp2hp(input_: Tensor, group: ProcessGroup | None = None, *, num_tokens: int | None = None) -> Tensor:
    """From a part of the tokens with all features to all tokens with a part of the features.

    Layout V -> V, one all-to-all; the backward is the inverse exchange, ``all_to_all_hp2sp``.

    Args:
        input_: ``[n/t, h]``; leading dimensions are flattened into one.
        group: tensor-parallel group; the ambient one if None.
        num_tokens: ``n``, of which ranks then hold balanced shares. None: ranks hold as many, and divide ``h``.

    Returns:
        ``[n, h/t]``, features by the balanced rule.

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: without ``num_tokens``, the ranks do not divide ``h``; with it, this rank's share is another.

    Source: Jacobs et al. 2023 (arXiv:2309.14509), section 3.
    """
    group = _resolve(group)
    t, rank = group.size(), group.rank()
    input_ = input_.flatten(0, -2)
    n, h = input_.shape
    if num_tokens is None:
        divide(h, t)
        rows: tuple[int, ...] = (n,) * t
    else:
        rows = _shares(num_tokens, n, "tokens", t, rank)
    columns = balanced_sizes(h, t)
    sent = torch.cat([part.reshape(-1) for part in input_.split(columns, dim=1)])
    received = moves.all_to_all(
        sent, group=group, output_sizes=[r * columns[rank] for r in rows], input_sizes=[rows[rank] * c for c in columns]
    )
    return received.view(sum(rows), columns[rank])


def all_to_all_hp2sp(input_: Tensor, group: ProcessGroup | None = None, *, hidden_size: int | None = None) -> Tensor:
    """From all tokens with a part of the features to a part of the tokens with all features.

    Layout V -> V, one all-to-all; the backward is the inverse exchange, ``all_to_all_sp2hp``.

    Args:
        input_: ``[n, h/t]``; leading dimensions are flattened into one.
        group: tensor-parallel group; the ambient one if None.
        hidden_size: ``h``, of which ranks then hold balanced shares. None: ranks hold as many, and divide ``n``.

    Returns:
        ``[n/t, h]``, tokens by the balanced rule.

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: without ``hidden_size``, the ranks do not divide ``n``; with it, this rank's share is another.

    Source: Jacobs et al. 2023 (arXiv:2309.14509), section 3.
    """
    group = _resolve(group)
    t, rank = group.size(), group.rank()
    input_ = input_.flatten(0, -2)
    n, h = input_.shape
    if hidden_size is None:
        divide(n, t)
        columns: tuple[int, ...] = (h,) * t
    else:
        columns = _shares(hidden_size, h, "features", t, rank)
    rows = balanced_sizes(n, t)
    # A run of rows is contiguous: it is sent as it lies.
    received = moves.all_to_all(
        input_.reshape(-1),
        group=group,
        output_sizes=[rows[rank] * c for c in columns],
        input_sizes=[r * columns[rank] for r in rows],
    )
    parts = received.split([rows[rank] * c for c in columns])
    return torch.cat([part.view(rows[rank], c) for part, c in zip(parts, columns, strict=True)], dim=1)


def _shares(total: int, own: int, what: str, t: int, rank: int) -> tuple[int, ...]:
    sizes = balanced_sizes(total, t)
    if sizes[rank] != own:
        raise ShardingError(f"rank {rank} of {t} has {own} {what}; its balanced share of {total} is {sizes[rank]}")
    return sizes
