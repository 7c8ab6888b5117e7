"""The ambient topology: one per process, set once, with Megatron's functions that read it.

Functions that take ``group=None`` look their group up here, once, at the public boundary. Programs with several
topologies build ``shardwise.core.topology.Topology`` and pass groups.

Every getter raises ``NotInitializedError`` before ``initialize_model_parallel``, and ``TopologyError`` where this rank
is in no group of that kind; with ``check_initialized=False`` it returns None instead. ``set_*`` override the numbers
that getters return, without touching a group, for tools and tests that have no such ranks. They work before
initialisation too, and ``destroy_model_parallel`` forgets them.
"""

import torch.distributed as dist

from shardwise.core.rank_grid import (
    RankGenerator as RankGenerator,
    default_embedding_ranks as default_embedding_ranks,
    default_position_embedding_ranks as default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
)
from shardwise.megatron.core.parallel_state import ambient, groups, stages
from shardwise.megatron.core.parallel_state.ambient import *  # noqa: F403
from shardwise.megatron.core.parallel_state.groups import *  # noqa: F403
from shardwise.megatron.core.parallel_state.reference_globals import look_up as _look_up
from shardwise.megatron.core.parallel_state.stages import *  # noqa: F403
from shardwise.megatron.surface import offer

create_group = dist.new_group


def __getattr__(name: str) -> object:
    # Megatron's globals; everything else is defined above.
    return _look_up(name)


offer(
    globals(),
    *(ambient, groups, stages),
    "RankGenerator create_group default_embedding_ranks default_position_embedding_ranks",
    "generate_masked_orthogonal_rank_groups",
)
