"""One outcome on every rank: what fails on one fails alike on all, and nobody waits for a rank that gave up."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import accounting
from shardwise.core.communication.context import context_of
from shardwise.core.communication.waiting import Wait
from shardwise.core.errors import DesyncError, ShardwiseError
from shardwise.core.validation import check_ids

T = TypeVar("T")
R = TypeVar("R")


def decide(local: Callable[[], T], judge: Callable[[list[T]], R], *, group: ProcessGroup) -> R:
    """Run ``local`` on every rank and ``judge`` on rank 0; every rank gets the judgement, or the same error.

    Collective, for set-up and input and output: one gather to rank 0 and one broadcast, of Python objects.

    Args:
        local: this rank's contribution; without collectives of its own.
        judge: makes the result from all contributions, in rank order.
        group: the ranks that take part.

    Raises:
        ShardwiseError: the first failing rank's error, of its class and with its message; ``judge``'s if no rank failed
            before. An error of another kind stays itself on the rank that had it; the others get a DesyncError that
            names it.
        DesyncError: a rank is gone, or does not come within the group's time limit.
    """
    rank = group.rank()
    own: Exception | None = None
    value: T | None = None
    try:
        value = local()
    except Exception as error:
        own = error
    gathered: list[Any] | None = [None] * group.size() if rank == 0 else None
    verdict: list[Any] = [None]
    with _desync_error("what each contributes to a decision", group):
        dist.gather_object((value, _failure(own, rank)), gathered, group=group, group_dst=0)
    if gathered is not None:
        result, failure = None, next((failure for _, failure in gathered if failure is not None), None)
        if failure is None:
            try:
                result = judge([contribution for contribution, _ in gathered])
            except Exception as error:
                own, failure = error, _failure(error, rank)
        verdict = [(result, failure)]
    with _desync_error("a decision", group):
        dist.broadcast_object_list(verdict, group=group, group_src=0)
    result, failure = verdict[0]
    if failure is None:
        return cast(R, result)
    if own is not None and not isinstance(own, ShardwiseError):
        raise own
    raise failure from own


def agree(
    function: Callable[[], T], *, group: ProcessGroup | Sequence[ProcessGroup], only_validated: bool = False
) -> T:
    """Run ``function`` on every rank; if it raises on any, raise that error on all, as ``decide`` does.

    Collective, for set-up and input and output.

    Args:
        function: this rank's work; without collectives of its own.
        group: the ranks that must agree; of several groups, first those of the first, and then these with the next's.
        only_validated: only in a group whose calls are validated; in any other the function just runs. A rank that
            fails alone there is missed by the others in their next collective: an error once it has died, else at the
            group's time limit.

    Returns:
        What ``function`` returned on this rank.
    """
    groups = [group] if isinstance(group, ProcessGroup) else group
    if only_validated:
        if torch.compiler.is_compiling() or not any(context_of(each).validates for each in groups):
            return function()
        with accounting.uncounted():
            return agree(function, group=groups)
    *inner, outermost = groups
    results: list[T] = []
    decide(
        lambda: results.append(agree(function, group=inner) if inner else function()), lambda _: None, group=outermost
    )
    return results[0]


def check_ids_alike(
    ids: Tensor, vocab_size: int, *, what: str, group: ProcessGroup, ignore_index: int | None = None
) -> None:
    """``check_ids`` of what all ranks of ``group`` have, alike on all of them where the group's calls are validated.

    There it waits for a GPU too, unless it is inside ``DeferredChecks``.
    """
    may_wait = context_of(group).validates
    check = partial(check_ids, ids, vocab_size, what=what, ignore_index=ignore_index, may_wait=may_wait)
    agree(check, group=group, only_validated=True)


def gather_objects(value: Any, what: str, *, group: ProcessGroup) -> list[Any]:
    """Every rank's ``value``, in rank order. Collective.

    Args:
        value: a small picklable object.
        what: what it is, for the message.
        group: the ranks that take part.

    Raises:
        DesyncError: a rank is gone, or does not come within the group's time limit.
    """
    values: list[Any] = [None] * group.size()
    with _desync_error(what, group):
        dist.all_gather_object(values, value, group=group)
    return values


def check_same(value: object, what: str, *, group: ProcessGroup) -> None:
    """Raise DesyncError on every rank unless ``value`` is equal on all of them.

    Args:
        value: a small picklable object.
        what: what it is, for the message.
        group: the ranks that must agree.
    """
    values = gather_objects(value, what, group=group)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise DesyncError(f"ranks disagree on {what}: rank 0 has {values[0]!r}, rank {rank} has {other!r}")


def barrier(what: str, *, group: ProcessGroup) -> None:
    """Wait until every rank is here. Collective.

    Args:
        what: what is done by then, for the message.
        group: the ranks that wait for each other.

    Raises:
        DesyncError: a rank is gone, or does not come within the group's time limit.
    """
    with _desync_error(what, group):
        dist.barrier(group=group)


def _failure(error: Exception | None, rank: int) -> ShardwiseError | None:
    """``error`` as the other ranks hear of it: they might not know, or not be able to receive, another's class."""
    if error is None or isinstance(error, ShardwiseError):
        return error
    return DesyncError(f"rank {rank} failed with {error!r}")


@contextmanager
def _desync_error(what: str, group: ProcessGroup) -> Iterator[None]:
    """A failure to exchange ``what`` as a DesyncError."""
    with Wait(f"an exchange of {what}", group) as wait:
        try:
            yield
        except RuntimeError as error:
            found = f"{wait.finding}; " if wait.finding else ""
            raise DesyncError(
                f"{found}rank {group.rank()} of {group.size()} could not exchange {what} with the others; another rank "
                f"ended, or did not come: {error}"
            ) from error
