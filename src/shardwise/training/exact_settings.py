"""What a run with the same bits at every layout is refused for, by name, before it starts."""

from shardwise.training.bounds import require


def exact_micro_batch_size(global_batch_size: int, exact_parts: int) -> int:
    """Samples of a micro-batch, the same at every layout: as many micro-batches as parts, or of one sample each."""
    return global_batch_size // exact_parts if global_batch_size % exact_parts == 0 else 1


def check_exact(
    parts: int, *, tp: int, pp: int, dp: int, sequence_length: int | None, fsdp: bool, dtype: str, rng: str
) -> None:
    """Refuse what would not have the same bits at every layout.

    Args:
        parts: ``parallel.exact_parts``.
        tp, pp, dp: ranks along each axis.
        sequence_length: tokens in a sample; None where a fine-tuning run takes the model's, which is known once its
            folder was looked at.
        fsdp, dtype, rng: the settings of these names.

    Raises:
        ConfigError: what it is, and what to do.
    """
    for axis, size in (("parallel.tp", tp), ("parallel.pp", pp), ("data-parallel ranks", dp)):
        require(
            size & (size - 1) == 0 and size <= parts,
            f"parallel.exact is for powers of two up to parallel.exact-parts {parts}, and there are {size} for {axis}; "
            "use another number of ranks, more exact-parts, or no --exact",
        )
    if sequence_length is not None:
        check_exact_length(sequence_length, parts)
    for excluded, what in (
        (fsdp, "parallel.fsdp, whose sums are PyTorch's"),
        (dtype == "float64", "training.dtype float64, whose products differ with the layout"),
        (rng != "global", f"training.rng {rng}, by which each rank draws its own"),
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
