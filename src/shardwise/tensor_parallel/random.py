"""Random streams under the names that programs know; see ``shardwise.random``.

The names say "cuda" for compatibility; the streams are those of whatever device the program computes on.
"""

from __future__ import annotations

from shardwise import parallel_state
from shardwise.random import DATA_PARALLEL_STREAM, RandomStreams, seed_streams, streams

__all__ = ["get_cuda_rng_tracker", "get_data_parallel_rng_tracker_name", "model_parallel_cuda_manual_seed"]


def get_cuda_rng_tracker() -> RandomStreams:
    """The ambient random streams."""
    return streams()


def get_data_parallel_rng_tracker_name() -> str:
    """Name of the stream that is the same on every rank of a tensor-parallel group."""
    return DATA_PARALLEL_STREAM


def model_parallel_cuda_manual_seed(seed: int, *, tp_rank: int | None = None) -> None:
    """Make the random streams anew from ``seed``; the default generators are left alone.

    The data-parallel stream is seeded with ``seed``, the tensor-parallel one with ``seed + 2718 + tp_rank``.

    Args:
        seed: the same on every rank.
        tp_rank: this rank in its tensor-parallel group; from the ambient topology if None.

    Raises:
        TopologyError: no rank given and no topology initialised.
    """
    seed_streams(seed, parallel_state.get_tensor_model_parallel_rank() if tp_rank is None else tp_rank)
