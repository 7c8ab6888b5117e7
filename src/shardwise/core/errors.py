"""Every error that Shardwise raises on purpose.

::

    ShardwiseError
    ├── ConfigError      (ValueError)    a setting out of range, or two that contradict each other
    │   ├── ContradictionError    (RuntimeError)    settings that exclude each other
    │   └── UnwritableError       (ValueError)      a file or folder that cannot be written
    ├── ShardingError    (ValueError)    a size, shape or split that does not fit the ranks
    │   └── WeightError           (RuntimeError)    a layer called without its weight, or with one of another shape
    ├── VocabularyError  (ValueError)    a token id outside the vocabulary
    ├── DataError        (ValueError)    a corpus, file or line that is not in the format that it should be in
    ├── CheckpointError  (RuntimeError)  a checkpoint that is damaged, incomplete or of another model
    ├── TopologyError    (RuntimeError)  groups used before initialisation, twice, or not to be had
    ├── DesyncError      (RuntimeError)  ranks that disagree on what they are about to do
    ├── DivergenceError  (RuntimeError)  a loss that is NaN
    ├── OutOfMemoryError (MemoryError)   a rank that needs more memory than there is
    ├── ParityError      (RuntimeError)  a parallel result that does not equal the dense one
    └── LaunchError      (RuntimeError)  a rank that died, or could not be started

Each is also the builtin in brackets, so that callers who do not know Shardwise catch what they expect; a RuntimeError
of Megatron that is a ValueError here is both. Where Megatron has an ``assert``, its names raise the errors of
``shardwise.megatron.errors``. A message carries the values that broke the rule and says what to do.
"""

REPORT = "if {}, the mistake is Shardwise's own: please report it"
"""End of the message of an error whose cause may be Shardwise; ``{}`` is how to tell."""


class ShardwiseError(Exception):
    """Base of all errors raised on purpose by Shardwise."""


class ConfigError(ShardwiseError, ValueError):
    """A setting out of range, or two settings that contradict each other."""


class ContradictionError(ConfigError, RuntimeError):
    """Settings that exclude each other; a RuntimeError in Megatron."""


class UnwritableError(ConfigError):
    """A file or a folder that cannot be made or written."""


class ShardingError(ShardwiseError, ValueError):
    """A size, shape or split that does not fit the ranks."""


class WeightError(ShardingError, RuntimeError):
    """A layer called without its weight, or with one of another shape; a RuntimeError in Megatron."""


class VocabularyError(ShardwiseError, ValueError):
    """A token id outside the vocabulary."""


class DataError(ShardwiseError, ValueError):
    """A corpus, file or line that is not in the format that it should be in."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that is damaged, incomplete or of another model."""


class TopologyError(ShardwiseError, RuntimeError):
    """Process groups used before initialisation, initialised twice, or not to be had on this machine."""


class DesyncError(ShardwiseError, RuntimeError):
    """Ranks that disagree on what they are about to do."""


class DivergenceError(ShardwiseError, RuntimeError):
    """A loss that is NaN."""


class OutOfMemoryError(ShardwiseError, MemoryError):
    """A rank that needs more memory than there is.

    Attributes:
        details: lines to print below the message, such as the memory that the run needs.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class ParityError(ShardwiseError, RuntimeError):
    """A parallel result that does not equal the dense one."""


class LaunchError(ShardwiseError, RuntimeError):
    """A rank that died, or that could not be started."""
