"""Megatron's questions about a pipeline group: which stage this rank is, and its neighbours."""

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.megatron.core.utils import get_pg_rank, get_pg_size, unwrap_model as unwrap_model
from shardwise.megatron.errors import AssertedTopologyError
from shardwise.megatron.surface import offer


def is_pp_first_stage(pp_group: ProcessGroup | None) -> bool:
    """True on the first stage, or without a group."""
    return get_pg_rank(pp_group) == 0


def is_pp_last_stage(pp_group: ProcessGroup | None) -> bool:
    """True on the last stage, or without a group."""
    return get_pg_rank(pp_group) == get_pg_size(pp_group) - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """True for the first chunk of a stage, or if there is one chunk.

    Raises:
        AssertedTopologyError: there is one chunk, and ``vp_stage`` is another.
    """
    return _chunk(vp_stage, vp_size) == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """True for the last chunk of a stage, or if there is one chunk.

    Raises:
        AssertedTopologyError: there is one chunk, and ``vp_stage`` is another.
    """
    return _chunk(vp_stage, vp_size) == (vp_size or 1) - 1


def _chunk(vp_stage: int | None, vp_size: int | None) -> int | None:
    if (vp_size or 1) > 1:
        return vp_stage
    if vp_stage not in (None, 0):
        raise AssertedTopologyError(f"vp_stage is {vp_stage} and vp_size {vp_size}; a stage of one chunk has chunk 0")
    return 0


def get_pp_first_rank(pp_group: ProcessGroup) -> int:
    """Global rank of the first stage."""
    return dist.get_process_group_ranks(pp_group)[0]


def get_pp_last_rank(pp_group: ProcessGroup) -> int:
    """Global rank of the last stage."""
    return dist.get_process_group_ranks(pp_group)[-1]


def get_pp_next_rank(pp_group: ProcessGroup) -> int | None:
    """Global rank of the next stage; None on the last one."""
    return _neighbour(pp_group, 1)


def get_pp_prev_rank(pp_group: ProcessGroup) -> int | None:
    """Global rank of the previous stage; None on the first one."""
    return _neighbour(pp_group, -1)


def _neighbour(pp_group: ProcessGroup, step: int) -> int | None:
    ranks, stage = dist.get_process_group_ranks(pp_group), pp_group.rank() + step
    return ranks[stage] if 0 <= stage < len(ranks) else None


offer(globals())
