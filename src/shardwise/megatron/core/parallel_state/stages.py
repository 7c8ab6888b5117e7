"""This rank's position in the pipeline: neighbours, first and last stage, interleaved stages, embeddings.

With interleaving, each rank holds ``n`` parts of the model, ``vp_stage`` 0 to ``n - 1``. The model runs through part 0
of all ranks, then through part 1 of all ranks, and so on. So it begins with part 0 of the first rank and ends with part
``n - 1`` of the last rank. Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.
"""

from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.megatron.core.parallel_state.ambient import _AMBIENT, get_topology
from shardwise.megatron.errors import AssertedConfigError
from shardwise.megatron.surface import offer


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first stage."""
    return _AMBIENT.ranks_of("pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage."""
    return _AMBIENT.ranks_of("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; the first stage follows the last."""
    ranks = _AMBIENT.ranks_of("pp")
    return ranks[(_AMBIENT.rank("pp") + 1) % len(ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage; the last stage precedes the first."""
    ranks = _AMBIENT.ranks_of("pp")
    return ranks[(_AMBIENT.rank("pp") - 1) % len(ranks)]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Number of parts of the model on each stage; None without interleaving or before initialisation."""
    return _AMBIENT.virtual_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Index of the part that was set last, initially 0; None without interleaving or before initialisation."""
    return _AMBIENT.virtual_rank


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of parts on each stage; None ends interleaving."""
    _check_count("virtual_pipeline_model_parallel_world_size", world_size, 1)
    _AMBIENT.virtual_size = world_size


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the part that is being computed.

    Only ``get_virtual_pipeline_model_parallel_rank`` reads it; functions such as ``is_pipeline_first_stage`` take
    ``vp_stage`` instead.
    """
    _check_count("virtual_pipeline_model_parallel_rank", rank, 0)
    _AMBIENT.virtual_rank = rank


def _check_count(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"cannot set {name} to {value}; give at least {least}, or None")


def _is_virtual_stage(wanted: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    """True if ``vp_stage`` is the part ``wanted`` (-1 is the last), or if parts are ignored."""
    count = _AMBIENT.virtual_size
    if ignore_virtual or count is None:
        return True
    if vp_stage is None or not 0 <= vp_stage < count:
        raise AssertedConfigError(
            f"vp_stage is {vp_stage}; with {count} parts per stage and ignore_virtual=False it must be from 0 to "
            f"{count - 1}"
        )
    return vp_stage == wanted % count


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """True if the model begins on this rank.

    Args:
        ignore_virtual: whether to consider the rank instead of one of its parts.
        vp_stage: index of the part; required with interleaving unless ``ignore_virtual``.

    Raises:
        AssertedConfigError: ``vp_stage`` is required and out of range.
    """
    return _is_virtual_stage(0, ignore_virtual, vp_stage) and _AMBIENT.rank("pp") == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """True if the model ends on this rank; arguments and errors as in ``is_pipeline_first_stage``."""
    return _is_virtual_stage(-1, ignore_virtual, vp_stage) and _AMBIENT.rank("pp") == _AMBIENT.size("pp") - 1


def get_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group of ranks that share a tied word embedding; on a middle stage, raise unless unchecked."""
    return _AMBIENT.group_or_none("embd", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group of ranks that hold the position embedding; on other stages, raise unless unchecked."""
    return _AMBIENT.group_or_none("pos_embd", check_initialized)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """True if this rank holds a (tied) word embedding.

    Args:
        ignore_virtual: whether to consider the rank instead of one of its parts.
        vp_stage: index of the part; required with interleaving unless ``ignore_virtual``. The group's first rank holds
            the embedding in the model's first part and its last rank in the model's last part. Ranks between them
            (chosen by ``get_embedding_ranks``) hold it in every part.

    Raises:
        AssertedConfigError: ``vp_stage`` is required and out of range.
    """
    if "embd" not in get_topology():
        return False
    if ignore_virtual:
        return True
    ranks, own_rank = _AMBIENT.ranks_of("embd"), get_topology().rank_in_world
    if own_rank == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    if own_rank == ranks[-1]:
        return is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """True if this rank holds the position embedding."""
    return "pos_embd" in get_topology()


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Return True, because models have one stack of layers; older programs ask for encoders."""
    return True


is_pipeline_stage_after_split = is_pipeline_stage_before_split


def get_pipeline_model_parallel_split_rank() -> None:
    """Return None, because models have one stack of layers."""


def is_inside_encoder(rank: int | None = None) -> bool:
    """Return False, because models have one stack of layers, the decoder."""
    return False


offer(globals())
