"""The ranks that share a model."""

from typing import TypeVar

from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import gather_objects
from shardwise.core.topology import Groups

_T = TypeVar("_T")


def model_groups(groups: Groups) -> list[ProcessGroup]:
    """The groups whose ranks share a model, without those of one rank; there is at least one."""
    found = [group for group in (groups.tp, groups.pp) if group is not None]
    return [group for group in found if group.size() > 1] or found[:1]


def gather_from_stages(value: _T, what: str, groups: Groups) -> list[_T]:
    """Every stage's ``value``, in their order; this rank's alone if there is one stage."""
    return [value] if groups.num_stages == 1 or groups.pp is None else gather_objects(value, what, group=groups.pp)
