"""Building the ambient topology and taking it down."""

import datetime
import warnings
from collections.abc import Sequence

import torch.distributed as dist

from shardwise.core.communication.context import backend_of, context_of, device_of
from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.rank_grid import (
    DEFAULT_ORDER,
    EmbeddingRanks,
    ParallelSizes,
    default_embedding_ranks,
    default_position_embedding_ranks,
)
from shardwise.core.topology import Topology
from shardwise.megatron.core.parallel_state.ambient import AMBIENT
from shardwise.megatron.errors import AssertedConfigError, AssertedTopologyError, NotInitializedError, asserting


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: float | None = None,
    order: str = DEFAULT_ORDER,
    get_embedding_ranks: EmbeddingRanks | None = None,
    get_position_embedding_ranks: EmbeddingRanks | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: Sequence[str] | None = None,
    sharp_enabled_group: str | None = None,
    *,
    hybrid_context_parallel: bool = False,
    create_all_gather_group: bool = False,
    validate: bool = False,
) -> None:
    """Build the ambient topology on the ranks of ``torch.distributed``. Collective.

    With TP=2 and PP=2 on 8 ranks: tensor groups {0,1}{2,3}{4,5}{6,7}, data groups {0,2}{1,3}{4,6}{5,7}, pipeline groups
    {0,4}{1,5}{2,6}{3,7}. A call that fails changes nothing.

    Args:
        tensor_model_parallel_size: ranks that split each layer.
        pipeline_model_parallel_size: number of stages.
        virtual_pipeline_model_parallel_size: parts of the model on each stage, interleaved; needs several stages.
        pipeline_model_parallel_comm_backend: None, or the backend that the groups have anyway.
        use_sharp: only False; set NCCL_COLLNET_ENABLE=1 for NCCL to reduce in the network's switches.
        context_parallel_size: ranks that split the sequence in attention.
        hierarchical_context_parallel_sizes: sizes of the levels of each context-parallel group, neighbouring ranks
            first; they multiply to ``context_parallel_size``.
        expert_model_parallel_size: ranks that share out the experts.
        num_distributed_optimizer_instances: copies of the sharded optimizer state, each on a part of the data-parallel
            group (``partial_data_parallel=True`` in the getters).
        expert_tensor_parallel_size: ranks that split each expert; the tensor-parallel size if None.
        nccl_communicator_config_path: only None; set NCCL_MIN_CTAS, NCCL_MAX_CTAS and NCCL_CGA_CLUSTER_SIZE instead.
        distributed_timeout_minutes: time limit of a collective in minutes; that of ``init_process_group(timeout=)`` if
            None.
        order: axes from fastest-varying to slowest.
        get_embedding_ranks: from a pipeline group's ranks, those that hold a tied word embedding; first and last if
            None.
        get_position_embedding_ranks: the same for the position embedding; the first if None.
        create_gloo_process_groups: changes nothing. No second set of groups is made for tensors on the CPU: initialise
            ``torch.distributed`` with the backend ``"cpu:gloo,cuda:nccl"``, and every group carries both.
        high_priority_stream_groups: only None or empty; set TORCH_NCCL_HIGH_PRIORITY=1 for all groups.
        sharp_enabled_group: only None, as ``use_sharp``.
        hybrid_context_parallel: also make groups of 2, 4, 8, ... neighbours among the data- and context-parallel ranks,
            for programs that split a sample by its length (``get_hybrid_data_context_parallel_groups``).
        create_all_gather_group: also make a second group of the data- and context-parallel ranks, for gathering
            parameters while gradients are reduced (``independent_all_gather=True`` in the getter).
        validate: have ranks check that they agree, here and before each collective; see ``Topology.create``.

    Raises:
        NotInitializedError: ``torch.distributed`` is not initialised.
        TopologyError: the ambient topology is there already, the sizes do not divide the world, the interleaving has
            one stage only, or a group could not be made.
        ConfigError: sizes out of range, or an option that is not offered.
        DesyncError: ranks ask for different sizes; found under ``validate``.
    """
    if AMBIENT.topology is not None:
        raise AssertedTopologyError(
            f"model parallelism is already initialised with {AMBIENT.topology.sizes}; "
            "call destroy_model_parallel() first"
        )
    _refuse_nccl_options(
        use_sharp=use_sharp,
        sharp_enabled_group=sharp_enabled_group,
        nccl_communicator_config_path=nccl_communicator_config_path,
        high_priority_stream_groups=high_priority_stream_groups or None,
    )
    _check_backend(pipeline_model_parallel_comm_backend)
    _check_interleaving(virtual_pipeline_model_parallel_size, pipeline_model_parallel_size)
    levels = hierarchical_context_parallel_sizes
    sizes = ParallelSizes(
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        order=order,
        hcp=None if levels is None else tuple(levels) if isinstance(levels, Sequence) else (levels,),
        num_distributed_optimizer_instances=num_distributed_optimizer_instances,
        hybrid_context_parallel=hybrid_context_parallel,
        separate_all_gather=create_all_gather_group,
    )
    with asserting(AssertedConfigError, AssertedTopologyError if dist.is_initialized() else NotInitializedError):
        topology = Topology.create(
            sizes,
            timeout=_timeout(distributed_timeout_minutes),
            embedding_ranks=get_embedding_ranks or default_embedding_ranks,
            position_embedding_ranks=get_position_embedding_ranks or default_position_embedding_ranks,
            validate=validate,
        )
    AMBIENT.topology = topology
    AMBIENT.memory_buffer = context_of(topology.group("tp")).buffers
    if virtual_pipeline_model_parallel_size is not None:
        AMBIENT.virtual_size, AMBIENT.virtual_rank = virtual_pipeline_model_parallel_size, 0


