"""Random streams and recomputation in ``mpu``, whose ``checkpoint`` takes a function and its arguments."""

from collections.abc import Callable
from typing import Any

from shardwise.core.topology import Topology
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.tensor_parallel import random, utils
from shardwise.megatron.errors import AssertedConfigError
from shardwise.megatron.surface import offer

gather_split_1d_tensor = utils.gather_split_1d_tensor
split_tensor_into_1d_equal_chunks = utils.split_tensor_into_1d_equal_chunks

# Topology for which the buffer was initialised.
_with_buffer: Topology | None = None


def init_checkpointed_activations_memory_buffer() -> None:
    """Make ``checkpoint`` keep only this rank's chunk of a function's first tensor, until the topology is destroyed.

    Each chunk has its own memory, which its backward frees. So no sizes are needed, and several micro-batches can wait
    for their backward. In Megatron one buffer holds the chunks of one micro-batch.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
        AssertedConfigError: this function was called before.
    """
    global _with_buffer
    topology = parallel_state.get_topology()
    if topology is _with_buffer:
        raise AssertedConfigError(
            "the buffer of checkpointed activations is there already; call init_checkpointed_activations_memory_buffer "
            "once after initialize_model_parallel"
        )
    _with_buffer = topology


def reset_checkpointed_activations_memory_buffer() -> None:
    """Do nothing, because the backward of a micro-batch frees its chunks."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)``, keep only its arguments, and call it again in backward.

    After ``init_checkpointed_activations_memory_buffer`` the call replaces the first tensor among ``args`` in-place by
    this rank's flat chunk; the backward restores it. See ``tensor_parallel.checkpoint``.

    Args:
        function: function that computes the same both times.
        args: its arguments. A bool in front of them says whether the first tensor is distributed, as in later releases,
            whether or not there is a buffer.

    Returns:
        The result of ``function``.

    Raises:
        ConfigError: the first tensor should be distributed, but there is no tensor, or it is a view.
    """
    if args and isinstance(args[0], bool):
        return random.checkpoint(function, *args)
    has_buffer = parallel_state.model_parallel_is_initialized() and (parallel_state.get_topology() is _with_buffer)
    return random.checkpoint(function, has_buffer, *args)


def __getattr__(name: str) -> Any:
    # Random streams come from tensor_parallel.
    return getattr(random, name)


offer(globals(), random, "gather_split_1d_tensor", "split_tensor_into_1d_equal_chunks")
