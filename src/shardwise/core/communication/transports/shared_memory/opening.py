"""Who may use shared memory: found out once per group, by all of its ranks together."""

import contextlib
import os
import platform
import secrets
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.core import processes
from shardwise.core.communication.accounting import uncounted
from shardwise.core.communication.agreement import gather_objects
from shardwise.core.communication.context import context_of, is_gloo, time_limit
from shardwise.core.communication.transports.shared_memory.channel import channel_bytes
from shardwise.core.communication.transports.shared_memory.exchanges import SharedMemory
from shardwise.core.processes import Process, machine, temporary_prefix

SWITCH = processes.SHARED_MEMORY
"""Environment variable; 0 leaves everything to gloo."""

_MAX_RANKS = 8
_WHAT = "how to share memory"

T = TypeVar("T")


def why_not_here() -> str | None:
    """Why this process cannot communicate through shared memory; None if it can."""
    if not processes.is_on(SWITCH):
        return f"{SWITCH}=0"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"on {platform.machine()} stores may become visible out of order"
    if Process.find(os.getpid()) is None or machine() is None:
        return "there is no /proc that shows whether a rank lives"
    return None


def channel_of(group: ProcessGroup) -> SharedMemory | None:
    """The group's channel, or None if its ranks do not share memory. The first call of a group is collective.

    A channel is opened for a gloo group of 2 to 8 ranks on one machine, if each of them can map the same memory.
    """
    context = context_of(group)
    if not context.has_tried_to_share:
        # Whatever watches or records operators shall not see the setting up.
        with _disable_current_modes(), uncounted(), torch.inference_mode(False):
            context.channel = _open(group)
        context.has_tried_to_share = True
    return context.channel


def close_channel(group: ProcessGroup) -> None:
    """Unmap the group's memory, if it has any; the next call finds out anew whether the ranks share memory."""
    context = context_of(group)
    context.channel, context.has_tried_to_share = None, False


def _open(group: ProcessGroup) -> SharedMemory | None:
    t, rank = group.size(), group.rank()
    if not 2 <= t <= _MAX_RANKS or not is_gloo(group, torch.device("cpu")):
        return None
    hellos = gather_objects(None if why_not_here() is not None else _attempt(_where_and_who), _WHAT, group=group)
    if None in hellos or len({where for where, _ in hellos}) > 1:
        return None
    with contextlib.ExitStack() as stack:
        path, token = None, secrets.token_bytes(32)
        if rank == 0:
            path = _attempt(lambda: stack.enter_context(_reserved_file(channel_bytes(t), token)))
        path, token = gather_objects((path, token), _WHAT, group=group)[0]
        memory = None if path is None else _attempt(lambda: _map(path, channel_bytes(t), token))
        if not all(gather_objects(memory is not None, _WHAT, group=group)):
            return None
    assert memory is not None
    # Everybody has read the token before any flag is written in its place.
    if rank == 0:
        memory[: len(token)].zero_()
    gather_objects(True, _WHAT, group=group)
    limit = time_limit(group, torch.device("cpu")).total_seconds()
    return SharedMemory(rank, memory, [process for _, process in hellos], limit, dist.get_process_group_ranks(group))


def _where_and_who() -> tuple[str | None, Process | None]:
    """The machine, as this process sees it, and the process."""
    return machine(), Process.find(os.getpid())


def _attempt(function: Callable[[], T]) -> T | None:
    """``function()``, or None where the machine refuses: then gloo does the work."""
    try:
        return function()
    except (OSError, RuntimeError, ValueError):
        return None


@contextlib.contextmanager
def _reserved_file(num_bytes: int, token: bytes) -> Any:
    """The path of a file of that size whose memory is really there, gone at the end of the block."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    descriptor, path = tempfile.mkstemp(prefix=temporary_prefix("memory"), dir=folder)
    try:
        try:
            # A sparse file on a full disk would end the program at the first touch.
            os.posix_fallocate(descriptor, 0, num_bytes)
            os.write(descriptor, token)
        finally:
            os.close(descriptor)
        yield path
    finally:
        os.unlink(path)


def _map(path: str, num_bytes: int, token: bytes) -> Tensor:
    if os.stat(path).st_size != num_bytes:
        raise ValueError(f"{path} has another size than {num_bytes}")
    # PyTorch closes the descriptor once the memory is mapped.
    memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    if bytes(memory[: len(token)].tolist()) != token:
        raise ValueError(f"{path} is not the file that the first rank made")
    return memory
