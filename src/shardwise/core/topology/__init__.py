"""How ranks are laid out: sizes, to a grid of ranks (pure), to process groups.

A ``Topology`` is frozen once built. Several may live in one process; ``parallel_state`` holds the ambient one.
"""

from shardwise.core.topology.grid import RankGenerator as RankGenerator
from shardwise.core.topology.grid import (
    generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
)
from shardwise.core.topology.groups import Topology as Topology
from shardwise.core.topology.sizes import DEFAULT_ORDER as DEFAULT_ORDER
from shardwise.core.topology.sizes import EmbeddingRanks as EmbeddingRanks
from shardwise.core.topology.sizes import ParallelSizes as ParallelSizes
from shardwise.core.topology.sizes import default_embedding_ranks as default_embedding_ranks
from shardwise.core.topology.sizes import default_position_embedding_ranks as default_position_embedding_ranks
from shardwise.core.topology.view import Groups as Groups
