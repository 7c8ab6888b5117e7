"""What a process group has for as long as it lives: here its communication buffers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

from shardwise.communication.buffers import GlobalMemoryBuffer


@dataclass
class GroupContext:
    """What belongs to one group.

    Attributes:
        buffers: memory that is used again and again for what the group gathers.
    """

    buffers: GlobalMemoryBuffer = field(default_factory=GlobalMemoryBuffer)


_contexts: weakref.WeakKeyDictionary[ProcessGroup, GroupContext] = weakref.WeakKeyDictionary()


def context_of(group: ProcessGroup) -> GroupContext:
    """The group's context; the first call makes it."""
    context = _contexts.get(group)
    if context is None:
        context = _contexts[group] = GroupContext()
    return context
