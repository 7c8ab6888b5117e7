"""Errors of Megatron's names, which are AssertionErrors too where Megatron has an ``assert``."""

import contextlib
from collections.abc import Iterator

from shardwise.core.errors import ConfigError, DataError, ShardingError, ShardwiseError, TopologyError


class AssertedConfigError(ConfigError, AssertionError):
    """A required argument is missing, or contradicts an earlier one."""


class AssertedDataError(DataError, AssertionError):
    """Tensors are missing or do not have the announced dtype."""


class AssertedShardingError(ShardingError, AssertionError):
    """A view instead of a tensor, or lists of different lengths."""


class IndivisibleError(ShardingError, AssertionError):
    """A quotient is not an integer."""


class AssertedTopologyError(TopologyError, AssertionError):
    """The topology is initialised already, or this rank is not in the group."""


class NotInitializedError(TopologyError, AssertionError):
    """Process groups are used before initialisation."""


@contextlib.contextmanager
def asserting(*kinds: type[ShardwiseError]) -> Iterator[None]:
    """Convert the engine's errors to ``kinds``, in a block or as a decorator; the message stays the same.

    Args:
        kinds: classes of this module. An error is converted to the class whose first base is the error's class.
    """
    try:
        yield
    except ShardwiseError as error:
        for kind in kinds:
            if kind.__bases__[0] is type(error):
                raise kind(*error.args).with_traceback(error.__traceback__) from None
        raise
