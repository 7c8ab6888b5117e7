"""The ambient topology: one per process, set once, read by whoever was not handed a group.

Functions that take ``group=None`` look their group up here, once, at the public boundary. Programs that use several
topologies build ``shardwise.core.topology.Topology`` themselves and pass groups.

Every getter raises ``NotInitializedError`` before ``initialize_model_parallel``, and ``TopologyError`` where this rank
is in no group of that kind; with ``check_initialized=False`` it returns None instead. ``set_*`` override what the
getters tell, without touching a group, for tools and tests that have no such ranks; they work before initialisation
too, and ``destroy_model_parallel`` forgets them.
"""

from torch.distributed import new_group as create_group

from shardwise.core.rank_grid import (
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
)
from shardwise.megatron.core.parallel_state import groups, initialize, memory, stages
from shardwise.megatron.core.parallel_state.ambient import (
    get_all_ranks,
    get_topology,
    resolve_tensor_model_parallel_group,
)
from shardwise.megatron.core.parallel_state.groups import *  # noqa: F403 (its functions are offered here)
from shardwise.megatron.core.parallel_state.initialize import *  # noqa: F403 (likewise)
from shardwise.megatron.core.parallel_state.memory import *  # noqa: F403 (likewise)
from shardwise.megatron.core.parallel_state.reference_globals import look_up as _look_up
from shardwise.megatron.core.parallel_state.stages import *  # noqa: F403 (likewise)

__all__ = [
    "RankGenerator",
    "create_group",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "generate_masked_orthogonal_rank_groups",
    "get_all_ranks",
    "get_topology",
    "resolve_tensor_model_parallel_group",
]
for _module in (groups, initialize, memory, stages):
    # What a module defines, and not what it imports.
    __all__ += [name for name, value in vars(_module).items() if getattr(value, "__module__", "") == _module.__name__]
__all__ = [name for name in __all__ if not name.startswith("_")]


def __getattr__(name: str) -> object:
    # Megatron's globals; everything else is defined above.
    return _look_up(name)
