"""One outcome on every rank: what fails on one fails alike on all, and nobody waits for a rank that gave up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.errors import DesyncError, ShardwiseError

T = TypeVar("T")


def agree(function: Callable[[], T], *, group: ProcessGroup) -> T:
    """Run ``function`` on every rank; if it raises on any, raise that error on all.

    Collective, for set-up and input and output: it exchanges Python objects.

    Args:
        function: this rank's work; without collectives of its own.
        group: the ranks that must agree.

    Returns:
        What ``function`` returned on this rank.

    Raises:
        ShardwiseError: the first failing rank's error, of its class and with its message. An error of another kind
            stays itself on the rank that had it; the others get a DesyncError that names it.
    """
    result: T | None = None
    own: Exception | None = None
    try:
        result = function()
    except Exception as error:
        own = error
    described = None if own is None else (own if isinstance(own, ShardwiseError) else repr(own))
    failures = tell_all(described, "the outcome of a step that all must take", group=group)
    if own is not None and not isinstance(own, ShardwiseError):
        raise own
    for rank, failure in enumerate(failures):
        if isinstance(failure, ShardwiseError):
            raise failure from own
        if failure is not None:
            raise DesyncError(f"rank {rank} failed with {failure}")
    return result  # type: ignore[return-value]


def tell_all(value: Any, what: str, *, group: ProcessGroup) -> list[Any]:
    """Every rank's ``value``, in rank order. Collective.

    Args:
        value: a small picklable object.
        what: what it is, for the message.
        group: the ranks that take part.

    Raises:
        DesyncError: a rank is gone, or does not come within the group's time limit.
    """
    values: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise DesyncError(
            f"rank {group.rank()} of {group.size()} could not exchange {what} with the others; another rank ended, or "
            f"did not come: {error}"
        ) from error
    return values


def check_same(value: object, what: str, *, group: ProcessGroup) -> None:
    """Raise DesyncError on every rank unless ``value`` is equal on all of them.

    Args:
        value: a small picklable object.
        what: what it is, for the message.
        group: the ranks that must agree.
    """
    values = tell_all(value, what, group=group)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise DesyncError(f"ranks disagree on {what}: rank 0 has {values[0]!r}, rank {rank} has {other!r}")
