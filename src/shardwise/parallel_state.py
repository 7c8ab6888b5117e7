"""The ambient topology: one per process, set once, read by whoever was not handed a group.

Functions that take ``group=None`` look their group up here, once, at the public boundary. Programs that use several
topologies build ``shardwise.topology.Topology`` themselves and pass groups.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.collectives.buffers import GlobalMemoryBuffer
from shardwise.errors import ConfigError, TopologyError
from shardwise.topology import (
    DEFAULT_ORDER,
    EmbeddingRanks,
    ParallelSizes,
    RankGenerator,
    Topology,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
)

__all__ = [
    "RankGenerator",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "destroy_global_memory_buffer",
    "destroy_model_parallel",
    "generate_masked_orthogonal_rank_groups",
    "get_all_ranks",
    "get_context_parallel_global_ranks",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_src_rank",
    "get_data_parallel_world_size",
    "get_embedding_group",
    "get_global_memory_buffer",
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
    "get_tensor_and_data_parallel_group",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "get_topology",
    "initialize_model_parallel",
    "is_initialized",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
    "model_parallel_is_initialized",
    "set_data_parallel_rank",
    "set_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_world_size",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
]


@dataclass
class _Ambient:
    """All that this module remembers."""

    topology: Topology | None = None
    # What `set_*` overrides, by axis; tests and single-process tools use it.
    sizes: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    memory_buffer: GlobalMemoryBuffer | None = None


_AMBIENT = _Ambient()


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    distributed_timeout_minutes: float | None = None,
    order: str = DEFAULT_ORDER,
    get_embedding_ranks: EmbeddingRanks | None = None,
    get_position_embedding_ranks: EmbeddingRanks | None = None,
) -> None:
    """Build the ambient topology on the ranks of ``torch.distributed``. Collective.

    With TP=2 and PP=2 on 8 ranks: tensor groups {0,1}{2,3}{4,5}{6,7}, data groups {0,2}{1,3}{4,6}{5,7}, pipeline groups
    {0,4}{1,5}{2,6}{3,7}.

    Args:
        tensor_model_parallel_size: ranks that split each layer.
        pipeline_model_parallel_size: number of stages.
        context_parallel_size: ranks that split the sequence in attention.
        expert_model_parallel_size: ranks that split the experts.
        expert_tensor_parallel_size: ranks that split each expert; the tensor-parallel size if None.
        distributed_timeout_minutes: time limit of a collective in minutes; the backend's default if None.
        order: axes from fastest-varying to slowest.
        get_embedding_ranks: from a pipeline group's ranks, those that hold a tied word embedding.
        get_position_embedding_ranks: the same for the position embedding.

    Raises:
        TopologyError: ``torch.distributed`` is not initialised, or the ambient topology already is.
        ConfigError: the sizes do not divide the world.
    """
    if _AMBIENT.topology is not None:
        raise TopologyError(
            f"model parallelism is already initialised with {_AMBIENT.topology.sizes}; "
            "call destroy_model_parallel() first"
        )
    timeout = None
    if distributed_timeout_minutes is not None:
        timeout = datetime.timedelta(minutes=distributed_timeout_minutes)
    topology = Topology.create(
        ParallelSizes(
            tp=tensor_model_parallel_size,
            pp=pipeline_model_parallel_size,
            cp=context_parallel_size,
            ep=expert_model_parallel_size,
            etp=expert_tensor_parallel_size,
            order=order,
        ),
        timeout=timeout,
        embedding_ranks=get_embedding_ranks or default_embedding_ranks,
        position_embedding_ranks=get_position_embedding_ranks or default_position_embedding_ranks,
    )
    _AMBIENT.topology = topology
    _AMBIENT.memory_buffer = GlobalMemoryBuffer()


def destroy_model_parallel() -> None:
    """Destroy the ambient topology's groups and forget every override; nothing happens if there is none. Collective."""
    topology = _AMBIENT.topology
    _AMBIENT.topology = None
    _AMBIENT.memory_buffer = None
    _AMBIENT.sizes.clear()
    _AMBIENT.ranks.clear()
    if topology is not None and dist.is_initialized():
        topology.destroy()


def get_topology() -> Topology:
    """The ambient topology.

    Raises:
        TopologyError: ``initialize_model_parallel`` was not called.
    """
    if _AMBIENT.topology is None:
        raise TopologyError(
            "no group was given and model parallelism is not initialised; pass a group, or call "
            "shardwise.parallel_state.initialize_model_parallel() first"
        )
    return _AMBIENT.topology


def model_parallel_is_initialized() -> bool:
    """Whether there is an ambient topology."""
    return _AMBIENT.topology is not None


def is_initialized() -> bool:
    """Whether there is an ambient topology (another name for ``model_parallel_is_initialized``)."""
    return model_parallel_is_initialized()


def _group(name: str, check_initialized: bool = True) -> ProcessGroup | None:
    if not check_initialized and (_AMBIENT.topology is None or name not in _AMBIENT.topology):
        return None
    return get_topology().group(name)


