"""Process groups that several tests need."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup


def alone(group: ProcessGroup) -> ProcessGroup:
    """Create a group of only this rank. Collective over ``group``, which has all ranks."""
    groups = [dist.new_group([rank]) for rank in range(group.size())]
    return groups[group.rank()]
