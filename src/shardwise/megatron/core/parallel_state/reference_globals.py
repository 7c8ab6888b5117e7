"""Megatron's module globals, for tests and tools that read them. Each read looks up the current value.

They are read-only: assigning to one hides the value and has no other effect.
"""

from shardwise.core.communication.context import backends_of
from shardwise.megatron.core.parallel_state.ambient import _AMBIENT
from shardwise.megatron.core.parallel_state.groups import get_hierarchical_context_parallel_groups
from shardwise.megatron.sizes import HYBRID, SEPARATE_ALL_GATHER

_GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_DATA_PARALLEL_GROUP_WITH_CP_AG": SEPARATE_ALL_GATHER,
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_expt_dp",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "inter_dist_opt",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
}
_RANKS = {"_PIPELINE_GLOBAL_RANKS": "pp", "_EXPERT_MODEL_PARALLEL_RANKS": "ep"} | {
    name.replace("_GROUP", "_GLOBAL_RANKS"): axis
    for name, axis in _GROUPS.items()
    if axis in ("tp", "mp", "dp", "dp_cp", "cp", "embd", "pos_embd")
}
# Groups for which Megatron makes a second group for tensors on the CPU; see `get_data_parallel_group_gloo`.
_WITH_GLOO = ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")
_OVERRIDDEN = {
    f"_MPU{name.removesuffix('_GROUP')}": axis
    for name, axis in _GROUPS.items()
    if axis in ("tp", "pp", "dp", "ep", "expt_tp")
}


def look_up(name: str) -> object:
    """Return the value of Megatron's global ``name``; None if there is no such group, override or buffer.

    Raises:
        AttributeError: Megatron has no such global, or it has no counterpart here.
    """
    if name in _GROUPS:
        return _AMBIENT.group_or_none(_GROUPS[name], check_initialized=False)
    if name in _RANKS:
        topology, axis = _AMBIENT.topology, _RANKS[name]
        return list(topology.ranks(axis)) if topology is not None and axis in topology else None
    if name.endswith("_GLOO") and _GROUPS.get(name.removesuffix("_GLOO")) in _WITH_GLOO:
        group = _AMBIENT.group_or_none(_GROUPS[name.removesuffix("_GLOO")], check_initialized=False)
        return None if group is None or "cpu" not in backends_of(group) else group
    if name == "_HYBRID_DP_CP_GROUPS":
        topology = _AMBIENT.topology
        sizes = [] if topology is None else [2**n for n in range(1, 32) if f"{HYBRID}{2**n}" in topology]
        return {size: _AMBIENT.group_or_none(f"{HYBRID}{size}", check_initialized=False) for size in sizes}
    if name == "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS":
        return get_hierarchical_context_parallel_groups(check_initialized=False)
    for suffix, overrides in (("_WORLD_SIZE", _AMBIENT.sizes), ("_RANK", _AMBIENT.ranks)):
        if name.removesuffix(suffix) in _OVERRIDDEN:
            return overrides.get(_OVERRIDDEN[name.removesuffix(suffix)])
    others = {
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": _AMBIENT.virtual_size,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": _AMBIENT.virtual_rank,
        "_GLOBAL_MEMORY_BUFFER": _AMBIENT.memory_buffer,
        "_GLOBAL_SYMMETRIC_MEMORY_BUFFER": _AMBIENT.symmetric_memory_buffer,
    }
    if name in others:
        return others[name]
    raise AttributeError(f"module 'shardwise.parallel_state' has no attribute {name!r}")