def _checked_group(name: str) -> ProcessGroup:
    return get_topology().group(name)


def _size(name: str) -> int:
    override = _AMBIENT.sizes.get(name)
    return get_topology().size(name) if override is None else override


def _rank(name: str) -> int:
    override = _AMBIENT.ranks.get(name)
    return get_topology().rank(name) if override is None else override


def get_all_ranks() -> str:
    """This rank's place on every axis, joined by "_": tp, dp, cp, pp, ep."""
    return "_".join(str(_rank(name)) for name in ("tp", "dp", "cp", "pp", "ep"))


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The tensor-parallel group of this rank."""
    return _group("tp", check_initialized)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The pipeline group of this rank."""
    return _group("pp", check_initialized)


def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Tensor and pipeline ranks together: all ranks that hold a part of one copy of the model."""
    return _group("mp", check_initialized)


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The context-parallel group of this rank."""
    return _group("cp", check_initialized)


def get_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that share a tied word embedding; an error on a middle stage unless unchecked."""
    return _group("embd", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that hold the position embedding; an error on other stages unless unchecked."""
    return _group("pos_embd", check_initialized)


def get_data_parallel_group(with_context_parallel: bool = False) -> ProcessGroup:
    """The data-parallel group of this rank, context-parallel ranks included when asked."""
    return _checked_group("dp_cp" if with_context_parallel else "dp")


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Tensor and data ranks together, context-parallel ranks included when asked."""
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Tensor and context ranks together."""
    return _group("tp_cp", check_initialized)


def get_tensor_model_parallel_world_size() -> int:
    """Number of ranks that split each layer."""
    return _size("tp")


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return _size("pp")


def get_context_parallel_world_size() -> int:
    """Number of ranks that split the sequence in attention."""
    return _size("cp")


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Number of data-parallel ranks."""
    return _size("dp_cp" if with_context_parallel else "dp")


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in its tensor-parallel group."""
    return _rank("tp")


def get_pipeline_model_parallel_rank() -> int:
    """This rank's pipeline stage."""
    return _rank("pp")


def get_context_parallel_rank() -> int:
    """This rank's place in its context-parallel group."""
    return _rank("cp")


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """This rank's place in its data-parallel group."""
    return _rank("dp_cp" if with_context_parallel else "dp")


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Override the tensor-parallel size; None takes the override back."""
    _override(_AMBIENT.sizes, "tp", world_size)


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Override the tensor-parallel rank; None takes the override back."""
    _override(_AMBIENT.ranks, "tp", rank)


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Override the number of stages; None takes the override back."""
    _override(_AMBIENT.sizes, "pp", world_size)


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Override the pipeline stage; None takes the override back."""
    _override(_AMBIENT.ranks, "pp", rank)


def set_data_parallel_rank(rank: int | None) -> None:
    """Override the data-parallel rank; None takes the override back."""
    _override(_AMBIENT.ranks, "dp", rank)


def _override(overrides: dict[str, int], name: str, value: int | None) -> None:
    if value is None:
        overrides.pop(name, None)
    elif value < 0:
        raise ConfigError(f"cannot override axis {name!r} with {value}; give a count, or None to take it back")
    else:
        overrides[name] = value


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the tensor-parallel group."""
    return get_topology().ranks("tp")[0]


def get_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the model-parallel group."""
    return get_topology().ranks("mp")[0]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first rank of the data-parallel group."""
    return get_topology().ranks("dp_cp" if with_context_parallel else "dp")[0]


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int]:
    """Global ranks of the context-parallel group."""
    return list(get_topology().ranks("cp"))


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first stage."""
    return get_topology().ranks("pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage."""
    return get_topology().ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; the last is followed by the first."""
    ranks = get_topology().ranks("pp")
    return ranks[(_rank("pp") + 1) % len(ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage; the first is preceded by the last."""
    ranks = get_topology().ranks("pp")
    return ranks[(_rank("pp") - 1) % len(ranks)]


def is_pipeline_first_stage() -> bool:
    """Whether this rank is on the first stage."""
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage() -> bool:
    """Whether this rank is on the last stage."""
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def is_rank_in_embedding_group() -> bool:
    """Whether this rank holds a (tied) word embedding."""
    return "embd" in get_topology()


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds the position embedding."""
    return "pos_embd" in get_topology()


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """The reusable communication buffers.

    Raises:
        TopologyError: ``initialize_model_parallel`` was not called.
    """
    get_topology()
    if _AMBIENT.memory_buffer is None:
        _AMBIENT.memory_buffer = GlobalMemoryBuffer()
    return _AMBIENT.memory_buffer


def destroy_global_memory_buffer() -> None:
    """Free the reusable communication buffers."""
    _AMBIENT.memory_buffer = None


def resolve_tensor_model_parallel_group(group: ProcessGroup | None) -> ProcessGroup:
    """``group``, or the ambient tensor-parallel group if None: the one place where None is resolved.

    Raises:
        TopologyError: no group given and none initialised.
    """
    return _checked_group("tp") if group is None else group
