"""Sums of a few numbers of every rank that are rounded once, and so are the same in any order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import gather_objects

# The least fp64 number is 2^-1074, and every other a multiple of it.
_LEAST_EXPONENT = 1074


def exact_total(values: Iterable[float], *, groups: Sequence[ProcessGroup], what: str) -> float:
    """The sum of all ranks' numbers, rounded to fp64 once; infinite or NaN if one of them is. Collective.

    Args:
        values: this rank's, any number of them.
        groups: over which the sum goes, one after the other.
        what: what is summed, for the message if a rank does not come.
    """
    values = list(values)
    others = [value for value in values if not math.isfinite(value)]
    own = sum(_in_least_units(value) for value in values if math.isfinite(value)), sum(others)
    for group in groups:
        if group.size() > 1:
            every = gather_objects(own, what, group=group)
            own = sum(units for units, _ in every), sum(other for _, other in every)
    units, other = own
    return float(other) if other != 0 else _rounded(units)


def _in_least_units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator << (_LEAST_EXPONENT - (denominator.bit_length() - 1))


def _rounded(units: int) -> float:
    try:
        # The quotient of two integers is rounded once.
        return units / (1 << _LEAST_EXPONENT)
    except OverflowError:
        return math.copysign(math.inf, units)
