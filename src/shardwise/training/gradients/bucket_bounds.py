"""Where parameters lie in a flat buffer, and where the buffer is cut into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Parameters and each rank's interval of a bucket start at multiples of this many elements, 64 bytes of fp32: vectorised
# kernels find them aligned, and round each element alike whichever interval it lies in.
_ALIGNMENT = 16


class Placement(NamedTuple):
    """Parameters in a flat buffer, in the order in which they were given.

    Attributes:
        starts: where each parameter starts.
        buckets: for each bucket the indices of its parameters.
        bounds: where each bucket starts, and last where the buffer ends; every bucket is a multiple of 16 elements for
            each rank.
    """

    starts: tuple[int, ...]
    buckets: tuple[range, ...]
    bounds: tuple[int, ...]


def place(sizes: Sequence[int], *, bucket_size: int | None, world_size: int) -> Placement:
    """Put parameters one after the other, and cut between them.

    Args:
        sizes: numbers of elements, of at least one parameter.
        bucket_size: the most elements of a bucket, padding included, unless one parameter has more; None for one
            bucket.
        world_size: ranks between which a bucket may be split.

    >>> place([5, 30, 40], bucket_size=64, world_size=3)
    Placement(starts=(0, 16, 48), buckets=(range(0, 2), range(2, 3)), bounds=(0, 48, 96))
    """
    step = _ALIGNMENT * world_size
    starts: list[int] = []
    firsts = [0]
    bounds = [0]
    end = 0
    for index, size in enumerate(sizes):
        start = _rounded_up(end, _ALIGNMENT)
        if (
            index > firsts[-1]
            and bucket_size is not None
            and _rounded_up(start + size, step) - bounds[-1] > bucket_size
        ):
            start = _rounded_up(end, step)
            firsts.append(index)
            bounds.append(start)
        starts.append(start)
        end = start + size
    bounds.append(_rounded_up(end, step))
    stops = [*firsts[1:], len(sizes)]
    return Placement(
        tuple(starts), tuple(range(first, stop) for first, stop in zip(firsts, stops, strict=True)), tuple(bounds)
    )


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step
