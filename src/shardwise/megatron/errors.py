"""Errors of programs written for Megatron: where it has an ``assert``, its names raise an AssertionError here too.

::

    ConfigError
    └── AssertedConfigError    an argument that is missing, or contradicts an earlier one
    DataError
    └── AssertedDataError      tensors that are not what they were announced to be
    ShardingError
    ├── AssertedShardingError  a view instead of a tensor, lists of different lengths
    └── IndivisibleError       a quotient that is not whole
    TopologyError
    ├── AssertedTopologyError  initialised already, or a group that this rank is not in
    └── NotInitializedError    groups used before initialisation
"""

import contextlib
from collections.abc import Iterator

from shardwise.core.errors import ConfigError, DataError, ShardingError, ShardwiseError, TopologyError


class AssertedConfigError(ConfigError, AssertionError):
    """An argument that the call needs and lacks, or that contradicts an earlier one."""


class AssertedDataError(DataError, AssertionError):
    """Tensors that are not what they were announced to be."""


class AssertedShardingError(ShardingError, AssertionError):
    """A view instead of a tensor, or lists of different lengths."""


class IndivisibleError(ShardingError, AssertionError):
    """A quotient that is not whole."""


class AssertedTopologyError(TopologyError, AssertionError):
    """Initialised already, or a group that this rank is not in."""


class NotInitializedError(TopologyError, AssertionError):
    """Process groups used before initialisation."""


@contextlib.contextmanager
def asserting(*kinds: type[ShardwiseError]) -> Iterator[None]:
    """Raise the engine's errors as those of ``kinds``, in a block or as a decorator; the message stays the same.

    Args:
        kinds: classes of this module. An error becomes the one whose first base is its own class.
    """
    try:
        yield
    except ShardwiseError as error:
        for kind in kinds:
            if kind.__bases__[0] is type(error):
                raise kind(*error.args).with_traceback(error.__traceback__) from None
        raise
