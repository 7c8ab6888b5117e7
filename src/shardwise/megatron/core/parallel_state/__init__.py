"""The ambient topology, one per process, with Megatron's functions that read it.

Public functions with ``group=None`` look up their group here, once. Programs with several topologies build
``shardwise.core.topology.Topology`` objects and pass groups.

Getters raise ``NotInitializedError`` before ``initialize_model_parallel``, and ``TopologyError`` if this rank is in no
such group; with ``check_initialized=False`` they return None instead. The ``set_*`` functions override the numbers that
getters return, without changing a group, for tools and tests without such ranks. They also work before initialisation.
``destroy_model_parallel`` removes the overrides.
"""

import torch.distributed as dist

from shardwise.core.rank_grid import (
    RankGenerator as RankGenerator,
    default_embedding_ranks as default_embedding_ranks,
    default_position_embedding_ranks as default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
)
from shardwise.megatron.absent import ABSENT, absent_names
from shardwise.megatron.core.parallel_state import ambient, groups, stages
from shardwise.megatron.core.parallel_state.ambient import *  # noqa: F403
from shardwise.megatron.core.parallel_state.groups import *  # noqa: F403
from shardwise.megatron.core.parallel_state.reference_globals import look_up as _look_up
from shardwise.megatron.core.parallel_state.stages import *  # noqa: F403
from shardwise.megatron.surface import offer

create_group = dist.new_group


_absent = absent_names("parallel_state")


def __getattr__(name: str) -> object:
    # Megatron's globals, and names that are refused; other names are defined above.
    return _absent(name) if name in ABSENT["parallel_state"] else _look_up(name)


offer(
    globals(),
    *(ambient, groups, stages),
    "RankGenerator create_group default_embedding_ranks default_position_embedding_ranks",
    "generate_masked_orthogonal_rank_groups",
)
