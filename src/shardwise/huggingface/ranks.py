"""The ranks that share a model: one outcome on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed import ProcessGroup

from shardwise.communication.agreement import agree, tell_all
from shardwise.topology import Groups

_T = TypeVar("_T")


def agree_everywhere(function: Callable[[], _T], groups: Groups) -> _T:
    """``agree`` over all ranks that share the model, of whichever tensor-parallel rank and stage.

    What one rank fails with, first all of its tensor-parallel group raise, and then all stages.
    """
    step = function
    for group in model_groups(groups):
        step = _agreed(step, group)
    return step()


def _agreed(function: Callable[[], _T], group: ProcessGroup) -> Callable[[], _T]:
    return lambda: agree(function, group=group)


def model_groups(groups: Groups) -> list[ProcessGroup]:
    """The groups whose ranks share a model, without those of one rank; there is at least one."""
    found = [group for group in (groups.tp, groups.pp) if group is not None]
    return [group for group in found if group.size() > 1] or found[:1]


def tell_stages(value: _T, what: str, groups: Groups) -> list[_T]:
    """Every stage's ``value``, in their order; this rank's alone if there is one stage."""
    return [value] if groups.num_stages == 1 or groups.pp is None else tell_all(value, what, group=groups.pp)
