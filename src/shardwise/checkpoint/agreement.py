"""Errors of a checkpoint: one line, one class, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from shardwise.communication import agreement
from shardwise.errors import CheckpointError, ShardwiseError

T = TypeVar("T")
R = TypeVar("R")


def describe(error: BaseException) -> str:
    """``error`` as one line; the type is named unless the message stands for itself."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ShardwiseError | OSError) else f"{type(error).__name__}: {text}"


def decide(local: Callable[[], T], judge: Callable[[list[T]], R], *, group: ProcessGroup) -> R:
    """``communication.agreement.decide``, with whatever error there is as the same CheckpointError on every rank."""

    def checked_local() -> T:
        with checkpoint_errors():
            return local()

    def checked_judge(contributions: list[T]) -> R:
        with checkpoint_errors():
            return judge(contributions)

    return agreement.decide(checked_local, checked_judge, group=group)


@contextmanager
def checkpoint_errors() -> Iterator[None]:
    """Turn an error into a CheckpointError.

    torch.distributed.checkpoint's carries those of all ranks, and every rank has heard of it alike: the lowest rank's
    is taken. What is no ``Exception`` (KeyboardInterrupt) is not the checkpoint's failure, and stays.
    """
    try:
        yield
    except CheckpointException as failure:
        errors = [error for _, (error, _) in sorted(failure.failures.items())]
        for error in errors:
            if not isinstance(error, Exception):
                raise error from failure
        raise CheckpointError(describe(errors[0])) from failure
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(describe(error)) from error
