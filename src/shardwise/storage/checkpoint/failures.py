"""Errors of a checkpoint: one line, one class, on every rank alike."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from shardwise.core.errors import CheckpointError, ShardwiseError


def describe(error: BaseException) -> str:
    """``error`` as one line; the type is named unless the message stands for itself."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ShardwiseError | OSError) else f"{type(error).__name__}: {text}"


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
