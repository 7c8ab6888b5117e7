"""Process groups that several tests need."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup


def alone(group: ProcessGroup) -> ProcessGroup:
    """Create a group of only this rank. Collective over ``group``, which has all ranks."""
    groups = [dist.new_group([rank]) for rank in range(group.size())]
    return groups[group.rank()]


def from_first_rank(value: Any) -> Any:
    """What rank 0 of all ranks has, on every rank. Collective."""
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]
