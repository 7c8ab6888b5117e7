"""One outcome on every rank: a result, or the same one-line error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from shardwise.errors import CheckpointError, ShardwiseError

T = TypeVar("T")
R = TypeVar("R")


def describe(error: BaseException) -> str:
    """``error`` as one line; the type is named unless the message stands for itself."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ShardwiseError | OSError) else f"{type(error).__name__}: {text}"


def decide(group: ProcessGroup, local: Callable[[], T], judge: Callable[[list[T]], R]) -> R:
    """Run ``local`` on every rank and ``judge`` on rank 0; every rank gets the judgement or the same error.

    Collective: one gather to rank 0 and one broadcast, of pickled objects between the ranks.

    Args:
        group: the ranks that take part; all of them call.
        local: this rank's contribution.
        judge: makes the result from all contributions, in rank order.

    Raises:
        CheckpointError: ``local`` failed on some rank, or ``judge`` on rank 0; on every rank with one message.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    cause: Exception | None = None
    contribution: tuple[Any, str | None]
    try:
        contribution = (local(), None)
    except Exception as error:
        cause, contribution = error, (None, describe(error))
    gathered: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(contribution, gathered, group=group, group_dst=0)
    outcome: list[Any] = [None]
    if gathered is not None:
        message = _first_message([message for _, message in gathered])
        result = None
        if message is None:
            try:
                result = judge([value for value, _ in gathered])
            except Exception as error:
                cause, message = error, describe(error)
        outcome = [(result, message)]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    result, message = outcome[0]
    if message is not None:
        raise CheckpointError(message) from cause
    return cast(R, result)


def as_checkpoint_error(failure: CheckpointException) -> CheckpointError:
    """The one message of a torch.distributed.checkpoint failure, which every rank of the group has heard of alike.

    Raises:
        KeyboardInterrupt: or whatever else that is no ``Exception`` ended a rank: that is not the checkpoint's failure.
    """
    errors = {rank: error for rank, (error, _) in sorted(failure.failures.items())}
    for error in errors.values():
        if not isinstance(error, Exception):
            raise error
    message = _first_message([describe(error) for error in errors.values()])
    return CheckpointError(message or "unknown failure")


def _first_message(messages: list[str | None]) -> str | None:
    """The lowest rank's message, None if no rank has one."""
    return next((message for message in messages if message is not None), None)
