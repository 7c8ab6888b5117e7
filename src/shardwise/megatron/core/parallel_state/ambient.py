"""State of the ambient topology in one object, look-ups by the names of ``Topology``, creation and destruction."""

import datetime
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.core.communication.context import GlobalMemoryBuffer, backend_of, context_of, device_of
from shardwise.core.communication.symmetric_memory import GlobalSymmetricMemoryBuffer, symmetric_buffer_of
from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.rank_grid import DEFAULT_ORDER, EmbeddingRanks
from shardwise.core.topology import Topology
from shardwise.megatron.errors import AssertedConfigError, AssertedTopologyError, NotInitializedError, asserting
from shardwise.megatron.sizes import MegatronSizes
from shardwise.megatron.surface import given, offer


@dataclass
class _Ambient:
    """State of ``parallel_state`` between calls. Groups have the names of ``Topology``.

    Attributes:
        topology: the ambient topology; None before initialisation.
        sizes: overrides by ``set_*_world_size``, by name of the group.
        ranks: overrides by ``set_*_rank``, by name of the group.
        virtual_size: number of parts of the model on each pipeline stage; None without interleaving.
        virtual_rank: index of the part that is being computed.
        memory_buffer: communication buffers of the tensor-parallel group, which its layers use too.
        symmetric_memory_buffer: memory that tensor-parallel ranks can access on each other, where supported.
    """

    topology: Topology | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    virtual_size: int | None = None
    virtual_rank: int | None = None
    memory_buffer: GlobalMemoryBuffer | None = None
    symmetric_memory_buffer: GlobalSymmetricMemoryBuffer | None = None

    @asserting(AssertedTopologyError)
    def group(self, name: str) -> ProcessGroup:
        """Return this rank's group of that name, or raise TopologyError."""
        return get_topology().group(name)

    def group_or_none(self, name: str, check_initialized: bool) -> ProcessGroup | None:
        """Return this rank's group of that name; if there is none, raise TopologyError if checked, else return None."""
        if not check_initialized and (self.topology is None or name not in self.topology):
            return None
        return self.group(name)

    @asserting(AssertedTopologyError)
    def size(self, name: str) -> int:
        """Number of ranks in a group, or its override."""
        value = self.sizes.get(name)
        return get_topology().size(name) if value is None else value

    @asserting(AssertedTopologyError)
    def rank(self, name: str, overridden_as: str | None = None) -> int:
        """This rank's index in a group, or its override, which may be stored under another group's name."""
        value = self.ranks.get(overridden_as or name)
        return get_topology().rank(name) if value is None else value

    @asserting(AssertedTopologyError)
    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Global ranks of a group, in group order."""
        return get_topology().ranks(name)

    def forget(self) -> Topology | None:
        """Reset the state, and return the topology for the caller to destroy."""
        topology = self.topology
        self.__dict__.update(_Ambient().__dict__)
        return topology


_AMBIENT = _Ambient()


def get_topology() -> Topology:
    """Return the ambient topology.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
    """
    if _AMBIENT.topology is None:
        raise NotInitializedError(
            "no group was given and model parallelism is not initialised; pass a group, or call "
            "shardwise.parallel_state.initialize_model_parallel() first"
        )
    return _AMBIENT.topology


def get_all_ranks() -> str:
    """Return this rank's index on the axes tp, dp, cp, pp and ep, joined by "_"."""
    return "_".join(str(_AMBIENT.rank(name)) for name in ("tp", "dp", "cp", "pp", "ep"))


