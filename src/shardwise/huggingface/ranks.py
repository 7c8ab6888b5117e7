"""The ranks that share a model: one outcome on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed import ProcessGroup

from shardwise.collectives.agreement import agree, tell_all
from shardwise.process_groups_config import ProcessGroupCollection

_T = TypeVar("_T")


def agree_everywhere(function: Callable[[], _T], groups: ProcessGroupCollection) -> _T:
    """``agree`` over all ranks that share the model, of whichever tensor-parallel rank and stage.

    What one rank fails with, first all of its tensor-parallel group raise, and then all stages.
    """
    step = function
    for group in model_groups(groups):
        step = _agreed(step, group)
    return step()


def _agreed(function: Callable[[], _T], group: ProcessGroup) -> Callable[[], _T]:
    return lambda: agree(function, group=group)


def model_groups(groups: ProcessGroupCollection) -> list[ProcessGroup]:
    """The groups whose ranks share a model, without those of one rank; there is at least one."""
    found = [group for name in ("tp", "pp") if (group := getattr(groups, name, None)) is not None]
    return [group for group in found if group.size() > 1] or found[:1]


def tell_stages(value: _T, what: str, groups: ProcessGroupCollection) -> list[_T]:
    """Every stage's ``value``, in their order; this rank's alone if there is one stage."""
    group: ProcessGroup | None = getattr(groups, "pp", None)
    return [value] if group is None or group.size() == 1 else tell_all(value, what, group=group)
