"""Judge recorded tensors: find how the ranks hold a tensor, and compare its difference with the expected rounding.

The expected rounding of a tensor is its difference between two sound runs that differ in rounding alone. Without such a
run it is estimated from the dtype and from the number of tensors before.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.core.sequence_view import runs_of_ranks
from shardwise.doctor.places import Key
from shardwise.doctor.recording import Entry, Recording
from shardwise.doctor.sketches import Sketch, added, alike, concatenated, distance, placed, rms

# A difference of at most so many times the expected rounding is rounding.
MOST_ROUNDING = 20.0

Kind = tuple[Any, ...]
"""How the ranks of an axis hold a tensor: copies ("I",), partial sums ("P",), shards ("V", dim), shards of each of so
many sections ("sections", dim, number), two runs of positions for each rank ("positions", dim), copies of fewer shards
than ranks, for neighbours or in turn ("repeated" or "in turn", dim, number of shards), which ("repeated sums" or "in
turn sums", ...) adds, or stated intervals ("placed", dim, intervals), which ("placed sums", ...) adds where they
overlap."""

RARE = 0.01
"""Share of a parameter's elements that may differ by whole updates.

In the first steps AdamW moves each element by about the learning rate, in the direction of the gradient's sign, which
rounding decides where the gradient is almost 0."""

# The pass that computes each kind of tensor; sums after single micro-batches only explain.
PASSES = {
    "input": "forward",
    "output": "forward",
    "used": "forward",
    "input gradient": "backward",
    "output gradient": "backward",
    "accumulated": "",
    "gradient": "backward",
    "updated": "update",
}


@dataclass
class Judged:
    """A tensor of the suspect against the reference's.

    ``layouts`` is empty if none gives the reference, ``stated`` has those that the model states, and ``merged`` several
    tensors if ranks hold copies. ``shards`` are by the ranks' places. ``ratio`` is difference over expected rounding;
    ``relative`` and ``expected`` are both relative to the reference. Something that is no fault excuses a difference.
    """

    key: Key
    number: int
    layouts: dict[str, Kind]
    stated: dict[str, Kind]
    ratio: float
    relative: float
    expected: float
    shards: dict[tuple[int, ...], Sketch] = field(repr=False)
    whole: Sketch = field(repr=False)
    merged: list[Sketch] = field(repr=False)
    is_excused: bool = False

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the recorded elements of each merged tensor, with those of the reference in the same shape."""
        there = self.whole.slice
        for each in self.merged:
            if each.slice is not None and there is not None and each.slice.shape == there.shape:
                yield each.slice, there

    @property
    def is_wrong(self) -> bool:
        """Whether the difference is more than rounding, and not excused."""
        return not self.is_excused and not self.ratio <= MOST_ROUNDING

    @property
    def summed_axes(self) -> list[str]:
        """Axes whose ranks hold partial sums."""
        return [axis for axis, kind in self.layouts.items() if kind == ("P",)]

    @property
    def partial_axes(self) -> list[str]:
        """Axes whose ranks hold partial sums, of the whole or of a shard, though the model does not state it."""
        sums = ("P", "repeated sums", "in turn sums")
        return [axis for axis, kind in self.layouts.items() if kind[0] in sums and self.stated.get(axis) != kind]


class Rounding:
    """Expected rounding of each tensor.

    Args:
        reference: the recording of the sound run.
        twin: one that differs from it in rounding alone; None if there is none. What it lacks is estimated.
        eps: relative rounding of one operation in the suspect's dtype.
    """

    def __init__(self, reference: Recording, twin: Recording | None, eps: float) -> None:
        self.is_measured = twin is not None
        self._eps = eps
        self._measured: dict[Key, dict[str, float]] = {}
        self._usual: dict[tuple[str, int], float] = {}
        relative: dict[tuple[str, int], list[float]] = {}
        for number, key in enumerate(reference.recorded):
            (first, *_) = reference.entries(key).values()
            group = PASSES[key.what], key.step
            other = {} if twin is None else twin.entries(key)
            one, two = alike([first.sketch, (other[min(other)] if other else first).sketch])
            if not other or one.shape != two.shape:
                # Errors add up like a random walk, and gradients pass all tensors twice.
                self._measured[key] = {
                    name: 4 * eps * value * math.sqrt(1 + number) for name, value in rms(one).items()
                }
                continue
            self._measured[key], of_elements = apart(key, one, two), rms(one).get("slice", 0.0)
            if of_elements > 0 and key.what != "used":
                relative.setdefault(group, []).append(self._measured[key].get("slice", 0.0) / of_elements)
        self._usual = {group: statistics.median(values) for group, values in relative.items()}

    def of(self, key: Key, whole: Sketch) -> dict[str, float]:
        """Return the expected root mean square of the difference of each view of the reference's tensor."""
        size = rms(whole)
        measured = self._measured.get(key, {})
        usual = self._usual.get((PASSES[key.what], key.step), 0.0)
        # Without a slice, sums tell what their elements' errors are.
        of_sums = [value / math.sqrt(whole.count(name)) for name, value in measured.items() if name != "slice"]
        single = measured["slice"] if "slice" in measured else max(of_sums, default=0.0)
        single = max(single, 0.25 * usual * size.get("slice", 0.0))
        found = {}
        for name, value in size.items():
            # Sums may agree by chance; their errors are at least those of a random walk.
            walk = single * math.sqrt(whole.count(name))
            found[name] = max(measured.get(name, 0.0), walk, 0.5 * self._eps * value, 1e-300)
        return found


class Judge:
    """Compares a suspect with a reference, tensor by tensor."""

    def __init__(
        self,
        reference: Recording,
        suspect: Recording,
        rounding: Rounding,
        micro_batches: Mapping[tuple[int, int], Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        self.reference, self.suspect, self.rounding = reference, suspect, rounding
        self._micro_batches = micro_batches

    def all(self) -> Iterator[Judged]:
        """Judge all tensors that both recorded, in the order of the reference."""
        for number, key in enumerate(self.reference.recorded):
            other = None if PASSES[key.what] else self._instead_of_gradient(key)
            if (PASSES[key.what] or other) and (judged := self.judge(key, number, other=other)) is not None:
                yield judged

    def _instead_of_gradient(self, key: Key) -> Key | None:
        """Return the suspect's sum after all backwards of a step if the gradient of this parameter is not recorded."""
        gradient = Key("gradient", key.name, key.step)
        if self.reference.entries(gradient) and self.suspect.entries(gradient):
            return None
        one, two = (len(each.accumulated(key.name, key.step)) for each in (self.reference, self.suspect))
        return dataclasses.replace(key, micro_batch=two - 1) if two and key.micro_batch == one - 1 else None

    def judge(
        self, key: Key, number: int = 0, *, other: Key | None = None, order: Mapping[str, Sequence[Any]] | None = None
    ) -> Judged | None:
        """Judge one tensor, which the suspect may have under another key; None if one of the recordings lacks it.

        ``order`` is for an axis the kind that is known from other tensors.
        """
        entries = self._compared_entries(other or key)
        if not entries:
            return None
        originals = self.reference.entries(key)
        if self.reference.world_size > 1:
            return self._side_by_side(key, number, originals, entries)
        stated = dict(order or next(iter(entries.values())).layouts)
        sketches = {rank: entry.sketch for rank, entry in entries.items()}
        whole, axes, shards = self._aligned(originals[0].sketch, sketches)
        expected = self.rounding.of(key, whole)
        best = self._best(key, axes, stated, whole, shards, expected)
        if best is None and len(whole.shape) > 2:
            # A module may return [batch, sequence, ...] in one layout and [sequence, batch, ...] in another.
            turned = {rank: sketch.transposed() for rank, sketch in sketches.items()}
            of_turned = self._aligned(originals[0].sketch, turned)
            if (best := self._best(key, axes, {}, of_turned[0], of_turned[2], expected)) is not None:
                whole, _, shards = of_turned
        size = rms(whole)
        name = max(size, key=lambda each: (each == "slice", each)) if size else "slice"
        scale = size.get(name, 0.0) or 1e-300
        if best is None:
            return Judged(key, number, {}, {}, math.inf, math.inf, expected.get(name, 0) / scale, shards, whole, [])
        ratio, kinds, merged = best
        relative = max(distance(each, whole).get(name, 0.0) for each in merged) / scale
        told = {axis: kind for axis in kinds if (kind := kind_of(stated.get(axis))) is not None}
        expected_relative = expected.get(name, 0.0) / scale
        return Judged(key, number, kinds, told, ratio, relative, expected_relative, shards, whole, merged)

    def _best(
        self,
        key: Key,
        axes: Mapping[str, int],
        stated: Mapping[str, Sequence[Any]],
        whole: Sketch,
        shards: Mapping[tuple[int, ...], Sketch],
        expected: Mapping[str, float],
    ) -> tuple[float, dict[str, Kind], list[Sketch]] | None:
        """Return the layout with the smallest ratio; the first within rounding; None if no layout has the shape."""
        best: tuple[float, dict[str, Kind], list[Sketch]] | None = None
        for kinds in _candidates(axes, stated, len(whole.shape)):
            if _adds_copies(shards, list(axes), kinds, stated):
                continue
            merged = merge(shards, list(axes), kinds)
            if not merged or any(each.shape != whole.shape for each in merged):
                continue
            ratio = max(self.ratio(key, each, whole, expected) for each in merged)
            if best is None or ratio < best[0]:
                best = ratio, kinds, merged
            if ratio <= MOST_ROUNDING:
                break
        return best

    def ratio(self, key: Key, one: Sketch, other: Sketch, expected: Mapping[str, float]) -> float:
        """Return the largest ratio of the difference of a view and its expected rounding."""
        found = apart(key, one, other)
        return max((value / expected[name] for name, value in found.items() if name in expected), default=math.inf)

    def _compared_entries(self, key: Key) -> dict[int, Entry]:
        if self._micro_batches is None or key.micro_batch < 0 or key.what == "accumulated":
            return self.suspect.entries(key)
        found = {}
        for rank, micro_batch in self._micro_batches.get((key.step, key.micro_batch), ()):
            moved = Key(key.what, key.name, key.step, micro_batch, key.call, key.leaf)
            entry = self.suspect.entries(moved).get(rank)
            if entry is not None:
                found[rank] = entry
        return found

    def _aligned(
        self, whole: Sketch, sketches: Mapping[int, Sketch]
    ) -> tuple[Sketch, dict[str, int], dict[tuple[int, ...], Sketch]]:
        """Return the reference's sketch, the axes along which the ranks differ, and the ranks' sketches by place."""
        whole, *others = alike([whole, *sketches.values()])
        sketches = dict(zip(sketches, others, strict=True))
        places = {rank: self.suspect.places[rank] for rank in sketches}
        # Places may not begin at 0: the ranks of one stage.
        order = {axis: sorted({place[axis] for place in places.values()}) for axis in self.suspect.axes}
        order = {axis: found for axis, found in order.items() if len(found) > 1}
        shards = {
            tuple(found.index(places[rank][axis]) for axis, found in order.items()): sketch
            for rank, sketch in sketches.items()
        }
        return whole, {axis: len(found) for axis, found in order.items()}, shards

    def _side_by_side(
        self, key: Key, number: int, originals: Mapping[int, Entry], entries: Mapping[int, Entry]
    ) -> Judged | None:
        worst: Judged | None = None
        for rank in originals.keys() & entries.keys():
            whole, sketch = alike([originals[rank].sketch, entries[rank].sketch])
            expected = self.rounding.of(key, whole)
            same = whole.shape == sketch.shape
            ratio = self.ratio(key, sketch, whole, expected) if same else math.inf
            scale = rms(whole).get("slice", 0.0) or 1e-300
            relative = distance(sketch, whole).get("slice", 0.0) / scale if same else math.inf
            shards: dict[tuple[int, ...], Sketch] = {(rank,): sketch}
            found = Judged(
                key, number, {}, {}, ratio, relative, expected.get("slice", 0.0) / scale, shards, whole, [sketch]
            )
            if worst is None or not found.ratio <= worst.ratio:
                worst = found
        return worst


def apart(key: Key, one: Sketch, other: Sketch) -> dict[str, float]:
    """Return the root mean square of the difference of each view, without rare elements of parameters."""
    return distance(one, other, left_out=RARE if key.what in ("used", "updated") else 0.0)


def kind_of(stated: Sequence[Any] | None) -> Kind | None:
    """Return the kind that a recording states for an axis; the values of ``R`` are those of ``I``."""
    if not stated:
        return None
    letter, *rest = stated
    return ("I",) if letter == "R" else (letter, *rest)


def _candidates(axes: Mapping[str, int], stated: Mapping[str, Sequence[Any]], ndim: int) -> Iterator[dict[str, Kind]]:
    own = {axis: kind_of(stated.get(axis)) for axis in axes}
    own = {
        axis: (kind[0], kind[1] % max(ndim, 1), *kind[2:]) if kind is not None and len(kind) > 1 else kind
        for axis, kind in own.items()
    }
    options = [[kind] if kind is not None else kinds_of(ndim, axis, axes[axis]) for axis, kind in own.items()]
    yield from (dict(zip(axes, kinds, strict=True)) for kinds in itertools.product(*options))


def kinds_of(ndim: int, axis: str, size: int) -> list[Kind]:
    """Return all kinds on an axis of ``size`` ranks that need no statement of the model, the simplest first."""
    found: list[Kind] = [("I",), *(("V", dim) for dim in range(ndim)), ("P",)]
    if axis == "cp":
        found += [("positions", dim) for dim in range(ndim)]
    # Joint weights, such as gate and up, or query, key and value, are often split section by section.
    found += [("sections", dim, number) for dim in range(ndim) for number in (2, 3)]
    # Ranks hold copies of key-value heads if these are fewer.
    names = ("repeated", "in turn", "repeated sums", "in turn sums")
    return found + [(name, dim, shards) for name in names for dim in range(ndim) for shards in range(2, size)]


def shown_kind(kind: Kind) -> str:
    """Return in words how the ranks of an axis hold a tensor."""
    words = {"I": "copies", "P": "partial sums", "placed": "shards by intervals", "placed sums": "shards by intervals"}
    if kind[0] in words:
        return words[kind[0]] + (f" of dimension {kind[1]}" if len(kind) > 1 else "")
    more = {"sections": f", in {kind[-1]} sections", "positions": ", in two runs for each rank"}
    if kind[0] in ("repeated", "in turn", "repeated sums", "in turn sums"):
        return f"{'partial sums' if 'sums' in kind[0] else 'copies'} of {kind[2]} shards of dimension {kind[1]}"
    return f"shards of dimension {kind[1]}" + more.get(kind[0], "")


def shown_layouts(layouts: Mapping[str, Kind]) -> str:
    """Return in words how the ranks hold a tensor."""
    return ", ".join(f"{axis}: {shown_kind(kind)}" for axis, kind in layouts.items()) or "one tensor"


def _adds_copies(
    shards: Mapping[tuple[int, ...], Sketch],
    axes: Sequence[str],
    kinds: Mapping[str, Kind],
    stated: Mapping[str, Sequence[Any]],
) -> bool:
    """Whether equal tensors would be added: averages, which are no partial sums."""
    for at, axis in enumerate(axes):
        if kinds[axis] != ("P",) or kind_of(stated.get(axis)) == ("P",):
            continue
        groups: dict[tuple[int, ...], list[Sketch]] = {}
        for place, sketch in shards.items():
            groups.setdefault((*place[:at], *place[at + 1 :]), []).append(sketch)
        if all(_are_equal(group) for group in groups.values()):
            return True
    return False


def _are_equal(group: Sequence[Sketch]) -> bool:
    first = group[0]
    return all(each.shape == first.shape and not any(distance(each, first).values()) for each in group[1:])


def merge(shards: Mapping[tuple[int, ...], Sketch], axes: Sequence[str], kinds: Mapping[str, Kind]) -> list[Sketch]:
    """Merge the ranks' tensors, the last axis first; copies give several results, shapes that do not fit none."""
    if not axes:
        return [shards[()]]
    kind, groups = kinds[axes[-1]], dict[tuple[int, ...], list[Sketch]]()
    for place in sorted(shards):
        groups.setdefault(place[:-1], []).append(shards[place])
    merged = {place: _merged(group, kind) for place, group in groups.items()}
    number = max(map(len, merged.values())) if all(merged.values()) else 0
    results: list[Sketch] = []
    for copy in range(number):
        chosen = {place: each[min(copy, len(each) - 1)] for place, each in merged.items()}
        results += merge(chosen, axes[:-1], kinds)
    return results


def _merged(group: Sequence[Sketch], kind: Kind) -> list[Sketch]:
    if kind[0] == "I":
        return list(group)
    if len({len(sketch.shape) for sketch in group}) > 1:
        return []
    dim = None if kind[0] == "P" else kind[1]
    shapes = [sketch.shape for sketch in group]
    if any(len({shape[other] for shape in shapes}) > 1 for other in range(len(shapes[0])) if other != dim):
        return []
    if kind[0] == "P":
        return [added(group)]
    sizes = [shape[kind[1]] for shape in shapes]
    intervals: Sequence[Sequence[Sequence[int]]]
    if kind[0] == "V":
        return [concatenated(group, kind[1])]
    if kind[0] == "sections":
        if len(set(sizes)) > 1 or sizes[0] % kind[2]:
            return []
        length, whole = sizes[0] // kind[2], sum(sizes) // kind[2]
        starts = [[section * whole + rank * length for section in range(kind[2])] for rank in range(len(group))]
        intervals = [[[start, start + length] for start in each] for each in starts]
    elif kind[0] in ("repeated", "in turn", "repeated sums", "in turn sums"):
        intervals = _repeated(sizes, kind[2], is_in_turn=kind[0].startswith("in turn"))
        # Equal terms are averages, which are no partial sums.
        if not intervals or (kind[0].endswith("sums") and _are_equal_where_shared(group, intervals)):
            return []
    else:
        intervals = runs_of_ranks(sum(sizes), len(group)) if kind[0] == "positions" else kind[2][: len(group)]
        if sizes != [sum(stop - start for start, stop in own) for own in intervals]:
            return []
    return placed(group, kind[1], intervals, sums=kind[0].endswith("sums"))


def _repeated(sizes: Sequence[int], shards: int, *, is_in_turn: bool) -> list[list[list[int]]]:
    """Return each rank's interval if the ranks hold fewer shards than they are; none if the sizes do not fit.

    A rank has all shards that its part of the whole touches, or the shard of its number, counted in turn.
    """
    number = len(sizes)
    if is_in_turn:
        touched = [(rank % shards, rank % shards + 1) for rank in range(number)]
    else:
        touched = [(rank * shards // number, -(-(rank + 1) * shards // number)) for rank in range(number)]
    length = sizes[0] // (touched[0][1] - touched[0][0])
    intervals = [[[first * length, last * length]] for first, last in touched]
    fits = length > 0 and all(own[0][1] - own[0][0] == size for own, size in zip(intervals, sizes, strict=True))
    return intervals if fits and number > shards else []


def _are_equal_where_shared(group: Sequence[Sketch], intervals: Sequence[Sequence[Sequence[int]]]) -> bool:
    shared: dict[tuple[int, ...], list[Sketch]] = {}
    for sketch, (own,) in zip(group, intervals, strict=True):
        shared.setdefault(tuple(own), []).append(sketch)
    several = [each for each in shared.values() if len(each) > 1]
    return bool(several) and all(map(_are_equal, several))


def eps_of(recording: Recording) -> float:
    """Return the relative rounding of the dtype in which most of a recording's activations are."""
    dtypes = [key["dtype"] for key in recording.facts["tensors"] if key["what"] in ("input", "output")]
    dtype = statistics.mode(dtypes) if dtypes else "float32"
    return float(torch.finfo(getattr(torch, dtype)).eps)
