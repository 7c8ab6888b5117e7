"""Megatron's strategies of checkpoints, which programs make and hand to ``save`` and ``load``; they change nothing.

There is one format. Each part is written by one of the ranks that hold it, and these share the work; each rank reads
what it holds.
"""

from typing import Any

from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.megatron.surface import offer


class _Strategy:
    def __init__(self, backend: str = "torch_dist", version: int = 1) -> None:
        if backend != "torch_dist":
            raise ConfigError(f"backend is {backend!r}; give 'torch_dist', or leave it out: there is one format here")
        self.backend, self.version = backend, version


class TorchDistLoadShardedStrategy(_Strategy):
    """Accepted by ``load``.

    Args:
        backend: "torch_dist".
        version: no effect.

    Raises:
        ConfigError: another backend.
    """


class TorchDistSaveShardedStrategy(_Strategy):
    """Accepted by ``save``.

    Args:
        backend: "torch_dist".
        version, options: no effect.

    Raises:
        ConfigError: another backend.
    """

    def __init__(self, backend: str = "torch_dist", version: int = 1, *_: Any, **options: Any) -> None:
        super().__init__(backend, version)


class FullyParallelSaveStrategyWrapper(_Strategy):
    """Accepted by ``save``, which always shares the work over all ranks.

    Args:
        strategy: the strategy to wrap, stored as ``base_strategy``.
        parallelization_group, options: no effect.
    """

    def __init__(
        self, strategy: Any, parallelization_group: ProcessGroup | None = None, *_: Any, **options: Any
    ) -> None:
        super().__init__()
        self.base_strategy, self.parallelization_group = strategy, parallelization_group


class FullyParallelLoadStrategyWrapper(FullyParallelSaveStrategyWrapper):
    """Accepted by ``load``; see ``FullyParallelSaveStrategyWrapper``."""


offer(globals())
