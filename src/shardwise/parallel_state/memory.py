"""The buffers of the ambient topology."""

from __future__ import annotations

from shardwise.communication.buffers import GlobalMemoryBuffer
from shardwise.communication.context import context_of
from shardwise.parallel_state.ambient import AMBIENT, group_of
from shardwise.parallel_state.symmetric_memory import GlobalSymmetricMemoryBuffer

# Activations of one tensor-parallel region of a large model: 8192 tokens of width 16384 in bf16.
_SYMMETRIC_MEBIBYTES = 256


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
