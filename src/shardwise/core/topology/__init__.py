"""How ranks are laid out: sizes, to a grid of ranks (pure), to process groups.

A ``Topology`` is frozen once built. Several may live in one process; ``parallel_state`` holds the ambient one.
"""

from shardwise.core.topology.groups import Groups as Groups, Topology as Topology
from shardwise.core.topology.sizes import (
    DEFAULT_ORDER as DEFAULT_ORDER,
    EmbeddingRanks as EmbeddingRanks,
    ParallelSizes as ParallelSizes,
    RankGenerator as RankGenerator,
    default_embedding_ranks as default_embedding_ranks,
    default_position_embedding_ranks as default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
)
