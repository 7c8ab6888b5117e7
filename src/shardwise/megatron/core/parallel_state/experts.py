"""Getters and overrides for the groups of the expert layers."""

from torch.distributed import ProcessGroup

from shardwise.megatron.core.parallel_state import ambient


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The expert-parallel group of this rank: the ranks that share out the experts."""
    return ambient.group_or_none("ep", check_initialized)


def get_expert_model_parallel_world_size() -> int:
    """Number of ranks that share out the experts."""
    return ambient.size_of("ep")


def get_expert_model_parallel_rank() -> int:
    """This rank's place in its expert-parallel group."""
    return ambient.rank_in("ep")


def get_expert_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the expert-parallel group."""
    return ambient.ranks_of("ep")[0]


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Override the expert-parallel size; None takes the override back."""
    ambient.set_override(ambient.AMBIENT.sizes, "ep", world_size)


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Override the expert-parallel rank; None takes the override back."""
    ambient.set_override(ambient.AMBIENT.ranks, "ep", rank)


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that split each expert with this one."""
    return ambient.group_or_none("expt_tp", check_initialized)


def get_expert_tensor_parallel_world_size() -> int:
    """Number of ranks that split each expert."""
    return ambient.size_of("expt_tp")


def get_expert_tensor_parallel_rank() -> int:
    """This rank's place among those that split each expert."""
    return ambient.rank_in("expt_tp")


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Override the number of ranks that split each expert; None takes the override back."""
    ambient.set_override(ambient.AMBIENT.sizes, "expt_tp", world_size)


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Override the place among those that split each expert; None takes the override back."""
    ambient.set_override(ambient.AMBIENT.ranks, "expt_tp", rank)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Expert-tensor and expert-parallel ranks together: all ranks that hold a part of one stage's experts."""
    return ambient.group_or_none("tp_ep", check_initialized)


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Number of expert-tensor and expert-parallel ranks together."""
    return ambient.size_of("tp_ep")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """This rank's place among the expert-tensor and expert-parallel ranks together."""
    return ambient.rank_in("tp_ep")


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Expert-tensor, expert-parallel and pipeline ranks together: one whole copy of the experts."""
    return ambient.group_or_none("tp_ep_pp", check_initialized)


def _expert_data_parallel(partial_expert_data_parallel: bool) -> str:
    return "intra_expt_dp" if partial_expert_data_parallel else "expt_dp"


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """The ranks that hold the same part of the experts.

    Args:
        check_initialized: raise if there is no such group; None is returned otherwise.
        partial_expert_data_parallel: only the ranks that share one copy of the optimizer state with this one.
    """
    return ambient.group_or_none(_expert_data_parallel(partial_expert_data_parallel), check_initialized)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """The same group for tensors on the CPU; see ``get_data_parallel_group_gloo``."""
    return ambient.carries_gloo(ambient.group_of(_expert_data_parallel(partial_expert_data_parallel)))


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Number of ranks in ``get_expert_data_parallel_group``."""
    return ambient.size_of(_expert_data_parallel(partial_expert_data_parallel))


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """This rank's place in ``get_expert_data_parallel_group``."""
    return ambient.rank_in(_expert_data_parallel(partial_expert_data_parallel))


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """An older name of ``get_expert_data_parallel_group``."""
    return ambient.group_of(_expert_data_parallel(partial_expert_data_parallel))
