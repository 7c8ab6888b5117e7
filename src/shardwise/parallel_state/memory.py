"""The buffers that live as long as the ambient topology."""

from __future__ import annotations

from shardwise.collectives.buffers import GlobalMemoryBuffer
from shardwise.parallel_state.ambient import AMBIENT, get_topology, group_of
from shardwise.parallel_state.symmetric_memory import GlobalSymmetricMemoryBuffer

# Activations of one tensor-parallel region of a large model: 8192 tokens of width 16384 in bf16.
_SYMMETRIC_MEBIBYTES = 256


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """The reusable communication buffers.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
    """
    get_topology()
    return communication_buffers()


def communication_buffers() -> GlobalMemoryBuffer:
    """The same for layers, which may have been given their group by a program without an ambient topology."""
    if AMBIENT.memory_buffer is None:
        AMBIENT.memory_buffer = GlobalMemoryBuffer()
    return AMBIENT.memory_buffer


def destroy_global_memory_buffer() -> None:
    """Free the reusable communication buffers; the next use makes new ones."""
    AMBIENT.memory_buffer = None


def get_global_symmetric_memory_buffer() -> GlobalSymmetricMemoryBuffer:
    """Symmetric memory of the tensor-parallel group, 256 MiB; the first call makes it, which is collective.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
        TopologyError: there is no CUDA device here.
    """
    group = group_of("tp")
    if AMBIENT.symmetric_memory_buffer is None:
        AMBIENT.symmetric_memory_buffer = GlobalSymmetricMemoryBuffer(_SYMMETRIC_MEBIBYTES, group)
    return AMBIENT.symmetric_memory_buffer


def destroy_global_symmetric_memory_buffer() -> None:
    """Free the symmetric memory; the next use makes it anew."""
    AMBIENT.symmetric_memory_buffer = None
