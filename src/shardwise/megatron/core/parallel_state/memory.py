"""The buffers of the ambient topology."""

from shardwise.core.communication.context import GlobalMemoryBuffer, context_of
from shardwise.core.communication.symmetric_memory import GlobalSymmetricMemoryBuffer, symmetric_buffer_of
from shardwise.megatron.core.parallel_state.ambient import AMBIENT, group_of


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """The communication buffers of the tensor-parallel group, which its layers use too.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
    """
    group = group_of("tp")
    if AMBIENT.memory_buffer is None:
        AMBIENT.memory_buffer = context_of(group).buffers
    return AMBIENT.memory_buffer


def destroy_global_memory_buffer() -> None:
    """Free the reusable communication buffers; the next use makes new ones."""
    if AMBIENT.topology is not None:
        context_of(group_of("tp")).buffers = GlobalMemoryBuffer()
    AMBIENT.memory_buffer = None


def get_global_symmetric_memory_buffer() -> GlobalSymmetricMemoryBuffer:
    """Symmetric memory of the tensor-parallel group, 256 MiB, which its inference layers use too.

    The first call makes it, which is collective. Where the ranks do not reach each other's memory, as on a CPU, it is
    ordinary memory.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
    """
    group = group_of("tp")
    if AMBIENT.symmetric_memory_buffer is None:
        AMBIENT.symmetric_memory_buffer = symmetric_buffer_of(group)
    return AMBIENT.symmetric_memory_buffer


def destroy_global_symmetric_memory_buffer() -> None:
    """Free the symmetric memory; the next use makes it anew."""
    if AMBIENT.topology is not None:
        context_of(group_of("tp")).symmetric_buffers.clear()
    AMBIENT.symmetric_memory_buffer = None
