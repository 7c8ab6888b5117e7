"""Evidence for the kinds of faults: comparisons of what the ranks have with what the reference has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.run.doctor.judging import MOST_ROUNDING, Judge, Judged, Kind, kinds_of, merge
from shardwise.run.doctor.places import Key
from shardwise.run.doctor.sketches import Sketch, alike

NEVER_SUMMED = "never summed"
SCALED = "scaled"
ONE_COPY = "one rank's copy"
DRIFTED = "drifted"
WRONG_GROUP = "wrong group"
MISPLACED = "misplaced"
STALE = "stale"
NORM = "norm"
MICRO_BATCHES = "micro-batches"
RANDOM = "random stream"
POSITIONS = "positions"
LABELS = "labels"
SAMPLES = "samples"
UNEXPLAINED = "unexplained"

# A factor is recognised within this relative distance.
FACTOR = 2e-2


@dataclass(frozen=True)
class Explanation:
    """Class of a fault, and the evidence.

    Attributes:
        kind: one of the constants of this file.
        evidence: a sentence with the values that show it.
    """

    kind: str
    evidence: str


@dataclass(frozen=True)
class Case:
    """The run in which a wrong tensor is to be explained, and comparisons within its rounding.

    Attributes:
        judge: compares tensors with the reference.
        axes: sizes of the suspect's axes.
        num_micro_batches: number of micro-batches of a step on each rank.
    """

    judge: Judge
    axes: dict[str, int]
    num_micro_batches: int

    def is_multiple(self, judged: Judged, factor: float) -> bool:
        """Whether a tensor is the reference's times a factor, within rounding."""
        whole = judged.whole.scaled(factor)
        expected = self.judge.rounding.of(judged.key, whole)
        return bool(judged.merged) and all(
            each.shape == whole.shape
            and self.judge.ratio(judged.key, each, whole, expected) <= 2 * factor * MOST_ROUNDING
            for each in judged.merged
        )

    def fits(self, wrong: Judged, merged: Sequence[Sketch], whole: Sketch | None = None) -> bool:
        """Whether merged tensors are the reference, or ``whole``, and much closer than the suspect's."""
        whole = wrong.whole if whole is None else whole
        if not merged or any(each.shape != whole.shape for each in merged):
            return False
        expected = self.judge.rounding.of(wrong.key, whole)
        return max(self.judge.ratio(wrong.key, each, whole, expected) for each in merged) <= min(
            MOST_ROUNDING, wrong.ratio / 4
        )

    def layouts(self, wrong: Judged) -> Iterator[tuple[dict[str, Kind], list[Sketch]]]:
        """Yield each layout, with the tensors that it gives."""
        axes = self.axes_of(wrong)
        stated = [kind for kind in wrong.layouts.values() if kind[0].startswith("placed")]
        # Copies may be partial sums instead.
        stated += [("placed sums", *kind[1:]) for kind in stated if kind[0] == "placed"]
        options = [kinds_of(len(wrong.whole.shape), axis) + stated for axis in axes]
        for chosen in itertools.product(*options):
            layouts = dict(zip(axes, chosen, strict=True))
            if any(
                kind[0].startswith("placed") and wrong.layouts.get(axis, ())[1:] != kind[1:]
                for axis, kind in layouts.items()
            ):
                continue
            yield layouts, merge(wrong.shards, axes, layouts)

    def axes_of(self, wrong: Judged) -> list[str]:
        """Return the axes along which the ranks of a tensor differ."""
        places = list(wrong.shards)
        number = len(places[0]) if places else 0
        if wrong.layouts:
            return list(wrong.layouts)
        sizes = [1 + max(place[axis] for place in places) for axis in range(number)]
        names = [axis for axis, size in self.axes.items() if size > 1]
        return [name for name, size in zip(names, sizes, strict=False) if size > 1][:number]

    def reference(self, key: Key, like: Sketch) -> Tensor | None:
        """Return a tensor of the reference in the form of another, if its elements are recorded."""
        entries = self.judge.reference.entries(key)
        return alike([entries[0].sketch, like])[0].views.get("slice") if entries else None

    def num_labels(self, key: Key) -> dict[int, int]:
        """Return the number of labels of each rank in a micro-batch, or in a step, if it was stated."""
        found: dict[int, int] = {}
        for rank, inputs in enumerate(self.judge.suspect.of_ranks("inputs")):
            for each in inputs:
                if each["step"] == key.step and key.micro_batch in (-1, each.get("micro_batch")) and each["num_labels"]:
                    found[rank] = found.get(rank, 0) + each["num_labels"]
        return found

    def limit(self, wrong: Judged) -> float:
        """Return the largest difference of single elements that is rounding."""
        expected = self.judge.rounding.of(wrong.key, wrong.whole).get("slice", 0.0)
        # Single elements are further away than the root mean square.
        return 4 * MOST_ROUNDING * expected

    def agrees(self, wrong: Judged, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors are equal within the rounding of the wrong one."""
        expected = self.judge.rounding.of(wrong.key, wrong.whole).get("slice", 0.0)
        return float((one - other).square().mean().sqrt()) <= MOST_ROUNDING * expected

    def agrees_all(self, wrong: Judged, one: Sketch, other: Sketch) -> bool:
        """Whether two sketches are equal within the rounding of the wrong tensor."""
        expected = self.judge.rounding.of(wrong.key, wrong.whole)
        return one.shape == other.shape and self.judge.ratio(wrong.key, one, other, expected) <= MOST_ROUNDING


def are_constant(values: Tensor, dim: int) -> bool:
    """Whether all indices of a dimension have the same values."""
    return bool((values == values.narrow(dim, 0, 1)).all())


def centred(values: Tensor) -> Tensor:
    """Return the rows less their mean."""
    return values - values.mean(dim=tuple(range(values.dim() - 1)), keepdim=True)
