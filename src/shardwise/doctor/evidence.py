"""Evidence for the kinds of faults: comparisons of what the ranks have with what the reference has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.doctor.findings import MOST_ROUNDING, Judge, Judged, Kind, kinds_of, merge
from shardwise.doctor.places import Key
from shardwise.doctor.sketches import Sketch, added, alike

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

_MOST_ROWS = 4096

# A factor is recognised within this relative distance.
FACTOR = 2e-2


@dataclass(frozen=True)
class Explanation:
    """Class of a fault, the evidence in a sentence, and the wrong module if the values show it."""

    kind: str
    evidence: str
    module: str = ""


@dataclass(frozen=True)
class Case:
    """The run in which a wrong tensor is to be explained, and comparisons within its rounding."""

    judge: Judge
    axes: dict[str, int]
    num_micro_batches: int

    def holds_copies(self, judged: Judged) -> bool:
        """Whether each rank has a tensor as large as the reference's."""
        return bool(judged.shards) and all(each.shape == judged.whole.shape for each in judged.shards.values())

    def is_multiple(self, judged: Judged, factor: float) -> bool:
        """Whether a tensor, or the sum of the ranks' terms, is the reference's times a factor, within rounding."""
        whole, shards = judged.whole.scaled(factor), list(judged.shards.values())
        options = [judged.merged]
        if len(shards) == factor and all(each.shape == whole.shape for each in shards):
            options.append([added(shards)])
        return any(self._are_near(judged, merged, whole, 2 * factor * MOST_ROUNDING) for merged in options)

    def fits(self, wrong: Judged, merged: Sequence[Sketch], whole: Sketch | None = None) -> bool:
        """Whether merged tensors are the reference, or ``whole``, and much closer than the suspect's."""
        most = min(MOST_ROUNDING, wrong.ratio / 4)
        return self._are_near(wrong, merged, wrong.whole if whole is None else whole, most)

    def _are_near(self, judged: Judged, merged: Sequence[Sketch], whole: Sketch, most: float) -> bool:
        if not merged or any(each.shape != whole.shape for each in merged):
            return False
        expected = self.judge.rounding.of(judged.key, whole)
        return max(self.judge.ratio(judged.key, each, whole, expected) for each in merged) <= most

    def layouts(self, wrong: Judged) -> Iterator[tuple[dict[str, Kind], list[Sketch]]]:
        """Yield each layout, with the tensors that it gives."""
        axes = self.axes_of(wrong)
        stated = [kind for kind in wrong.layouts.values() if kind[0].startswith("placed")]
        # Copies may be partial sums instead.
        stated += [("placed sums", *kind[1:]) for kind in stated if kind[0] == "placed"]
        options = [kinds_of(len(wrong.whole.shape), axis, self.axes.get(axis, 0)) + stated for axis in axes]
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
        return alike([entries[0].sketch, like])[0].slice if entries else None

    def reference_whole(self, key: Key) -> Tensor | None:
        """Return all elements of a tensor of the reference, if they are recorded."""
        entries = self.judge.reference.entries(key)
        sketch = entries[0].sketch if entries else None
        return sketch.doubled().views["slice"] if sketch is not None and sketch.is_whole else None

    def is_loss(self, wrong: Judged) -> bool:
        """Whether a tensor is a single number that a module got or returned: any two of them have a ratio."""
        return wrong.key.what in ("input", "output") and math.prod(wrong.whole.shape) == 1

    def is_mean(self, judged: Judged) -> bool:
        """Whether the mean over the ranks is the reference."""
        shards = list(judged.shards.values())
        if any(each.shape != judged.whole.shape for each in shards):
            return False
        return self.fits(judged, [added(shards).scaled(1 / len(shards))])

    def before(self, key: Key) -> Iterator[Key]:
        """Yield the tensors of the reference's forward before this one in its micro-batch, the last first."""
        recorded = self.judge.reference.recorded
        for each in reversed(recorded[: recorded.index(key)]):
            if each.what in ("input", "output") and (each.step, each.micro_batch) == (key.step, key.micro_batch):
                yield each

    def is_summed_after(self, wrong: Judged) -> bool:
        """Whether the ranks agree on what is computed from partial sums."""
        recorded = self.judge.reference.recorded
        later = (key for key in recorded[recorded.index(wrong.key) + 1 :] if key.what in ("input", "output"))
        judged = self.judge.judge(key) if (key := next(later, None)) is not None else None
        shards = [] if judged is None else list(judged.shards.values())
        return bool(shards) and all(self.agrees_all(wrong, each, shards[0]) for each in shards)

    def calls_with(self, key: Key) -> list[dict[str, Any]]:
        """Return the calls of modules in the reference that got a tensor."""
        number = self.judge.reference.recorded.index(key)
        calls = self.judge.reference.facts["calls"]
        return [call for call in calls if number in call["inputs"] and number not in call["outputs"]]

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

    def matches(self, wrong: Judged, here: Tensor, there: Tensor, dim: int) -> list[int] | None:
        """Return for each row of ``here`` along a dimension the equal row of ``there``; None if a row has none."""
        rows, others = (each.movedim(dim, 0).reshape(each.size(dim), -1) for each in (here, there))
        if rows.shape[1:] != others.shape[1:] or not rows.numel() or max(len(rows), len(others)) > _MOST_ROWS:
            return None
        distances, nearest = torch.cdist(rows, others, compute_mode="donot_use_mm_for_euclid_dist").min(1)
        is_near = bool((distances <= self.limit(wrong) * rows.size(1) ** 0.5).all())
        return nearest.tolist() if is_near else None

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
