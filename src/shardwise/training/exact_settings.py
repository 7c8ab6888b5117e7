"""What a run with the same bits at every layout is refused for, by name, before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.training.bounds import require

if TYPE_CHECKING:
    from shardwise.training.settings import RunSettings


def exact_micro_batch_size(global_batch_size: int, exact_parts: int) -> int:
    """Samples of a micro-batch, the same at every layout: as many micro-batches as parts, or of one sample each."""
    return global_batch_size // exact_parts if global_batch_size % exact_parts == 0 else 1


def check_exact(settings: RunSettings, dp: int) -> None:
    """Refuse what would not have the same bits at every layout.

    Raises:
        ConfigError: what it is, and what to do.
    """
    parallel, parts = settings.parallel, settings.parallel.exact_parts
    for axis, size in (("parallel.tp", parallel.tp), ("parallel.pp", parallel.pp), ("data-parallel ranks", dp)):
        require(
            size & (size - 1) == 0 and size <= parts,
            f"parallel.exact is for powers of two up to parallel.exact-parts {parts}, and there are {size} for {axis}; "
            "use another number of ranks, more exact-parts, or no --exact",
        )
    # Without a length of its own a fine-tuning run has the model's, which is known once its folder was looked at.
    length: int | None = settings.model.sequence_length  # type: ignore[attr-defined]
    if length is not None:
        check_exact_length(length, parts)
    for excluded, what in (
        (parallel.fsdp, "parallel.fsdp, whose sums are PyTorch's"),
        (settings.training.dtype == "float64", "training.dtype float64, whose products differ with the layout"),
        (settings.training.rng != "global", f"training.rng {settings.training.rng}, by which each rank draws its own"),
    ):
        require(not excluded, f"parallel.exact has no exact form of {what}; leave one of them out")


def check_exact_length(length: int, parts: int) -> None:
    """Refuse a sequence of ``length`` tokens that cannot be cut into so many equal parts, with a ConfigError."""
    require(
        length % parts == 0,
        f"parallel.exact cuts a sequence into {parts} equal parts (parallel.exact-parts), and it has {length} tokens; "
        f"the largest exact-parts that works is {_largest_power_of_two_in(length)}",
    )


def _largest_power_of_two_in(number: int) -> int:
    return number & -number