def resolve_tensor_model_parallel_group(group: ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, or the ambient tensor-parallel group if it is None; only this function resolves None.

    Raises:
        NotInitializedError: no group is given and none is initialised.
    """
    return _AMBIENT.group("tp") if group is None else group


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
        tensor_model_parallel_size: number of ranks that split each layer.
        pipeline_model_parallel_size: number of stages.
        virtual_pipeline_model_parallel_size: number of interleaved parts on each stage; needs several stages.
        pipeline_model_parallel_comm_backend: None, or the backend of all groups.
        use_sharp: only False; set NCCL_COLLNET_ENABLE=1 to let NCCL reduce in the network's switches.
        context_parallel_size: number of ranks that split the sequence in attention.
        hierarchical_context_parallel_sizes: sizes of the levels of each context-parallel group, neighbouring ranks
            first; their product is ``context_parallel_size``.
        expert_model_parallel_size: number of ranks that share the experts.
        num_distributed_optimizer_instances: number of copies of the sharded optimizer state, each on a part of the
            data-parallel group (``partial_data_parallel=True`` in the getters).
        expert_tensor_parallel_size: number of ranks that split each expert; the tensor-parallel size if None.
        nccl_communicator_config_path: only None; set NCCL_MIN_CTAS, NCCL_MAX_CTAS and NCCL_CGA_CLUSTER_SIZE instead.
        distributed_timeout_minutes: timeout of a collective; None means that of ``init_process_group(timeout=)``.
        order: axes from fastest-varying to slowest.
        get_embedding_ranks: from a pipeline group's ranks, returns those that hold a tied word embedding; None means
            the first and the last.
        get_position_embedding_ranks: the same for the position embedding; None means the first.
        create_gloo_process_groups: no effect. There is no second set of groups for tensors on the CPU: initialise
            ``torch.distributed`` with the backend ``"cpu:gloo,cuda:nccl"``, and every group has both backends.
        high_priority_stream_groups: only None or empty; set TORCH_NCCL_HIGH_PRIORITY=1 for all groups.
        sharp_enabled_group: only None; see ``use_sharp``.
        hybrid_context_parallel: whether to make groups of 2, 4, 8, ... neighbours among the data- and context-parallel
            ranks, for programs that split samples by their length (``get_hybrid_data_context_parallel_groups``).
        create_all_gather_group: whether to make a second group of the data- and context-parallel ranks, to gather
            parameters while gradients are reduced (``independent_all_gather=True`` in the getter).
        validate: whether ranks check that they agree, here and before each collective; see ``Topology.create``.

    Raises:
        NotInitializedError: ``torch.distributed`` is not initialised.
        TopologyError: the ambient topology exists already, the sizes do not divide the world, interleaving has only
            one stage, or a group could not be made.
        ConfigError: sizes out of range, or an option that is not offered.
        DesyncError: under ``validate``, ranks ask for different sizes.
    """
    options = given(locals())
    if _AMBIENT.topology is not None:
        raise AssertedTopologyError(
            f"model parallelism is already initialised with {_AMBIENT.topology.sizes}; "
            "call destroy_model_parallel() first"
        )
    _refuse_nccl_options(options)
    _check_backend(pipeline_model_parallel_comm_backend)
    _check_interleaving(virtual_pipeline_model_parallel_size, pipeline_model_parallel_size)
    levels = hierarchical_context_parallel_sizes
    sizes = MegatronSizes(
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
        holders = {"embedding_ranks": get_embedding_ranks, "position_embedding_ranks": get_position_embedding_ranks}
        chosen: dict[str, Any] = {name: function for name, function in holders.items() if function is not None}
        timeout = _timeout(distributed_timeout_minutes)
        topology = Topology.create(sizes, timeout=timeout, validate=validate, **chosen)
    _AMBIENT.topology = topology
    _AMBIENT.memory_buffer = context_of(topology.group("tp")).buffers
    if virtual_pipeline_model_parallel_size is not None:
        _AMBIENT.virtual_size, _AMBIENT.virtual_rank = virtual_pipeline_model_parallel_size, 0


def _refuse_nccl_options(options: dict[str, Any]) -> None:
    instead = {
        "use_sharp": "set NCCL_COLLNET_ENABLE=1",
        "sharp_enabled_group": "set NCCL_COLLNET_ENABLE=1",
        "nccl_communicator_config_path": "set NCCL_MIN_CTAS, NCCL_MAX_CTAS and NCCL_CGA_CLUSTER_SIZE",
        "high_priority_stream_groups": "set TORCH_NCCL_HIGH_PRIORITY=1",
    }
    for name, setting in instead.items():
        if options[name]:
            raise ConfigError(
                f"{name}={options[name]!r} is not offered: the environment configures NCCL; leave it out and {setting}"
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
        # Megatron raises this kind of error.
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
    """Destroy the ambient topology's groups and buffers and remove all overrides; a no-op if there are none.

    The groups' descriptors are closed. Every rank should call this function.
    """
    topology = _AMBIENT.forget()
    if topology is not None:
        topology.destroy()


def model_parallel_is_initialized() -> bool:
    """True if there is an ambient topology."""
    return _AMBIENT.topology is not None


is_initialized = model_parallel_is_initialized


def is_unitialized() -> bool:
    """True if there is no ambient topology; deprecated. The spelling is Megatron's."""
    warnings.warn("is_unitialized is deprecated; use not is_initialized()", DeprecationWarning, stacklevel=2)
    return not model_parallel_is_initialized()


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the communication buffers of the tensor-parallel group, which its layers use too.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
    """
    group = _AMBIENT.group("tp")
    if _AMBIENT.memory_buffer is None:
        _AMBIENT.memory_buffer = context_of(group).buffers
    return _AMBIENT.memory_buffer


def destroy_global_memory_buffer() -> None:
    """Free the reusable communication buffers; the next use allocates new ones."""
    if _AMBIENT.topology is not None:
        context_of(_AMBIENT.group("tp")).buffers = GlobalMemoryBuffer()
    _AMBIENT.memory_buffer = None


def get_global_symmetric_memory_buffer() -> GlobalSymmetricMemoryBuffer:
    """Return the symmetric memory of the tensor-parallel group, 256 MiB, which its inference layers use too.

    The first call allocates it and is collective. If the ranks cannot access each other's memory, as on a CPU, it is
    ordinary memory.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
    """
    group = _AMBIENT.group("tp")
    if _AMBIENT.symmetric_memory_buffer is None:
        _AMBIENT.symmetric_memory_buffer = symmetric_buffer_of(group)
    return _AMBIENT.symmetric_memory_buffer


def destroy_global_symmetric_memory_buffer() -> None:
    """Free the symmetric memory; the next use allocates it again."""
    if _AMBIENT.topology is not None:
        context_of(_AMBIENT.group("tp")).symmetric_buffers.clear()
    _AMBIENT.symmetric_memory_buffer = None


offer(globals())
