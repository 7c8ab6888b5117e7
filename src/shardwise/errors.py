"""Every error that Shardwise raises on purpose.

::

    ShardwiseError
    ├── ConfigError      (ValueError)    a setting that cannot be, or two that contradict each other
    ├── ShardingError    (ValueError)    a size, shape or split that does not fit the ranks
    │   └── IndivisibleError (AssertionError)     a quotient that is not whole
    ├── VocabularyError  (ValueError)    a token id outside the vocabulary
    ├── DataError        (ValueError)    a corpus, file or line that cannot be read as what it should be
    ├── CheckpointError  (RuntimeError)  a checkpoint that is damaged, incomplete or of another model
    ├── TopologyError    (RuntimeError)  groups used before initialisation, twice, or not to be had
    │   └── NotInitializedError (AssertionError)  groups used before initialisation
    ├── DesyncError      (RuntimeError)  ranks that disagree on what they are about to do
    ├── DivergenceError  (RuntimeError)  a loss that is no longer a number
    ├── ParityError      (RuntimeError)  a parallel result that does not equal the dense one
    └── LaunchError      (RuntimeError)  a rank that died, or could not be started

Each is also the builtin in brackets, so that callers who do not know Shardwise catch what they expect.
A message carries the values that broke the rule and says what to do.
"""


class ShardwiseError(Exception):
    """Base of all errors raised on purpose by Shardwise."""


class ConfigError(ShardwiseError, ValueError):
    """A setting that cannot be, or two settings that contradict each other."""


class ShardingError(ShardwiseError, ValueError):
    """A size, shape or split that does not fit the ranks."""


class IndivisibleError(ShardingError, AssertionError):
    """A quotient that is not whole; an AssertionError too, which code for the reference catches."""


class VocabularyError(ShardwiseError, ValueError):
    """A token id outside the vocabulary."""


class DataError(ShardwiseError, ValueError):
    """A corpus, file or line that cannot be read as what it should be."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that is damaged, incomplete or of another model."""


class TopologyError(ShardwiseError, RuntimeError):
    """Process groups used before initialisation, initialised twice, or not to be had on this machine."""


class NotInitializedError(TopologyError, AssertionError):
    """Process groups used before initialisation; an AssertionError too, which code for the reference catches."""


class DesyncError(ShardwiseError, RuntimeError):
    """Ranks that disagree on what they are about to do."""


class DivergenceError(ShardwiseError, RuntimeError):
    """A loss that is no longer a number."""


class ParityError(ShardwiseError, RuntimeError):
    """A parallel result that does not equal the dense one."""


class LaunchError(ShardwiseError, RuntimeError):
    """A rank that died, or that could not be started."""
