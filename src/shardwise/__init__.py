"""Shardwise: Megatron-style tensor parallelism for PyTorch, small and exact, on any device.

Nothing heavy is imported here, so that ``import shardwise`` and ``shardwise --help`` are quick; import what you use::

    from shardwise import Topology
    from shardwise.nn import ColumnLinear, RowLinear
    from shardwise.nn.loss import vocab_parallel_cross_entropy

Programs written for Megatron find its names in ``shardwise.tensor_parallel``, ``shardwise.parallel_state`` and
``shardwise.megatron``.
"""

import sys
from importlib.machinery import ModuleSpec

__version__ = "0.1.0"

__all__ = ["Groups", "Topology"]


class _Doors:
    """Finds the two packages whose modules lie in ``shardwise.megatron.core``."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in ("shardwise.parallel_state", "shardwise.tensor_parallel"):
            return None
        from shardwise.megatron.aliases import FINDER

        return FINDER.find_spec(name)


sys.meta_path.append(_Doors)


def __getattr__(name: str) -> object:
    # PyTorch is imported with the first class that is asked for.
    if name in ("Groups", "Topology"):
        from shardwise.core import topology

        return getattr(topology, name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
