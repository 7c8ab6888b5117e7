"""The ambient topology: its state in one object, look-ups by the names of ``Topology``, and its start and end."""

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
from shardwise.core.rank_grid import DEFAULT_ORDER, EmbeddingRanks, ParallelSizes
from shardwise.core.topology import Topology
from shardwise.megatron.errors import AssertedConfigError, AssertedTopologyError, NotInitializedError, asserting
from shardwise.megatron.surface import given, offer


@dataclass
class _Ambient:
    """All that ``parallel_state`` remembers between calls. Names of groups are those of ``Topology``.

    Attributes:
        topology: the ambient topology; None before initialisation.
        sizes: overrides of ``set_*_world_size``, by name of the group.
        ranks: overrides of ``set_*_rank``.
        virtual_size: parts of the model on each pipeline stage; None without interleaving.
        virtual_rank: the part that is being computed.
        memory_buffer: the communication buffers of the tensor-parallel group, which its layers use too.
        symmetric_memory_buffer: memory that the tensor-parallel ranks reach in each other, where they can.
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
        """This rank's group of that name, or TopologyError."""
        return get_topology().group(name)

    def group_or_none(self, name: str, check_initialized: bool) -> ProcessGroup | None:
        """This rank's group of that name; where there is none, TopologyError if checked and None if not."""
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
        """This rank's place in a group, or its override, which may go by another group's name."""
        value = self.ranks.get(overridden_as or name)
        return get_topology().rank(name) if value is None else value

    @asserting(AssertedTopologyError)
    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Global ranks of a group, in group order."""
        return get_topology().ranks(name)

    def forget(self) -> Topology | None:
        """Go back to the state before any call, and return the topology, which the caller destroys."""
        topology = self.topology
        self.__dict__.update(_Ambient().__dict__)
        return topology


_AMBIENT = _Ambient()


def get_topology() -> Topology:
    """The ambient topology.

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
    """This rank's place on every axis, joined by "_": tp, dp, cp, pp, ep."""
    return "_".join(str(_AMBIENT.rank(name)) for name in ("tp", "dp", "cp", "pp", "ep"))


def resolve_tensor_model_parallel_group(group: ProcessGroup | None) -> ProcessGroup:
    """``group``, or the ambient tensor-parallel group if None: the one place where None is resolved.

    Raises:
        NotInitializedError: no group given and none initialised.
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
    topology = _AMBIENT.forget()
    if topology is not None:
        topology.destroy()


def model_parallel_is_initialized() -> bool:
    """Whether there is an ambient topology."""
    return _AMBIENT.topology is not None


is_initialized = model_parallel_is_initialized


def is_unitialized() -> bool:
    """Whether there is no ambient topology; deprecated, by this spelling Megatron's."""
    warnings.warn("is_unitialized is deprecated; use not is_initialized()", DeprecationWarning, stacklevel=2)
    return not model_parallel_is_initialized()


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """The communication buffers of the tensor-parallel group, which its layers use too.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
    """
    group = _AMBIENT.group("tp")
    if _AMBIENT.memory_buffer is None:
        _AMBIENT.memory_buffer = context_of(group).buffers
    return _AMBIENT.memory_buffer


def destroy_global_memory_buffer() -> None:
    """Free the reusable communication buffers; the next use makes new ones."""
    if _AMBIENT.topology is not None:
        context_of(_AMBIENT.group("tp")).buffers = GlobalMemoryBuffer()
    _AMBIENT.memory_buffer = None


def get_global_symmetric_memory_buffer() -> GlobalSymmetricMemoryBuffer:
    """Symmetric memory of the tensor-parallel group, 256 MiB, which its inference layers use too.

    The first call makes it, which is collective. Where the ranks do not reach each other's memory, as on a CPU, it is
    ordinary memory.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
    """
    group = _AMBIENT.group("tp")
    if _AMBIENT.symmetric_memory_buffer is None:
        _AMBIENT.symmetric_memory_buffer = symmetric_buffer_of(group)
    return _AMBIENT.symmetric_memory_buffer


def destroy_global_symmetric_memory_buffer() -> None:
    """Free the symmetric memory; the next use makes it anew."""
    if _AMBIENT.topology is not None:
        context_of(_AMBIENT.group("tp")).symmetric_buffers.clear()
    _AMBIENT.symmetric_memory_buffer = None


offer(globals())
