"""What a process group has for as long as it lives, in one place."""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from shardwise.core.communication.buffers import GlobalMemoryBuffer, MemoryBlock

if TYPE_CHECKING:
    from shardwise.core.communication.transports.shared_memory import SharedMemory


@dataclass(eq=False)
class GroupContext:
    """What belongs to one group.

    Attributes:
        buffers: memory that is used again and again for what the group gathers.
        validates: every call is compared between the ranks before it is made.
        channel: the memory that the ranks share; None if they share none, or have not tried.
        has_tried_to_share: the ranks have found out whether they share memory.
        time_limits: by type of device, how long a rank waits for another; None where waiting is the stream's affair.
        symmetric_buffers: by device, memory that the ranks reach in each other, where they can.
        symmetric_refusals: by device, why they cannot; None where they can.
        agreed_kernels: for which devices and dtypes the ranks have agreed on their kernels (``kernels.agreed``).
        tried_operators: which fused operators have run on all ranks in such memory, and of which dtype.
        num_messages: how many messages between two ranks this rank has sent and received.
        exact_parts: over how many parts sums go, by a tree that is the same at every number of ranks (``trees``); None
            where a sum is the transport's.
    """

    buffers: GlobalMemoryBuffer = field(default_factory=GlobalMemoryBuffer)
    validates: bool = False
    channel: SharedMemory | None = None
    has_tried_to_share: bool = False
    time_limits: dict[str, datetime.timedelta | None] = field(default_factory=dict)
    symmetric_buffers: dict[torch.device, MemoryBlock] = field(default_factory=dict)
    symmetric_refusals: dict[torch.device, str | None] = field(default_factory=dict)
    agreed_kernels: set[tuple[torch.device, torch.dtype]] = field(default_factory=set)
    tried_operators: set[tuple[str, torch.dtype]] = field(default_factory=set)
    num_messages: int = 0
    exact_parts: int | None = None


_contexts: weakref.WeakKeyDictionary[ProcessGroup, GroupContext] = weakref.WeakKeyDictionary()


def context_of(group: ProcessGroup) -> GroupContext:
    """The group's context; the first call makes it."""
    context = _contexts.get(group)
    if context is None:
        context = _contexts[group] = GroupContext()
    return context


def validate_calls(group: ProcessGroup) -> None:
    """From now on compare every collective of ``group`` (operation, shape, dtype, sizes) between its ranks.

    A disagreement is a DesyncError on every rank that names what each is about to do. Costs an exchange per call; in
    shared memory calls are always compared, at no cost. Where neither is so, PyTorch's backends count bytes at best:
    gloo sums a tensor of shape [4, 4] with one of [2, 8] without a word.
    """
    context_of(group).validates = True


@contextlib.contextmanager
def validated_calls(groups: Iterable[ProcessGroup]) -> Iterator[None]:
    """Within the block compare every collective of ``groups`` as ``validate_calls`` does from then on."""
    contexts = [context for context in map(context_of, groups) if not context.validates]
    for context in contexts:
        context.validates = True
    try:
        yield
    finally:
        for context in contexts:
            context.validates = False
