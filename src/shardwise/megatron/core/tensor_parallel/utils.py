"""Functions that split tensors and vocabularies."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import collectives
from shardwise.core.errors import ShardingError
from shardwise.core.sharding import balanced_range, balanced_sizes
from shardwise.megatron.core.parallel_state import resolve_tensor_model_parallel_group
from shardwise.megatron.core.tensor_parallel.attributes import dist_all_gather_func, divide, ensure_divisibility  # noqa: F401

__all__ = ["VocabUtility", "gather_split_1d_tensor", "split_tensor_along_last_dim", "split_tensor_into_1d_equal_chunks"]


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split the last dimension into ``num_partitions`` parts, by the balanced rule.

    Args:
        tensor: ``[..., n]``.
        num_partitions: number of parts; the first ``n % num_partitions`` parts have one element more.
        contiguous_split_chunks: whether to return contiguous copies instead of views.

    Returns:
        The parts, in order.

    Raises:
        ShardingError: ``num_partitions`` is not positive.
    """
    parts = tensor.split(list(balanced_sizes(tensor.size(-1), num_partitions)), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return this rank's flat chunk of a tensor that every rank holds whole; no communication.

    All chunks have the size ``ceil(numel / t)``, so that gathering them needs no sizes. If ``t`` does not divide
    ``numel``, the last chunks end in zeros, which ``gather_split_1d_tensor`` drops if ``numel`` is given.

    Args:
        tensor: any shape with ``n`` elements, the same on every rank.
        new_buffer: whether to return a copy; otherwise returns a view where possible.
        tp_group: tensor-parallel group; the ambient one if None.

    Returns:
        ``[ceil(n/t)]``.

    Raises:
        TopologyError: no group is given and none is initialised.
    """
    group = resolve_tensor_model_parallel_group(tp_group)
    flat = tensor.reshape(-1)
    size = -(-flat.numel() // group.size())
    start = min(group.rank() * size, flat.numel())
    chunk = flat[start : start + size]
    if chunk.numel() < size:
        return torch.cat([chunk, chunk.new_zeros(size - chunk.numel())])
    return chunk.clone() if new_buffer else chunk


def gather_split_1d_tensor(tensor: Tensor, tp_group: ProcessGroup | None = None, *, numel: int | None = None) -> Tensor:
    """Undo ``split_tensor_into_1d_equal_chunks`` with one all-gather of ``numel / t`` elements per rank.

    Args:
        tensor: this rank's chunk of ``n/t`` elements, in any shape; all chunks have the same size. Not modified.
        tp_group: tensor-parallel group; the ambient one if None.
        numel: number of elements before the split; None means all elements of the ``t`` chunks.

    Returns:
        ``[numel]``, flat, the same on every rank.

    Raises:
        ShardingError: ``tensor`` is not this group's chunk of ``numel`` elements.
        TopologyError: no group is given and none is initialised.
    """
    group = resolve_tensor_model_parallel_group(tp_group)
    t = group.size()
    if numel is not None and tensor.numel() != -(-numel // t):
        raise ShardingError(
            f"a chunk of {tensor.numel()} elements is not one of {t} equal chunks of {numel} elements; they have "
            f"{-(-numel // t)} each"
        )
    gathered = collectives.all_gather(tensor.reshape(-1), group=group)
    return gathered if numel is None else gathered[:numel]


class VocabUtility:
    """Computes the range ``[first, last)`` of vocabulary ids on a rank."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Range of ``rank`` when every rank holds the same number of ids."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Range of ``rank`` by the balanced rule."""
        return balanced_range(global_vocab_size, world_size, rank)
