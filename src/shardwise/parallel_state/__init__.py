"""The ambient topology: one per process, set once, read by whoever was not handed a group.

Functions that take ``group=None`` look their group up here, once, at the public boundary. Programs that use several
topologies build ``shardwise.topology.Topology`` themselves and pass groups.

Every getter raises ``NotInitializedError`` before ``initialize_model_parallel``, and ``TopologyError`` where this rank
is in no group of that kind; with ``check_initialized=False`` it returns None instead. ``set_*`` override what the
getters tell, without touching a group, for tools and tests that have no such ranks; they work before initialisation
too, and ``destroy_model_parallel`` forgets them.
"""

from shardwise.parallel_state.ambient import get_all_ranks, get_topology, resolve_tensor_model_parallel_group
from shardwise.parallel_state.ambient import group_or_none as _group_or_none
from shardwise.parallel_state.dense import (
    get_amax_reduction_group,
    get_context_parallel_global_ranks,
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_src_rank,
    get_data_parallel_world_size,
    get_model_parallel_group,
    get_model_parallel_src_rank,
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
    get_tensor_and_context_parallel_group,
    get_tensor_and_context_parallel_rank,
    get_tensor_and_context_parallel_world_size,
    get_tensor_and_data_parallel_group,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_src_rank,
    get_tensor_model_parallel_world_size,
    set_data_parallel_rank,
    set_pipeline_model_parallel_rank,
    set_pipeline_model_parallel_world_size,
    set_tensor_model_parallel_rank,
    set_tensor_model_parallel_world_size,
)
from shardwise.parallel_state.experts import (
    get_data_modulo_expert_parallel_group,
    get_expert_data_parallel_group,
    get_expert_data_parallel_rank,
    get_expert_data_parallel_world_size,
    get_expert_model_parallel_group,
    get_expert_model_parallel_rank,
    get_expert_model_parallel_src_rank,
    get_expert_model_parallel_world_size,
    get_expert_tensor_and_model_parallel_group,
    get_expert_tensor_and_model_parallel_rank,
    get_expert_tensor_and_model_parallel_world_size,
    get_expert_tensor_model_pipeline_parallel_group,
    get_expert_tensor_parallel_group,
    get_expert_tensor_parallel_rank,
    get_expert_tensor_parallel_world_size,
    set_expert_model_parallel_rank,
    set_expert_model_parallel_world_size,
    set_expert_tensor_parallel_rank,
    set_expert_tensor_parallel_world_size,
)
from shardwise.parallel_state.initialize import (
    destroy_model_parallel,
    initialize_model_parallel,
    is_initialized,
    model_parallel_is_initialized,
)
from shardwise.parallel_state.memory import (
    destroy_global_memory_buffer,
    destroy_global_symmetric_memory_buffer,
    get_global_memory_buffer,
    get_global_symmetric_memory_buffer,
)
from shardwise.parallel_state.stages import (
    get_embedding_group,
    get_pipeline_model_parallel_first_rank,
    get_pipeline_model_parallel_last_rank,
    get_pipeline_model_parallel_next_rank,
    get_pipeline_model_parallel_prev_rank,
    get_position_embedding_group,
    get_virtual_pipeline_model_parallel_rank,
    get_virtual_pipeline_model_parallel_world_size,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
    is_rank_in_embedding_group,
    is_rank_in_position_embedding_group,
    set_virtual_pipeline_model_parallel_rank,
    set_virtual_pipeline_model_parallel_world_size,
)
from shardwise.topology import (
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
)

__all__ = [
    "RankGenerator",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "destroy_global_memory_buffer",
    "destroy_global_symmetric_memory_buffer",
    "destroy_model_parallel",
    "generate_masked_orthogonal_rank_groups",
    "get_all_ranks",
    "get_amax_reduction_group",
    "get_context_parallel_global_ranks",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_modulo_expert_parallel_group",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_src_rank",
    "get_data_parallel_world_size",
    "get_embedding_group",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "get_expert_model_parallel_group",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_src_rank",
    "get_expert_model_parallel_world_size",
    "get_expert_tensor_and_model_parallel_group",
    "get_expert_tensor_and_model_parallel_rank",
    "get_expert_tensor_and_model_parallel_world_size",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_expert_tensor_parallel_group",
    "get_expert_tensor_parallel_rank",
    "get_expert_tensor_parallel_world_size",
    "get_global_memory_buffer",
    "get_global_symmetric_memory_buffer",
    "get_model_parallel_group",
    "get_model_parallel_src_rank",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_position_embedding_group",
    "get_tensor_and_context_parallel_group",
    "get_tensor_and_context_parallel_rank",
    "get_tensor_and_context_parallel_world_size",
    "get_tensor_and_data_parallel_group",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "get_topology",
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "initialize_model_parallel",
    "is_initialized",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
    "model_parallel_is_initialized",
    "resolve_tensor_model_parallel_group",
    "set_data_parallel_rank",
    "set_expert_model_parallel_rank",
    "set_expert_model_parallel_world_size",
    "set_expert_tensor_parallel_rank",
    "set_expert_tensor_parallel_world_size",
    "set_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_world_size",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
    "set_virtual_pipeline_model_parallel_rank",
    "set_virtual_pipeline_model_parallel_world_size",
]


# Tests written for the reference look at its globals.
_GLOBALS_OF_THE_REFERENCE = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
}


def __getattr__(name: str) -> object:
    if name in _GLOBALS_OF_THE_REFERENCE:
        return _group_or_none(_GLOBALS_OF_THE_REFERENCE[name], check_initialized=False)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
