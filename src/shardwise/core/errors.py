"""Every error that Shardwise raises on purpose.

Each also derives from an error of Python, so that code that does not know Shardwise can catch it. An error that is a
RuntimeError in Megatron and a ValueError here derives from both. Where Megatron has an ``assert``, its names raise the
errors of ``shardwise.megatron.errors``. A message names the values that broke the rule, and the remedy.
"""

REPORT = "if {}, the mistake is Shardwise's own: please report it"
"""End of the message of an error that may be a bug in Shardwise; ``{}`` is how to tell."""


class ShardwiseError(Exception):
    """Base class of all errors that Shardwise raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """A setting out of range, or two settings that contradict each other."""


class ContradictionError(ConfigError, RuntimeError):
    """Settings that cannot be used together; a RuntimeError in Megatron."""


class UnwritableError(ConfigError):
    """A file or folder that cannot be created or written."""


class ShardingError(ShardwiseError, ValueError):
    """A size, shape or split that does not fit the ranks."""


class WeightError(ShardingError, RuntimeError):
    """A layer called without its weight, or with one of another shape; a RuntimeError in Megatron."""


class VocabularyError(ShardwiseError, ValueError):
    """A token id outside the vocabulary."""


class DataError(ShardwiseError, ValueError):
    """A corpus, file or line in the wrong format."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that is damaged, incomplete or of another model."""


class TopologyError(ShardwiseError, RuntimeError):
    """Process groups used before initialisation, initialised twice, or unavailable on this machine."""


class DesyncError(ShardwiseError, RuntimeError):
    """Ranks that disagree on what they are about to do."""


class DivergenceError(ShardwiseError, RuntimeError):
    """A loss that is NaN."""


class OutOfMemoryError(ShardwiseError, MemoryError):
    """A rank that needs more memory than is available; ``details`` are lines to print below the message."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class ParityError(ShardwiseError, RuntimeError):
    """A parallel result that differs from the dense one."""


class LaunchError(ShardwiseError, RuntimeError):
    """A rank that died or could not be started."""
