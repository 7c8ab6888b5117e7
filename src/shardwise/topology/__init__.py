"""How ranks are laid out: sizes, to a grid of ranks (pure), to process groups.

A ``Topology`` is frozen once built. Several may live in one process; ``parallel_state`` holds the ambient one.
"""

from shardwise.topology.grid import RankGenerator, generate_masked_orthogonal_rank_groups
from shardwise.topology.groups import Topology
from shardwise.topology.sizes import (
    DEFAULT_ORDER,
    EmbeddingRanks,
    ParallelSizes,
    default_embedding_ranks,
    default_position_embedding_ranks,
)
from shardwise.topology.view import Groups

__all__ = [
    "DEFAULT_ORDER",
    "EmbeddingRanks",
    "Groups",
    "ParallelSizes",
    "RankGenerator",
    "Topology",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "generate_masked_orthogonal_rank_groups",
]
