"""Getters and overrides for the groups of dense layers and of expert layers."""

from torch.distributed import ProcessGroup

from shardwise.core.communication.context import backends_of
from shardwise.core.errors import ConfigError, TopologyError
from shardwise.megatron.core.parallel_state.ambient import _AMBIENT
from shardwise.megatron.errors import AssertedConfigError
from shardwise.megatron.sizes import HYBRID, SEPARATE_ALL_GATHER
from shardwise.megatron.surface import offer


def _override(overrides: dict[str, int], name: str, value: int | None) -> None:
    """Set an override, or remove it with None."""
    if value is None:
        overrides.pop(name, None)
    elif value < 0:
        raise ConfigError(f"cannot override axis {name!r} with {value}; give a count, or None to take it back")
    else:
        overrides[name] = value


def _with_gloo(group: ProcessGroup) -> ProcessGroup:
    """Return ``group``, or raise TopologyError if it cannot transfer tensors on the CPU."""
    if "cpu" not in backends_of(group):
        raise TopologyError(
            f"the backends {dict(backends_of(group))} carry no tensors on the CPU; call "
            "torch.distributed.init_process_group() with 'cpu:gloo,cuda:nccl', and every group carries both"
        )
    return group


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the tensor-parallel group of this rank."""
    return _AMBIENT.group_or_none("tp", check_initialized)


def get_tensor_model_parallel_world_size() -> int:
    """Number of ranks that split each layer."""
    return _AMBIENT.size("tp")


def get_tensor_model_parallel_rank() -> int:
    """This rank's index in its tensor-parallel group."""
    return _AMBIENT.rank("tp")


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the tensor-parallel group."""
    return _AMBIENT.ranks_of("tp")[0]


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Override the tensor-parallel size; None removes the override."""
    _override(_AMBIENT.sizes, "tp", world_size)


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Override the tensor-parallel rank; None removes the override."""
    _override(_AMBIENT.ranks, "tp", rank)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the pipeline group of this rank."""
    return _AMBIENT.group_or_none("pp", check_initialized)


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return _AMBIENT.size("pp")


