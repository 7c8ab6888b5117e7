"""Getters and overrides for the groups of the dense layers, and for those of the expert layers."""

from torch.distributed import ProcessGroup

from shardwise.core.communication.context import backends_of
from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.rank_grid import HYBRID, SEPARATE_ALL_GATHER
from shardwise.megatron.core.parallel_state.ambient import _AMBIENT, get_topology
from shardwise.megatron.errors import AssertedConfigError
from shardwise.megatron.surface import offer


def _override(overrides: dict[str, int], name: str, value: int | None) -> None:
    """Set an override, or take it back with None."""
    if value is None:
        overrides.pop(name, None)
    elif value < 0:
        raise ConfigError(f"cannot override axis {name!r} with {value}; give a count, or None to take it back")
    else:
        overrides[name] = value


def _with_gloo(group: ProcessGroup) -> ProcessGroup:
    """``group``, or TopologyError if tensors on the CPU cannot travel over it."""
    if "cpu" not in backends_of(group):
        raise TopologyError(
            f"the backends {dict(backends_of(group))} carry no tensors on the CPU; call "
            "torch.distributed.init_process_group() with 'cpu:gloo,cuda:nccl', and every group carries both"
        )
    return group


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The tensor-parallel group of this rank."""
    return _AMBIENT.group_or_none("tp", check_initialized)


def get_tensor_model_parallel_world_size() -> int:
    """Number of ranks that split each layer."""
    return _AMBIENT.size("tp")


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in its tensor-parallel group."""
    return _AMBIENT.rank("tp")


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the tensor-parallel group."""
    return _AMBIENT.ranks_of("tp")[0]


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Override the tensor-parallel size; None takes the override back."""
    _override(_AMBIENT.sizes, "tp", world_size)


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Override the tensor-parallel rank; None takes the override back."""
    _override(_AMBIENT.ranks, "tp", rank)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The pipeline group of this rank."""
    return _AMBIENT.group_or_none("pp", check_initialized)


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return _AMBIENT.size("pp")


def get_pipeline_model_parallel_rank() -> int:
    """This rank's pipeline stage."""
    return _AMBIENT.rank("pp")


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Override the number of stages; None takes the override back."""
    _override(_AMBIENT.sizes, "pp", world_size)


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Override the pipeline stage; None takes the override back."""
    _override(_AMBIENT.ranks, "pp", rank)


def _data_parallel(
    with_context_parallel: bool, partial_data_parallel: bool, independent_all_gather: bool = False
) -> str:
    if independent_all_gather and with_context_parallel and not partial_data_parallel:
        return SEPARATE_ALL_GATHER
    if not partial_data_parallel:
        return "dp_cp" if with_context_parallel else "dp"
    if not with_context_parallel:
        raise AssertedConfigError(
            "partial_data_parallel=True is the part of the data- and context-parallel ranks that holds one copy of the "
            "optimizer state; ask for it with with_context_parallel=True"
        )
    return "intra_dp_cp"


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, independent_all_gather: bool = False
) -> ProcessGroup:
    """The data-parallel group of this rank.

    Args:
        with_context_parallel: context-parallel ranks included.
        partial_data_parallel: only the ranks that share one copy of the optimizer state with this one; needs
            ``with_context_parallel``.
        independent_all_gather: the second group of all data- and context-parallel ranks, which
            ``create_all_gather_group`` makes; without effect in the other cases, which have one group only.

    Raises:
        AssertedConfigError: ``partial_data_parallel`` without ``with_context_parallel``.
        AssertedTopologyError: ``independent_all_gather``, and no such group was made.
    """
    return _AMBIENT.group(_data_parallel(with_context_parallel, partial_data_parallel, independent_all_gather))


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """The data-parallel group for tensors on the CPU: ``get_data_parallel_group`` itself, which carries gloo.

    Raises:
        AssertedConfigError: ``partial_data_parallel`` without ``with_context_parallel``.
        TopologyError: ``torch.distributed`` was initialised with a backend that lacks gloo.
    """
    return _with_gloo(get_data_parallel_group(with_context_parallel, partial_data_parallel))


def has_separate_all_gather_group() -> bool:
    """Whether ``create_all_gather_group`` was asked for; False before initialisation."""
    return _AMBIENT.topology is not None and SEPARATE_ALL_GATHER in _AMBIENT.topology


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Number of ranks in ``get_data_parallel_group`` with these arguments."""
    return _AMBIENT.size(_data_parallel(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """This rank's place in ``get_data_parallel_group`` with these arguments; one override goes for all of them."""
    return _AMBIENT.rank(_data_parallel(with_context_parallel, partial_data_parallel), overridden_as="dp")


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first rank of the data-parallel group."""
    return _AMBIENT.ranks_of(_data_parallel(with_context_parallel, False))[0]


def set_data_parallel_rank(rank: int | None) -> None:
    """Override the data-parallel rank; None takes the override back."""
    _override(_AMBIENT.ranks, "dp", rank)


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The context-parallel group of this rank."""
    return _AMBIENT.group_or_none("cp", check_initialized)


def get_context_parallel_world_size() -> int:
    """Number of ranks that split the sequence in attention."""
    return _AMBIENT.size("cp")


