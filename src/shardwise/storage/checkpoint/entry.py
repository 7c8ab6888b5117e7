"""Values of a manifest, each of the kind that it must be; what is not is named by its place in the file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import CheckpointError
from shardwise.core.files import shown
from shardwise.core.tensor_files import MAX_ELEMENTS, is_shape

Box = tuple[Sequence[int], Sequence[int]]
"""First index and number of indices, in each dimension."""


@dataclass(frozen=True)
class Entry:
    """An object of a manifest.

    Attributes:
        where: its place, such as ``tensors.embedding.chunks[0]``; empty for the whole.
        values: the object's values.
    """

    where: str
    values: dict[str, Any]

    def count(self, key: str) -> int:
        """An integer of at least 0; CheckpointError if it is missing or something else."""
        value = self.present(key)
        # isinstance would accept True and False, which are integers too.
        if type(value) is not int or not 0 <= value <= MAX_ELEMENTS:
            raise self.wrong(key, value, f"an integer from 0 to {MAX_ELEMENTS}")
        return value

    def text(self, key: str) -> str:
        """A string; CheckpointError if it is missing or something else."""
        value = self.present(key)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def shape(self, key: str) -> tuple[int, ...]:
        """Sizes of a tensor that can be; CheckpointError if it is missing or something else."""
        value = self.present(key)
        if not is_shape(value):
            raise self.wrong(key, value, f"a list of sizes, of at most {MAX_ELEMENTS} elements")
        return tuple(value)

    def inner(self, key: str) -> Entry:
        """An object; CheckpointError if it is missing or something else."""
        value = self.present(key)
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return Entry(self._place(key), value)

    def entries(self, key: str) -> list[Entry]:
        """A list of objects; CheckpointError if it is missing or something else."""
        values = self.present(key)
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise self.wrong(key, values, "a list of objects")
        return [Entry(f"{self._place(key)}[{number}]", value) for number, value in enumerate(values)]

    def present(self, key: str) -> Any:
        """The value; CheckpointError if there is none."""
        if key not in self.values:
            raise CheckpointError(f"it lacks {self._place(key)}")
        return self.values[key]

    def wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        """An error that names the value's place."""
        return CheckpointError(f"its {self._place(key)} is {shown(value)}; it must be {expected}")

    def _place(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key


def check_chunks(where: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Check that the boxes fill a tensor, each index once.

    Args:
        where: the tensor's place, for messages.
        shape: shape of the tensor.
        boxes: the boxes of its chunks.

    Raises:
        CheckpointError: a box is not within the tensor, two have an index in common, or indices are left over.
    """
    for number, (offsets, sizes) in enumerate(boxes):
        fits = len(offsets) == len(sizes) == len(shape)
        if not fits or any(o + n > total for o, n, total in zip(offsets, sizes, shape, strict=True)):
            raise CheckpointError(
                f"its {where}.chunks[{number}] has offsets {list(offsets)} and sizes {list(sizes)}, which is "
                f"impossible in a tensor of shape {list(shape)}"
            )
    if twice := _overlap(boxes):
        raise CheckpointError(
            f"its {where}.chunks[{twice[1]}] has indices that chunks[{twice[0]}] has too: offsets "
            f"{list(boxes[twice[1]][0])} and sizes {list(boxes[twice[1]][1])}"
        )
    filled = sum(math.prod(sizes) for _, sizes in boxes)
    if filled != math.prod(shape) or not boxes:
        raise CheckpointError(f"{filled} elements are recorded of its {where}, which is of shape {list(shape)}")


def _overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two boxes with an index in common, or of the same first index; None if there are none."""
    first: dict[tuple[int, ...], int] = {}
    for number, (offsets, _) in enumerate(boxes):
        if (other := first.setdefault(tuple(offsets), number)) != number:
            return other, number
    full = [number for number, (_, sizes) in enumerate(boxes) if math.prod(sizes)]
    if len(full) < 2 or not boxes[full[0]][0]:
        return None
    # Sweep along the dimension that is cut most: a box can only overlap those that began before it and have not ended.
    dims = range(len(boxes[full[0]][0]))
    along = max(dims, key=lambda dim: len({boxes[number][0][dim] for number in full}))
    begun: list[int] = []
    for number in sorted(full, key=lambda number: boxes[number][0][along]):
        start = boxes[number][0][along]
        begun = [other for other in begun if boxes[other][0][along] + boxes[other][1][along] > start]
        for other in begun:
            if _have_common(boxes[number], boxes[other]):
                return min(number, other), max(number, other)
        begun.append(number)
    return None


def _have_common(one: Box, other: Box) -> bool:
    return all(
        max(o, other_o) < min(o + n, other_o + other_n) for o, n, other_o, other_n in zip(*one, *other, strict=True)
    )