def _refuse_nccl_options(**options: object) -> None:
    instead = {
        "use_sharp": "set NCCL_COLLNET_ENABLE=1",
        "sharp_enabled_group": "set NCCL_COLLNET_ENABLE=1",
        "nccl_communicator_config_path": "set NCCL_MIN_CTAS, NCCL_MAX_CTAS and NCCL_CGA_CLUSTER_SIZE",
        "high_priority_stream_groups": "set TORCH_NCCL_HIGH_PRIORITY=1",
    }
    for name, value in options.items():
        if value is not None and value is not False:
            raise ConfigError(
                f"{name}={value!r} is not offered: NCCL is told such things by the environment; leave it out and "
                f"{instead[name]}"
            )


def _check_backend(backend: str | None) -> None:
    world = dist.group.WORLD
    if backend is not None and world is not None and backend != (own := backend_of(world, device_of(world))):
        raise ConfigError(
            f"pipeline_model_parallel_comm_backend is {backend!r}, but all groups have the backend of "
            f"torch.distributed, {own!r}; leave it out"
        )


def _check_interleaving(virtual_size: int | None, num_stages: int) -> None:
    if virtual_size is None:
        return
    if virtual_size < 1:
        raise ConfigError(f"virtual_pipeline_model_parallel_size is {virtual_size}; it must be at least 1, or None")
    if num_stages <= 1:
        # Of the kind that Megatron raises.
        raise TopologyError(
            f"virtual_pipeline_model_parallel_size is {virtual_size} and pipeline_model_parallel_size is {num_stages}; "
            "interleaving needs at least 2 stages"
        )


def _timeout(minutes: float | None) -> datetime.timedelta | None:
    if minutes is None:
        return None
    if not isinstance(minutes, int | float) or not minutes > 0:
        raise ConfigError(f"distributed_timeout_minutes is {minutes!r}; it must be over 0, or None")
    return datetime.timedelta(minutes=minutes)


def destroy_model_parallel() -> None:
    """Destroy the ambient topology's groups and buffers and forget every override; harmless if there are none.

    No descriptor of the groups stays open. Every rank should call it.
    """
    topology = AMBIENT.forget()
    if topology is not None:
        topology.destroy()


def model_parallel_is_initialized() -> bool:
    """Whether there is an ambient topology."""
    return AMBIENT.topology is not None


def is_initialized() -> bool:
    """Whether there is an ambient topology (another name for ``model_parallel_is_initialized``)."""
    return model_parallel_is_initialized()


def is_unitialized() -> bool:
    """Whether there is no ambient topology; deprecated, by this spelling Megatron's."""
    warnings.warn("is_unitialized is deprecated; use not is_initialized()", DeprecationWarning, stacklevel=2)
    return not model_parallel_is_initialized()
