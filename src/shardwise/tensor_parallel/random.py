"""Random streams and recomputation under the names that programs know; see ``shardwise.random`` and
``shardwise.recompute``.

The names say "cuda" for compatibility; the streams are those of whatever device the program computes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise import parallel_state
from shardwise.errors import ConfigError
from shardwise.random import (
    DATA_PARALLEL_STREAM,
    EXPERT_PARALLEL_STREAM,
    TENSOR_PARALLEL_STREAM,
    RandomStreams,
    Rule,
    choose_streams,
    generator_in,
    seed_streams,
    streams,
)
from shardwise.recompute import is_checkpointing
from shardwise.tensor_parallel.recomputation import (
    CheckpointFunction,
    CheckpointWithoutOutput,
    CheckpointWithoutOutputFunction,
    checkpoint,
)

__all__ = [
    "CheckpointFunction",
    "CheckpointWithoutOutput",
    "CheckpointWithoutOutputFunction",
    "CudaRNGStatesTracker",
    "checkpoint",
    "convert_cuda_rng_state",
    "get_all_rng_states",
    "get_cuda_rng_tracker",
    "get_data_parallel_rng_tracker_name",
    "get_expert_parallel_rng_tracker_name",
    "initialize_rng_tracker",
    "is_checkpointing",
    "is_graph_safe_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
]

CudaRNGStatesTracker = RandomStreams

# Imported by programs in spite of the underscore.
_MODEL_PARALLEL_RNG_TRACKER_NAME = TENSOR_PARALLEL_STREAM
_EXPERT_PARALLEL_RNG_TRACKER_NAME = EXPERT_PARALLEL_STREAM
_DATA_PARALLEL_RNG_TRACKER_NAME = DATA_PARALLEL_STREAM


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Choose the kind of the ambient random streams; a later choice changes nothing unless forced.

    Args:
        use_te_rng_tracker: not offered.
        inference_rng_tracker: streams that do nothing, for programs that draw no random numbers.
        use_cudagraphable_rng: see ``CudaRNGStatesTracker``.
        force_reset: forget the ambient streams and choose anew.

    Raises:
        ConfigError: ``use_te_rng_tracker``, or ``use_cudagraphable_rng`` where CUDA is in use.
    """
    if use_te_rng_tracker:
        raise ConfigError(
            "use_te_rng_tracker=True asks for Transformer Engine's random streams, which are not used here; "
            "leave it False"
        )
    choose_streams(
        use_cudagraphable_rng=use_cudagraphable_rng,
        is_inference_rng_tracker=inference_rng_tracker,
        force_reset=force_reset,
    )


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> RandomStreams:
    """The ambient random streams; the arguments are those of ``initialize_rng_tracker``, which is called first."""
    initialize_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    return streams()


@contextmanager
def _fork_rng() -> Iterator[None]:
    """Draw in the block, and afterwards go on as if nothing had been drawn, from the streams and the generators."""
    state = streams().snapshot()
    try:
        yield
    finally:
        streams().restore(state)


def __getattr__(name: str) -> Any:
    # Megatron's global, which tests written for it look at.
    if name == "_CUDA_RNG_STATE_TRACKER":
        return streams()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_all_rng_states() -> dict[str, Any]:
    """The state of each ambient stream; see ``CudaRNGStatesTracker.get_states``."""
    return streams().get_states()


def convert_cuda_rng_state(state: Tensor | torch.Generator, to_graphable: bool = False) -> Tensor | torch.Generator:
    """The state of a stream as a tensor, or as a generator if ``to_graphable``; ``set_states`` takes either.

    Raises:
        ConfigError: ``state`` is neither.
    """
    if isinstance(state, torch.Generator):
        return state if to_graphable else state.get_state()
    if not isinstance(state, Tensor):
        raise ConfigError(f"the state of a random stream is a tensor or a torch.Generator, not {type(state).__name__}")
    return generator_in(state) if to_graphable else state


def is_graph_safe_cuda_rng_tracker(cuda_rng_tracker: object) -> bool:
    """Whether the states of these streams are generators, as programs that capture CUDA graphs expect."""
    return bool(getattr(cuda_rng_tracker, "use_cudagraphable_rng", False))


def get_expert_parallel_rng_tracker_name() -> str:
    """Name of the stream that belongs to a rank's shard of its experts."""
    return EXPERT_PARALLEL_STREAM


def get_data_parallel_rng_tracker_name() -> str:
    """Name of the stream that is the same on every rank of a tensor-parallel group."""
    return DATA_PARALLEL_STREAM


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
    *,
    rng: Rule = "per_rank",
) -> None:
    """Make the random streams anew from ``seed``; the default CPU generator is left alone.

    The data-parallel stream is seeded with ``seed``, the tensor-parallel one with ``seed + 2718 + tp_rank``, the expert
    one with ``seed + 1024 + 100 * ep_rank + etp_rank`` (where that sum is another rank's tensor-parallel seed, the
    expert stream draws other numbers than it). The GPU's default generator, if CUDA is in use, is seeded with ``seed``.

    Args:
        seed: the same on every rank.
        te_rng_tracker: see ``initialize_rng_tracker``, like the next two.
        inference_rng_tracker: make no streams.
        use_cudagraphable_rng: see ``CudaRNGStatesTracker``.
        tp_rank: this rank in its tensor-parallel group; from the ambient topology if None.
        ep_rank: this rank in its expert-parallel group; from the ambient topology if None, 0 if there is none.
        etp_rank: this rank in its expert-tensor group; from the ambient topology if None, ``tp_rank`` if there is none.
        force_reset_rng: choose the kind of streams anew.
        rng: "global" draws the dropout of sharded tensors as slices of one mask that is the same at every
            tensor-parallel size (``shardwise.dropout``); "per_rank" draws each shard's from the rank's own stream.

    Raises:
        TopologyError: no ``tp_rank`` given and no topology initialised.
        ConfigError: ``rng`` is neither; a stream is in use; ``te_rng_tracker``.
    """
    if tp_rank is None:
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
    if parallel_state.model_parallel_is_initialized():
        ep_rank = parallel_state.get_expert_model_parallel_rank() if ep_rank is None else ep_rank
        etp_rank = parallel_state.get_expert_tensor_parallel_rank() if etp_rank is None else etp_rank
    initialize_rng_tracker(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng, force_reset_rng)
    seed_streams(seed, tp_rank, ep_rank=ep_rank or 0, etp_rank=etp_rank, rng=rng)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
