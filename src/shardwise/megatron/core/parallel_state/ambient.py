"""All that is remembered between calls, in one object, and how it is looked up by the names of ``Topology``."""

from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

from shardwise.core.communication.context import GlobalMemoryBuffer, backends_of
from shardwise.core.communication.symmetric_memory import GlobalSymmetricMemoryBuffer
from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.topology import Topology
from shardwise.megatron.errors import AssertedTopologyError, NotInitializedError, asserting


@dataclass
class Ambient:
    """All that ``parallel_state`` remembers.

    Attributes:
        topology: the ambient topology; None before initialisation.
        sizes: what ``set_*_world_size`` overrides, by name of the group.
        ranks: what ``set_*_rank`` overrides.
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

    def forget(self) -> Topology | None:
        """Go back to the state before any call; what was the topology is the caller's to destroy."""
        topology = self.topology
        self.__dict__.update(Ambient().__dict__)
        return topology


AMBIENT = Ambient()


def get_topology() -> Topology:
    """The ambient topology.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
    """
    if AMBIENT.topology is None:
        raise NotInitializedError(
            "no group was given and model parallelism is not initialised; pass a group, or call "
            "shardwise.parallel_state.initialize_model_parallel() first"
        )
    return AMBIENT.topology


@asserting(AssertedTopologyError)
def group_of(name: str) -> ProcessGroup:
    """This rank's group of that name, or TopologyError."""
    return get_topology().group(name)


def group_or_none(name: str, check_initialized: bool) -> ProcessGroup | None:
    """This rank's group of that name; where there is none, TopologyError if checked and None if not."""
    if not check_initialized and (AMBIENT.topology is None or name not in AMBIENT.topology):
        return None
    return group_of(name)


def carries_gloo(group: ProcessGroup) -> ProcessGroup:
    """``group``, or TopologyError if tensors on the CPU cannot travel over it."""
    if "cpu" not in backends_of(group):
        raise TopologyError(
            f"the backends {dict(backends_of(group))} carry no tensors on the CPU; call "
            "torch.distributed.init_process_group() with 'cpu:gloo,cuda:nccl', and every group carries both"
        )
    return group


@asserting(AssertedTopologyError)
def size_of(name: str) -> int:
    """Number of ranks in the group ``name``, unless overridden."""
    value = AMBIENT.sizes.get(name)
    return get_topology().size(name) if value is None else value


@asserting(AssertedTopologyError)
def rank_in(name: str, overridden_as: str | None = None) -> int:
    """This rank's place in the group ``name``, unless overridden, as that in ``overridden_as`` if given."""
    value = AMBIENT.ranks.get(overridden_as or name)
    return get_topology().rank(name) if value is None else value


@asserting(AssertedTopologyError)
def ranks_of(name: str) -> tuple[int, ...]:
    """Global ranks of the group ``name``, in group order."""
    return get_topology().ranks(name)


def get_all_ranks() -> str:
    """This rank's place on every axis, joined by "_": tp, dp, cp, pp, ep."""
    return "_".join(str(rank_in(name)) for name in ("tp", "dp", "cp", "pp", "ep"))


def resolve_tensor_model_parallel_group(group: ProcessGroup | None) -> ProcessGroup:
    """``group``, or the ambient tensor-parallel group if None: the one place where None is resolved.

    Raises:
        NotInitializedError: no group given and none initialised.
    """
    return group_of("tp") if group is None else group


def set_override(overrides: dict[str, int], name: str, value: int | None) -> None:
    """Set an override, or take it back with None."""
    if value is None:
        overrides.pop(name, None)
    elif value < 0:
        raise ConfigError(f"cannot override axis {name!r} with {value}; give a count, or None to take it back")
    else:
        overrides[name] = value