def get_pipeline_model_parallel_rank() -> int:
    """This rank's pipeline stage."""
    return _AMBIENT.rank("pp")


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Override the number of stages; None removes the override."""
    _override(_AMBIENT.sizes, "pp", world_size)


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Override the pipeline stage; None removes the override."""
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
    """Return the data-parallel group of this rank.

    Args:
        with_context_parallel: whether to include context-parallel ranks.
        partial_data_parallel: whether to include only ranks that share this rank's copy of the optimizer state; needs
            ``with_context_parallel``.
        independent_all_gather: whether to return the second group of all data- and context-parallel ranks, which
            ``create_all_gather_group`` makes. Other combinations have one group only and ignore this.

    Raises:
        AssertedConfigError: ``partial_data_parallel`` without ``with_context_parallel``.
        AssertedTopologyError: ``independent_all_gather``, but no such group was made.
    """
    return _AMBIENT.group(_data_parallel(with_context_parallel, partial_data_parallel, independent_all_gather))


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the data-parallel group for tensors on the CPU: ``get_data_parallel_group``, which supports gloo too.

    Raises:
        AssertedConfigError: ``partial_data_parallel`` without ``with_context_parallel``.
        TopologyError: ``torch.distributed`` was initialised with a backend that lacks gloo.
    """
    return _with_gloo(get_data_parallel_group(with_context_parallel, partial_data_parallel))


def has_separate_all_gather_group() -> bool:
    """True if ``create_all_gather_group`` was requested; False before initialisation."""
    return _AMBIENT.topology is not None and SEPARATE_ALL_GATHER in _AMBIENT.topology


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Number of ranks in ``get_data_parallel_group`` with these arguments."""
    return _AMBIENT.size(_data_parallel(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """This rank's index in ``get_data_parallel_group`` with these arguments; one override applies to all of them."""
    return _AMBIENT.rank(_data_parallel(with_context_parallel, partial_data_parallel), overridden_as="dp")


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first rank of the data-parallel group."""
    return _AMBIENT.ranks_of(_data_parallel(with_context_parallel, False))[0]


def set_data_parallel_rank(rank: int | None) -> None:
    """Override the data-parallel rank; None removes the override."""
    _override(_AMBIENT.ranks, "dp", rank)


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the context-parallel group of this rank."""
    return _AMBIENT.group_or_none("cp", check_initialized)


def get_context_parallel_world_size() -> int:
    """Number of ranks that split the sequence in attention."""
    return _AMBIENT.size("cp")


def get_context_parallel_rank() -> int:
    """This rank's index in its context-parallel group."""
    return _AMBIENT.rank("cp")


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the global ranks of the context-parallel group; None if there is no group and this is not checked."""
    return None if _AMBIENT.group_or_none("cp", check_initialized) is None else list(_AMBIENT.ranks_of("cp"))


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[ProcessGroup] | None:
    """Return the levels of the context-parallel group, innermost first; without levels, raise unless unchecked."""
    levels = None if _AMBIENT.topology is None else getattr(_AMBIENT.topology.sizes, "hcp", None)
    if not check_initialized and levels is None:
        return None
    # Without levels, looking up the first level raises the error.
    return [_AMBIENT.group(f"hcp{level}") for level in range(len(levels or (1,)))]


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup | None:
    """Return the group of ``group_size`` neighbours among the data- and context-parallel ranks.

    Args:
        check_initialized: whether to raise, instead of returning None, if there is no such group.
        group_size: a power of 2, or the number of all data- and context-parallel ranks.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
        AssertedTopologyError: ``hybrid_context_parallel`` was not requested, or has no groups of that size.
    """
    if _AMBIENT.topology is not None and group_size == _AMBIENT.topology.size("dp_cp"):
        return _AMBIENT.group("dp_cp")
    return _AMBIENT.group_or_none(f"{HYBRID}{group_size}", check_initialized)


get_dynamic_data_context_parallel_groups = get_hybrid_data_context_parallel_groups


def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group of tensor- and pipeline-parallel ranks: all that hold a part of one copy of the model."""
    return _AMBIENT.group_or_none("mp", check_initialized)


def get_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the model-parallel group."""
    return _AMBIENT.ranks_of("mp")[0]


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Return the group of tensor- and data-parallel ranks, optionally with context-parallel ranks."""
    return _AMBIENT.group_or_none("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group of tensor- and context-parallel ranks."""
    return _AMBIENT.group_or_none("tp_cp", check_initialized)


def get_tensor_and_context_parallel_world_size() -> int:
    """Number of ranks in the group of tensor- and context-parallel ranks."""
    return _AMBIENT.size("tp_cp")


def get_tensor_and_context_parallel_rank() -> int:
    """This rank's index in the group of tensor- and context-parallel ranks."""
    return _AMBIENT.rank("tp_cp")


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> ProcessGroup:
    """Return the group of ranks that see parts of one tensor and agree on its scale in low precision.

    Args:
        with_context_parallel: whether to include context-parallel ranks.
        tp_only_amax_red: whether to exclude data-parallel ranks, so that each copy of the model has its own scales.
    """
    name = "tp" if tp_only_amax_red else "tp_dp"
    return _AMBIENT.group(f"{name}_cp" if with_context_parallel else name)


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group of ranks that together hold one copy of the optimizer state, including this rank."""
    return _AMBIENT.group_or_none("intra_dist_opt", check_initialized)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the ranks with this part of each copy of the optimizer state; with one copy, raise unless unchecked."""
    return _AMBIENT.group_or_none("inter_dist_opt", check_initialized)


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the expert-parallel group of this rank: the ranks that share the experts."""
    return _AMBIENT.group_or_none("ep", check_initialized)


def get_expert_model_parallel_world_size() -> int:
    """Number of ranks that share the experts."""
    return _AMBIENT.size("ep")


def get_expert_model_parallel_rank() -> int:
    """This rank's index in its expert-parallel group."""
    return _AMBIENT.rank("ep")


def get_expert_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the expert-parallel group."""
    return _AMBIENT.ranks_of("ep")[0]


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Override the expert-parallel size; None removes the override."""
    _override(_AMBIENT.sizes, "ep", world_size)


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Override the expert-parallel rank; None removes the override."""
    _override(_AMBIENT.ranks, "ep", rank)


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group of ranks that split each expert."""
    return _AMBIENT.group_or_none("expt_tp", check_initialized)


def get_expert_tensor_parallel_world_size() -> int:
    """Number of ranks that split each expert."""
    return _AMBIENT.size("expt_tp")


def get_expert_tensor_parallel_rank() -> int:
    """This rank's index among the ranks that split each expert."""
    return _AMBIENT.rank("expt_tp")


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Override the number of ranks that split each expert; None removes the override."""
    _override(_AMBIENT.sizes, "expt_tp", world_size)


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Override the index among the ranks that split each expert; None removes the override."""
    _override(_AMBIENT.ranks, "expt_tp", rank)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group of expert-tensor- and expert-parallel ranks: all that hold a part of one stage's experts."""
    return _AMBIENT.group_or_none("tp_ep", check_initialized)


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Number of ranks in the group of expert-tensor- and expert-parallel ranks."""
    return _AMBIENT.size("tp_ep")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """This rank's index in the group of expert-tensor- and expert-parallel ranks."""
    return _AMBIENT.rank("tp_ep")


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group of expert-tensor-, expert- and pipeline-parallel ranks: one whole copy of the experts."""
    return _AMBIENT.group_or_none("tp_ep_pp", check_initialized)


def _expert_data_parallel(partial_expert_data_parallel: bool) -> str:
    return "intra_expt_dp" if partial_expert_data_parallel else "expt_dp"


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """Return the group of ranks that hold the same part of the experts.

    Args:
        check_initialized: whether to raise, instead of returning None, if there is no such group.
        partial_expert_data_parallel: whether to include only ranks that share this rank's copy of the optimizer state.
    """
    return _AMBIENT.group_or_none(_expert_data_parallel(partial_expert_data_parallel), check_initialized)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return the same group for tensors on the CPU; see ``get_data_parallel_group_gloo``."""
    return _with_gloo(_AMBIENT.group(_expert_data_parallel(partial_expert_data_parallel)))


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Number of ranks in ``get_expert_data_parallel_group``."""
    return _AMBIENT.size(_expert_data_parallel(partial_expert_data_parallel))


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """This rank's index in ``get_expert_data_parallel_group``."""
    return _AMBIENT.rank(_expert_data_parallel(partial_expert_data_parallel))


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Old name of ``get_expert_data_parallel_group``."""
    return _AMBIENT.group(_expert_data_parallel(partial_expert_data_parallel))


offer(globals())
