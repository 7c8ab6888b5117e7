"""Random streams and recomputation by the names of ``mpu``, whose ``checkpoint`` takes a function and its arguments."""

from collections.abc import Callable
from typing import Any

from shardwise.core.topology import Topology
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.tensor_parallel import random, utils
from shardwise.megatron.errors import AssertedConfigError
from shardwise.megatron.surface import offer

gather_split_1d_tensor = utils.gather_split_1d_tensor
split_tensor_into_1d_equal_chunks = utils.split_tensor_into_1d_equal_chunks

# The topology that has the buffer.
_with_buffer: Topology | None = None


def init_checkpointed_activations_memory_buffer() -> None:
    """From now on ``checkpoint`` keeps of a function's first tensor this rank's chunk, until the topology is destroyed.

    Each chunk has its own memory, which its backward frees, so that no sizes are needed, and several micro-batches may
    wait for their backward. In Megatron the chunks of one micro-batch lie in one buffer.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
        AssertedConfigError: it was called before.
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
    """Nothing happens: the chunks of a micro-batch are freed in its backward."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)``, keep its arguments only, and call it again in backward.

    With ``init_checkpointed_activations_memory_buffer`` the first tensor among ``args`` is changed: afterwards it is
    this rank's flat chunk, and the backward makes it whole again; see ``tensor_parallel.checkpoint``.

    Args:
        function: must compute the same both times.
        args: its arguments. If the first is True or False it is no argument: it says, as in later releases, whether the
            first tensor is distributed, with or without a buffer.

    Returns:
        The result of ``function``.

    Raises:
        ConfigError: a tensor is to be distributed, and there is none, or the first is a view.
    """
    if args and isinstance(args[0], bool):
        return random.checkpoint(function, *args)
    has_buffer = parallel_state.model_parallel_is_initialized() and (parallel_state.get_topology() is _with_buffer)
    return random.checkpoint(function, has_buffer, *args)


def __getattr__(name: str) -> Any:
    # The streams are those of tensor_parallel.
    return getattr(random, name)


offer(globals(), random, "gather_split_1d_tensor", "split_tensor_into_1d_equal_chunks")
