"""Splitting tensors and vocabularies."""

from __future__ import annotations

from torch import Tensor

from shardwise.sharding import balanced_range, balanced_sizes

__all__ = ["VocabUtility", "split_tensor_along_last_dim"]


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split the last dimension into ``num_partitions`` parts, by the balanced rule.

    Args:
        tensor: ``[..., n]``.
        num_partitions: number of parts; the first ``n % num_partitions`` are one longer.
        contiguous_split_chunks: return contiguous copies in place of views.

    Returns:
        The parts, in order.
    """
    parts = tensor.split(list(balanced_sizes(tensor.size(-1), num_partitions)), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


class VocabUtility:
    """Which ids of the vocabulary a rank holds, as ``[first, last)``."""

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
