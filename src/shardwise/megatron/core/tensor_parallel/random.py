"""Random streams and recomputation under the names that programs know; see ``shardwise.core.random`` and
``shardwise.nn.recompute``.

The names say "cuda" for compatibility; the streams are those of whatever device the program computes on.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.core.communication.context import default_device
from shardwise.core.errors import ConfigError
from shardwise.core.random import (
    DATA_PARALLEL_STREAM,
    EXPERT_PARALLEL_STREAM,
    TENSOR_PARALLEL_STREAM,
    RandomStreams,
    Rule,
    choose_streams,
    default_state,
    generator_in,
    seed_streams,
    set_default_state,
    streams,
    streams_are_chosen,
)
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.tensor_parallel.attributes import HAVE_TE  # noqa: F401
from shardwise.megatron.core.tensor_parallel.recomputation import (
    CheckpointFunction,
    CheckpointWithoutOutput,
    CheckpointWithoutOutputFunction,
    checkpoint,
)
from shardwise.megatron.errors import AssertedConfigError
from shardwise.nn.recompute import is_checkpointing

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
    "set_default_rng",
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
        use_te_rng_tracker: accepted with a warning; Transformer Engine's streams are not used here.
        inference_rng_tracker: streams that do nothing, for programs that draw no random numbers.
        use_cudagraphable_rng: see ``CudaRNGStatesTracker``.
        force_reset: forget the ambient streams and choose anew.
    """
    if use_te_rng_tracker:
        warnings.warn(
            "use_te_rng_tracker=True asks for Transformer Engine's random streams; this library's own are used instead",
            stacklevel=2,
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


def _get_cuda_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
    """The state of the default generator of ``device`` or, where CUDA is not in use, of the CPU.

    Args:
        device: which GPU.
        clone: with ``graph_safe``, a generator of its own in that state.
        graph_safe: a ``torch.Generator`` in place of a tensor.
    """
    state = default_state(device, graphable=graph_safe)
    return state.clone_state() if graph_safe and clone and state.device.type == "cuda" else state


def _set_cuda_rng_state(new_state: Tensor | torch.Generator, device: Any = -1, graph_safe: bool = False) -> None:
    """Set the default generator of the device that ``new_state`` is of.

    Args:
        new_state: as ``_get_cuda_rng_state`` returns it.
        device: which GPU; the current one if -1.
        graph_safe: not used; a generator says it by itself.

    Raises:
        ConfigError: ``new_state`` is neither a tensor nor a generator.
    """
    set_default_state(new_state, "cuda" if device == -1 else device)


def _get_all_rng_states() -> tuple[Tensor, Any, dict[str, Any]]:
    """The states of the CPU's default generator, of the computing device's, and of each ambient stream."""
    tracker = streams()
    return torch.get_rng_state(), default_state(graphable=tracker.use_cudagraphable_rng), tracker.get_states()


def _set_all_rng_states(cpu_rng_state: Tensor, cuda_rng_state: Any, cuda_rng_state_tracker: dict[str, Any]) -> None:
    """Go back to what ``_get_all_rng_states``, of the same three, returned.

    Raises:
        ConfigError: a stream is in use.
    """
    streams().set_states(cuda_rng_state_tracker)
    set_default_state(cuda_rng_state)
    torch.set_rng_state(cpu_rng_state)


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
    """The state of each ambient stream; see ``CudaRNGStatesTracker.get_states``.

    Raises:
        AssertedConfigError: no stream was made and no kind of streams chosen yet.
    """
    if not streams_are_chosen():
        raise AssertedConfigError(
            "there are no random streams yet; call model_parallel_cuda_manual_seed() or initialize_rng_tracker() first"
        )
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


_default_rng: Rule = "per_rank"


def set_default_rng(rng: Rule) -> None:
    """From now on ``model_parallel_cuda_manual_seed`` takes ``rng`` where it is given none.

    For a program whose lines are not to be changed; ``shardwise.megatron.install`` calls it.

    Raises:
        ConfigError: ``rng`` is neither "global" nor "per_rank".
    """
    global _default_rng
    if rng not in ("per_rank", "global"):
        raise ConfigError(f"rng is {rng!r}; it must be 'per_rank' or 'global'")
    _default_rng = rng


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
    rng: Rule | None = None,
) -> None:
    """Make the random streams anew from ``seed``, and seed the default generator of the computing device.

    The data-parallel stream is seeded with ``seed``, the tensor-parallel one with ``seed + 2718 + tp_rank``, the expert
    one with ``seed + 1024 + 100 * ep_rank + etp_rank`` (where that sum is another rank's tensor-parallel seed, the
    expert stream draws other numbers than it). The GPU's default generator is seeded with ``seed``, now or when the
    program first uses CUDA. Where the program computes on the CPU, so is the CPU's: ranks then start with the same
    parameters and shuffle alike, as they do on GPUs. Where it computes on a GPU, the CPU's generator is left alone.

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
            tensor-parallel size (``shardwise.nn.dropout``); "per_rank" draws each shard's from the rank's own stream;
            None is "per_rank", or what ``set_default_rng`` was given.

    Raises:
        TopologyError: no ``tp_rank`` given and no topology initialised.
        ConfigError: ``rng`` is neither; a stream is in use.
    """
    if tp_rank is None:
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
    if parallel_state.model_parallel_is_initialized():
        ep_rank = parallel_state.get_expert_model_parallel_rank() if ep_rank is None else ep_rank
        etp_rank = parallel_state.get_expert_tensor_parallel_rank() if etp_rank is None else etp_rank
    initialize_rng_tracker(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng, force_reset_rng)
    seed_streams(seed, tp_rank, ep_rank=ep_rank or 0, etp_rank=etp_rank, rng=_default_rng if rng is None else rng)
    torch.cuda.manual_seed(seed)
    if _computes_on_the_cpu():
        # Not torch.manual_seed, which would start devices that the program may not use.
        torch.default_generator.manual_seed(seed)


def _computes_on_the_cpu() -> bool:
    """Whether the machine has no accelerator, or the ambient groups are of the CPU."""
    if not (torch.cuda.is_available() or torch.accelerator.is_available()):
        return True
    group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    return group is not None and default_device(group).type == "cpu"