def get_context_parallel_rank() -> int:
    """This rank's place in its context-parallel group."""
    return _AMBIENT.rank("cp")


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Global ranks of the context-parallel group; None if there is none and this is not checked."""
    return None if _AMBIENT.group_or_none("cp", check_initialized) is None else list(_AMBIENT.ranks_of("cp"))


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[ProcessGroup] | None:
    """The levels of the context-parallel group, innermost first; an error without levels unless unchecked."""
    if not check_initialized and (_AMBIENT.topology is None or _AMBIENT.topology.sizes.hcp is None):
        return None
    levels = get_topology().sizes.hcp
    # Without levels there is no first one either, which is the error.
    return [_AMBIENT.group(f"hcp{level}") for level in range(len(levels or (1,)))]


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup | None:
    """The ``group_size`` neighbours of this rank among the data- and context-parallel ranks.

    Args:
        check_initialized: raise if there is no such group; None is returned otherwise.
        group_size: a power of 2, or the number of all data- and context-parallel ranks.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
        AssertedTopologyError: ``hybrid_context_parallel`` was not asked for, or has no parts of that size.
    """
    if _AMBIENT.topology is not None and group_size == _AMBIENT.topology.size("dp_cp"):
        return _AMBIENT.group("dp_cp")
    return _AMBIENT.group_or_none(f"{HYBRID}{group_size}", check_initialized)


def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Tensor and pipeline ranks together: all ranks that hold a part of one copy of the model."""
    return _AMBIENT.group_or_none("mp", check_initialized)


def get_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the model-parallel group."""
    return _AMBIENT.ranks_of("mp")[0]


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Tensor and data ranks together, context-parallel ranks included when asked."""
    return _AMBIENT.group_or_none("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Tensor and context ranks together."""
    return _AMBIENT.group_or_none("tp_cp", check_initialized)


def get_tensor_and_context_parallel_world_size() -> int:
    """Number of tensor and context ranks together."""
    return _AMBIENT.size("tp_cp")


def get_tensor_and_context_parallel_rank() -> int:
    """This rank's place among the tensor and context ranks together."""
    return _AMBIENT.rank("tp_cp")


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> ProcessGroup:
    """The ranks that see parts of one tensor, over which a scale for low precision is agreed.

    Args:
        with_context_parallel: context-parallel ranks included.
        tp_only_amax_red: data-parallel ranks left out, so that each copy of the model has its scales.
    """
    name = "tp" if tp_only_amax_red else "tp_dp"
    return _AMBIENT.group(f"{name}_cp" if with_context_parallel else name)


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup | None:
    """All ranks that hold a part of the copy of the optimizer state that this rank holds a part of."""
    return _AMBIENT.group_or_none("intra_dist_opt", check_initialized)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks with the same part of every copy of the optimizer state; an error with one copy unless unchecked."""
    return _AMBIENT.group_or_none("inter_dist_opt", check_initialized)


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The expert-parallel group of this rank: the ranks that share out the experts."""
    return _AMBIENT.group_or_none("ep", check_initialized)


def get_expert_model_parallel_world_size() -> int:
    """Number of ranks that share out the experts."""
    return _AMBIENT.size("ep")


def get_expert_model_parallel_rank() -> int:
    """This rank's place in its expert-parallel group."""
    return _AMBIENT.rank("ep")


def get_expert_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the expert-parallel group."""
    return _AMBIENT.ranks_of("ep")[0]


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Override the expert-parallel size; None takes the override back."""
    _override(_AMBIENT.sizes, "ep", world_size)


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Override the expert-parallel rank; None takes the override back."""
    _override(_AMBIENT.ranks, "ep", rank)


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that split each expert with this one."""
    return _AMBIENT.group_or_none("expt_tp", check_initialized)


def get_expert_tensor_parallel_world_size() -> int:
    """Number of ranks that split each expert."""
    return _AMBIENT.size("expt_tp")


def get_expert_tensor_parallel_rank() -> int:
    """This rank's place among those that split each expert."""
    return _AMBIENT.rank("expt_tp")


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Override the number of ranks that split each expert; None takes the override back."""
    _override(_AMBIENT.sizes, "expt_tp", world_size)


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Override the place among those that split each expert; None takes the override back."""
    _override(_AMBIENT.ranks, "expt_tp", rank)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Expert-tensor and expert-parallel ranks together: all ranks that hold a part of one stage's experts."""
    return _AMBIENT.group_or_none("tp_ep", check_initialized)


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Number of expert-tensor and expert-parallel ranks together."""
    return _AMBIENT.size("tp_ep")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """This rank's place among the expert-tensor and expert-parallel ranks together."""
    return _AMBIENT.rank("tp_ep")


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Expert-tensor, expert-parallel and pipeline ranks together: one whole copy of the experts."""
    return _AMBIENT.group_or_none("tp_ep_pp", check_initialized)


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
    return _AMBIENT.group_or_none(_expert_data_parallel(partial_expert_data_parallel), check_initialized)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """The same group for tensors on the CPU; see ``get_data_parallel_group_gloo``."""
    return _with_gloo(_AMBIENT.group(_expert_data_parallel(partial_expert_data_parallel)))


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Number of ranks in ``get_expert_data_parallel_group``."""
    return _AMBIENT.size(_expert_data_parallel(partial_expert_data_parallel))


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """This rank's place in ``get_expert_data_parallel_group``."""
    return _AMBIENT.rank(_expert_data_parallel(partial_expert_data_parallel))


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """An older name of ``get_expert_data_parallel_group``."""
    return _AMBIENT.group(_expert_data_parallel(partial_expert_data_parallel))


offer(globals())
