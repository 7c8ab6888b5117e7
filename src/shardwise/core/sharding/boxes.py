"""The boxes that a run of consecutive elements of an array consists of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.core.sharding.balanced import Interval


class Box(NamedTuple):
    """Indices of an array that are an interval in every dimension.

    Attributes:
        offsets: first index in each dimension.
        sizes: number of indices in each.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def narrowed(self, dim: int, start: int, stop: int) -> Box | None:
        """What of it lies between two indices of a dimension; None if nothing does."""
        low, high = max(start, self.offsets[dim]), min(stop, self.offsets[dim] + self.sizes[dim])
        if low >= high:
            return None
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = low, high - low
        return Box(tuple(offsets), tuple(sizes))


def boxes_of_interval(shape: Sequence[int], interval: Interval) -> list[Box]:
    """The elements ``interval`` of an array, counted in row-major order, as boxes.

    Part of the first row, whole rows, and part of the last one, where parts of rows are such runs themselves: at most
    ``2 * n - 1`` boxes of an array of ``n`` dimensions.

    Args:
        shape: of the array.
        interval: first element, and the one after the last.

    Returns:
        The boxes in the order of their elements; nothing of an empty interval.

    >>> boxes_of_interval((4, 5), (3, 17))
    [Box(offsets=(0, 3), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(2, 5)), Box(offsets=(3, 0), sizes=(1, 2))]
    """
    start, stop = interval
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    rest = tuple(shape[1:])
    row = math.prod(rest)

    def part(index: int, low: int, high: int) -> list[Box]:
        return [Box((index, *box.offsets), (1, *box.sizes)) for box in boxes_of_interval(rest, (low, high))]

    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return part(first, start - first * row, stop - first * row)
    whole_from, whole_to = -(-start // row), stop // row
    boxes = part(first, start - first * row, row) if first < whole_from else []
    if whole_from < whole_to:
        boxes.append(Box((whole_from, *(0 for _ in rest)), (whole_to - whole_from, *rest)))
    return boxes + (part(last, 0, stop - last * row) if whole_to <= last else [])
