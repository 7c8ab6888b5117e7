"""Shardwise: Megatron-style parallelism for PyTorch, checked against one rank.

``import shardwise`` does not import PyTorch, which keeps it and ``shardwise --help`` fast. Import what you use::

    from shardwise import Topology
    from shardwise.nn import ColumnLinear, RowLinear
    from shardwise.nn.loss import vocab_parallel_cross_entropy

Programs written for Megatron find its names in ``shardwise.tensor_parallel``, ``shardwise.parallel_state`` and
``shardwise.megatron``.
"""

import sys

# Type checkers know the name. An import of ``typing`` takes longer than the rest of this file, in which the command
# cannot note a signal yet.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

__version__ = "0.1.0"

__all__ = ["Groups", "Topology", "on_ranks", "parallelize"]


class _Doors:
    """Meta path finder of the two packages whose modules are in ``shardwise.megatron.core``."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name not in ("shardwise.parallel_state", "shardwise.tensor_parallel"):
            return None
        from shardwise.megatron.aliases import FINDER

        return FINDER.find_spec(name)


sys.meta_path.append(_Doors)


def __getattr__(name: str) -> object:
    # The first access to a name imports PyTorch.
    if name in ("Groups", "Topology"):
        from shardwise.core import topology

        return getattr(topology, name)
    if name == "parallelize":
        from shardwise.models.by_plan.parallelize import parallelize

        return parallelize
    if name == "on_ranks":
        from shardwise.cli.on_ranks import on_ranks

        return on_ranks
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
