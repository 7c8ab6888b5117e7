"""The balanced rule: of ``n`` elements on ``t`` ranks, the first ``n % t`` hold one more than the others.

Nothing is padded, and every rank knows every rank's size without asking.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from shardwise.core.errors import IndivisibleError, ShardingError

Interval = tuple[int, int]
"""``(start, stop)`` of consecutive indices, ``stop`` excluded."""


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise IndivisibleError unless ``denominator`` divides ``numerator``."""
    if denominator == 0 or numerator % denominator != 0:
        raise IndivisibleError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The exact quotient; IndivisibleError if there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def balanced_sizes(n: int, t: int) -> tuple[int, ...]:
    """How many of ``n`` elements each of ``t`` ranks holds: the first ``n % t`` hold one more.

    >>> balanced_sizes(13, 4)
    (4, 3, 3, 3)
    """
    if t < 1 or n < 0:
        raise ShardingError(f"cannot split {n} elements over {t} ranks; both must be counts and the ranks at least 1")
    # Not divmod, which torch.compile does not trace.
    quotient, remainder = n // t, n % t
    return tuple(quotient + (rank < remainder) for rank in range(t))


def balanced_range(n: int, t: int, rank: int) -> Interval:
    """``(start, stop)`` of what ``rank`` holds of ``n`` elements on ``t`` ranks, by the balanced rule.

    >>> balanced_range(13, 4, 1)
    (4, 7)
    """
    if not 0 <= rank < t:
        raise ShardingError(f"rank {rank} is not one of {t} ranks")
    return intervals_of_sizes(balanced_sizes(n, t))[rank]


def uneven_sizes(n: int, t: int) -> tuple[int, ...] | None:
    """The balanced sizes of ``n`` elements on ``t`` ranks, or None where all ranks hold the same number.

    None is what a collective takes for shards of equal size.

    >>> uneven_sizes(13, 4)
    (4, 3, 3, 3)
    >>> uneven_sizes(12, 4)
    """
    return None if n % t == 0 else balanced_sizes(n, t)


def intervals_of_sizes(sizes: Sequence[int]) -> tuple[Interval, ...]:
    """Consecutive intervals with the given sizes.

    >>> intervals_of_sizes([2, 3])
    ((0, 2), (2, 5))
    """
    stops = (0, *accumulate(sizes))
    return tuple(pairwise(stops))


def checked_sizes(sizes: Sequence[int] | None, total: int, t: int, what: str) -> tuple[int, ...]:
    """``sizes`` as a tuple, after checking that they are ``t`` counts that sum to ``total``; the balanced ones if None.

    Raises:
        ShardingError: they do not; the message names ``what``, the sizes and the total.
    """
    if sizes is None:
        return balanced_sizes(total, t)
    result = tuple(int(size) for size in sizes)
    if len(result) != t or sum(result) != total or min(result) < 0:
        raise ShardingError(f"{what}: sizes {list(result)} must be {t} counts, one per rank, that sum to {total}")
    return result


def checked_dim(dim: int, shape: Sequence[int]) -> int:
    """``dim`` counted from the first dimension of ``shape``; ShardingError if there is no such dimension.

    >>> checked_dim(-1, (4, 5))
    1
    """
    if not -len(shape) <= dim < len(shape):
        raise ShardingError(f"shape {list(shape)} has no dimension {dim}")
    return dim % len(shape)
