"""Explain a wrong tensor: which known fault turns the reference's values into the suspect's.

Each function tries one class of faults on the recorded values, and returns the evidence as text, or None.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.run.doctor.judging import Judge, Judged, Kind, merge
from shardwise.run.doctor.places import Key
from shardwise.run.doctor.sketches import Sketch, added, alike

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
_FACTOR = 2e-2
_MOST_SHARDS = 4


@dataclass(frozen=True)
class Explanation:
    """Class of a fault, and the evidence.

    Attributes:
        kind: one of the constants of this file.
        evidence: a sentence with the values that show it.
    """

    kind: str
    evidence: str


class Explainer:
    """Explains wrong tensors of a suspect.

    Args:
        judge: compares tensors with the reference.
        axes: sizes of the suspect's axes.
        num_micro_batches: number of micro-batches of a step on each rank.
    """

    def __init__(self, judge: Judge, axes: dict[str, int], num_micro_batches: int) -> None:
        self._judge, self._axes, self._num_micro_batches = judge, axes, num_micro_batches

    def explain(self, wrong: Judged) -> Explanation:
        """Return the first explanation that turns the reference into the suspect's values within rounding."""
        tries: Sequence[Callable[[Judged], Explanation | None]] = (
            self._restarted,
            self._other_layout,
            self._misplaced,
            self._one_copy,
            self._one_term,
            self._with_every_micro_batch,
            self._local_means,
            self._factor,
            self._stale,
            self._stale_input,
            self._wrong_group,
            self._but_bias,
            self._other_rows,
            self._other_labels,
            self._random_stream,
            self._positions,
            self._drifted,
        )
        for attempt in tries:
            if (found := attempt(wrong)) is not None:
                return found
        return Explanation(UNEXPLAINED, f"it differs by {wrong.relative:.1e} relative to the reference")

    def is_multiple(self, judged: Judged, factor: float) -> bool:
        """Whether a tensor is the reference's times a factor, within rounding."""
        whole = judged.whole.scaled(factor)
        expected = self._judge.rounding.of(judged.key, whole, merged=True)
        return bool(judged.merged) and all(
            each.shape == whole.shape and self._judge.ratio(each, whole, expected) <= 2 * factor * _LIMIT
            for each in judged.merged
        )

    def _fits(self, wrong: Judged, merged: Sequence[Sketch], whole: Sketch | None = None) -> bool:
        whole = wrong.whole if whole is None else whole
        if not merged or any(each.shape != whole.shape for each in merged):
            return False
        expected = self._judge.rounding.of(wrong.key, whole, merged=True)
        return max(self._judge.ratio(each, whole, expected) for each in merged) <= min(_LIMIT, wrong.ratio / 4)

    def _layouts(self, wrong: Judged) -> Iterator[tuple[dict[str, Kind], list[Sketch]]]:
        axes = self._axes_of(wrong)
        ndim = len(wrong.whole.shape)
        kinds: list[Kind] = [("P",), ("I",), *(("V", dim) for dim in range(ndim))]
        kinds += [("sections", dim, number) for dim in range(ndim) for number in (2, 3)]
        stated = [kind for kind in wrong.layouts.values() if kind[0].startswith("placed")]
        # Copies may be partial sums instead.
        stated += [("placed sums", *kind[1:]) for kind in stated if kind[0] == "placed"]
        for chosen in itertools.product(kinds + stated, repeat=len(axes)):
            layouts = dict(zip(axes, chosen, strict=True))
            if any(
                kind[0].startswith("placed") and wrong.layouts.get(axis, ())[1:] != kind[1:]
                for axis, kind in layouts.items()
            ):
                continue
            yield layouts, merge(wrong.shards, axes, layouts)

    def _axes_of(self, wrong: Judged) -> list[str]:
        places = list(wrong.shards)
        number = len(places[0]) if places else 0
        if wrong.layouts:
            return list(wrong.layouts)
        sizes = [1 + max(place[axis] for place in places) for axis in range(number)]
        names = [axis for axis, size in self._axes.items() if size > 1]
        return [name for name, size in zip(names, sizes, strict=False) if size > 1][:number]

    def _other_layout(self, wrong: Judged) -> Explanation | None:
        for layouts, merged in self._layouts(wrong):
            if layouts == wrong.layouts or not self._fits(wrong, merged):
                continue
            partial = [axis for axis, kind in layouts.items() if kind[0] in ("P", "placed sums")]
            if partial and all(
                self._agrees_all(wrong, each, next(iter(wrong.shards.values()))) for each in wrong.shards.values()
            ):
                # Averages.
                continue
            if partial:
                ranks = " and ".join(f"{axis} (ranks 0 to {self._axes.get(axis, 2) - 1})" for axis in partial)
                return Explanation(NEVER_SUMMED, f"the sum over {ranks} is the reference, and each rank has its term")
            return Explanation(MISPLACED, f"the ranks hold it as {_shown(layouts)}, not as {_shown(wrong.layouts)}")
        return None

    def _misplaced(self, wrong: Judged) -> Explanation | None:
        axes = self._axes_of(wrong)
        for layouts, _ in self._layouts(wrong):
            for at, axis in enumerate(axes):
                size = self._axes.get(axis, 0)
                if layouts[axis][0] not in ("V", "placed", "sections") or not 1 < size <= _MOST_SHARDS:
                    continue
                for order in itertools.permutations(range(size)):
                    moved = {
                        (*place[:at], order[place[at]], *place[at + 1 :]): each for place, each in wrong.shards.items()
                    }
                    if list(order) != sorted(order) and self._fits(wrong, merge(moved, axes, layouts)):
                        return Explanation(MISPLACED, f"the shards over {axis} are in the order {list(order)}")
        for merged in wrong.merged:
            if "slice" not in merged.views or "slice" not in wrong.whole.views:
                continue
            one, other = merged.views["slice"], wrong.whole.views["slice"]
            for dim in range(one.dim()):
                for offset in (1, -1, 2, -2, one.size(dim) // 2, -(one.size(dim) // 2)):
                    if not 0 < abs(offset) < one.size(dim):
                        continue
                    length = one.size(dim) - abs(offset)
                    here = one.narrow(dim, max(offset, 0), length)
                    there = other.narrow(dim, max(-offset, 0), length)
                    if self._agrees(wrong, here, there) and not _is_constant(there, dim):
                        return Explanation(MISPLACED, f"its rows along dimension {dim} are offset by {offset}")
        return None

    def _one_copy(self, wrong: Judged) -> Explanation | None:
        shards = list(wrong.shards.values())
        if len(shards) < 2 or any(each.shape != shards[0].shape for each in shards):
            return None
        alike_ = all(self._agrees_all(wrong, each, shards[0]) for each in shards[1:])
        if not alike_:
            return None
        for axis, kind in wrong.layouts.items():
            size, whole = self._axes.get(axis, 1), wrong.whole
            dim = kind[1] if kind[0] in ("V", "placed", "sections") else None
            if dim is None or "slice" not in whole.views or whole.shape[dim] % size:
                continue
            for rank, part in enumerate(whole.views["slice"].chunk(size, dim)):
                here = shards[0].views.get("slice")
                if here is not None and here.shape == part.shape and self._agrees(wrong, here, part):
                    return Explanation(ONE_COPY, f"every rank of {axis} has the shard of rank {rank}")
        return None

    def _restarted(self, wrong: Judged) -> Explanation | None:
        """Whether each rank has the first rank's part of something that depends on the position alone."""
        key, shards = wrong.key, list(wrong.shards.values())
        other = self._reference(dataclasses.replace(key, micro_batch=1 - key.micro_batch), wrong.whole)
        size = len(shards)
        if key.what not in ("input", "output") or other is None or size < 2:
            return None
        whole = wrong.whole.views.get("slice")
        if whole is None or whole.shape != other.shape or not bool((whole == other).all()):
            return None
        for dim in range(whole.dim()):
            if whole.size(dim) % size or whole.size(dim) == size == 1:
                continue
            first = whole.chunk(size, dim)[0]
            repeated = torch.cat([first] * size, dim)
            heres = [each.views.get("slice") for each in (*shards, *wrong.merged)]
            if _is_constant(whole, dim):
                continue
            for here in heres:
                if here is not None and here.shape == repeated.shape and self._agrees(wrong, here, repeated):
                    return Explanation(POSITIONS, f"positions along dimension {dim} restart on each of {size} ranks")
            if all(
                here is not None and here.shape == first.shape and self._agrees(wrong, here, first)
                for here in heres[:size]
            ):
                return Explanation(POSITIONS, f"positions along dimension {dim} restart on each of {size} ranks")
        return None

    def _reference(self, key: Key, like: Sketch) -> Tensor | None:
        """Return a tensor of the reference in the form of another, if its elements are recorded."""
        entries = self._judge.reference.entries(key)
        return alike([entries[0].sketch, like])[0].views.get("slice") if entries else None

    def _one_term(self, wrong: Judged) -> Explanation | None:
        """Whether a gradient is the term of one rank, of those that the ranks had before they were summed."""
        key = wrong.key
        if key.what != "gradient" or not wrong.merged:
            return None
        found: dict[int, Sketch] = {}
        for micro_batch in itertools.count():
            entries = self._judge.suspect.entries(Key("accumulated", key.name, key.step, micro_batch))
            if not entries:
                break
            found = {rank: entry.sketch for rank, entry in entries.items()}
        for rank, sketch in found.items():
            term, *merged = alike([sketch, *wrong.merged])
            if all(self._agrees_all(wrong, each, term) for each in merged):
                if len(wrong.shards) == 1:
                    return Explanation(NEVER_SUMMED, f"it is the term of rank {rank}, the only rank that holds it")
                return Explanation(ONE_COPY, f"it is the term of rank {rank}, and the other ranks' terms are lost")
        return None

    def _wrong_group(self, wrong: Judged) -> Explanation | None:
        """Whether terms were summed over one axis instead of another: then other parts of the tensor are added."""
        axes, whole = self._axes_of(wrong), wrong.whole.views.get("slice")
        if whole is None:
            return None
        for micro_batch in range(self._judge.reference.num_micro_batches(wrong.key.step)):
            # The ranks of another group had other samples at the same time.
            other_samples = self._reference(dataclasses.replace(wrong.key, micro_batch=micro_batch), wrong.whole)
            if micro_batch == wrong.key.micro_batch or wrong.key.micro_batch < 0 or other_samples is None:
                continue
            if other_samples.shape == whole.shape and self._fits(
                wrong, wrong.merged, _with(wrong, whole + other_samples)
            ):
                return Explanation(
                    WRONG_GROUP, f"the samples of micro-batch {micro_batch} are added, which other ranks have"
                )
        if len(axes) != 2:
            return None
        for at, axis in enumerate(axes):
            size, other = self._axes[axis], axes[1 - at]
            # By the place on the other axis, what the ranks of this axis have.
            groups: dict[int, list[Sketch]] = {}
            for place, sketch in sorted(wrong.shards.items()):
                groups.setdefault(place[1 - at], []).append(sketch)
            if any(not self._agrees_all(wrong, each, group[0]) for group in groups.values() for each in group):
                continue
            firsts = [group[0].views.get("slice") for group in groups.values()]
            if any(each is None or each.shape != firsts[0].shape for each in firsts if firsts[0] is not None):
                continue
            total = torch.stack([each for each in firsts if each is not None]).sum(0)
            for dim in range(whole.dim()):
                if whole.size(dim) % size:
                    continue
                mixed = torch.stack(whole.chunk(size, dim)).sum(0)
                for found, what in ((total, f"instead of {other}"), (firsts[0], f"as well as {other}")):
                    if found is None or mixed.shape != found.shape:
                        continue
                    if self._agrees(wrong, found, mixed) or self._agrees(wrong, _centred(found), _centred(mixed)):
                        return Explanation(WRONG_GROUP, f"it was summed over {axis} {what}")
        return None

    def _but_bias(self, wrong: Judged) -> Explanation | None:
        """Whether the rows' differences from their mean are sums or multiples: a bias hides it."""
        whole = wrong.whole.views.get("slice")
        shards = [each.views.get("slice") for each in wrong.shards.values()]
        if whole is None or whole.dim() < 2 or any(each is None or each.shape != whole.shape for each in shards):
            return None
        own = [_centred(each) for each in shards if each is not None]
        centred = _centred(whole)
        if not self._agrees(wrong, own[0], own[-1]) and self._agrees(wrong, torch.stack(own).sum(0), centred):
            return Explanation(NEVER_SUMMED, "but for a bias, the sum over the ranks is the reference")
        factor = float((own[0] * centred).sum() / centred.square().sum()) if float(centred.square().sum()) else 0.0
        if abs(factor) > 1e-6 and abs(factor - 1) > _FACTOR and self._agrees(wrong, own[0], centred * factor):
            return Explanation(SCALED, f"but for a bias, it is the reference times {factor:.4g}")
        return None

    def _other_rows(self, wrong: Judged) -> Explanation | None:
        """Whether an embedding returns other rows of its table, or none where another rank has them."""
        key, whole = wrong.key, wrong.whole.views.get("slice")
        table = self._judge.reference.entries(Key("used", f"{key.name}.weight", key.step))
        if key.what != "output" or not table or not wrong.merged or whole is None:
            return None
        rows = table[0].sketch.doubled().views.get("slice")
        here = wrong.merged[0].views.get("slice")
        if (
            rows is None
            or rows.dim() != 2
            or here is None
            or here.shape != whole.shape
            or rows.size(-1) != whole.size(-1)
        ):
            return None
        one, other = here.flatten(0, -2)[:512], whole.flatten(0, -2)[:512]
        is_wrong = (one - other).abs().amax(1) > self._limit(wrong, whole)
        if bool((one[is_wrong] == 0).all()):
            share = float(is_wrong.float().mean())
            return Explanation(ONE_COPY, f"{share:.0%} of its rows are zero: those that other ranks hold")
        distances = torch.cdist(one[is_wrong], rows), torch.cdist(other[is_wrong], rows)
        offsets = distances[0].argmin(1) - distances[1].argmin(1)
        offset = int(offsets.mode().values)
        exact = distances[0].amin(1) <= 4 * self._limit(wrong, whole)
        if offset and float((exact & (offsets == offset)).float().mean()) > 0.5:
            return Explanation(MISPLACED, f"its rows are those of ids that are larger by {offset}")
        return None

    def _other_labels(self, wrong: Judged) -> Explanation | None:
        """Whether other rows have no gradient: other labels are ignored."""
        if "gradient" not in wrong.key.what:
            return None
        for merged in wrong.merged:
            here, there = merged.views.get("slice"), wrong.whole.views.get("slice")
            if here is None or there is None or here.shape != there.shape or here.dim() < 2:
                continue
            one, other = (here == 0).all(-1), (there == 0).all(-1)
            share = float((one != other).float().mean())
            if share > 0 and bool(((here == 0) == one.unsqueeze(-1)).float().mean() > 0.9):
                return Explanation(LABELS, f"{share:.0%} of the rows have a gradient in one of the runs only")
        return None

    def _stale_input(self, wrong: Judged) -> Explanation | None:
        """Whether the gradient of a linear layer's weight comes from the inputs of other micro-batches."""
        key = wrong.key
        module, _, parameter = key.name.rpartition(".")
        target = wrong.merged[0].views.get("slice") if wrong.merged else None
        if key.what != "gradient" or parameter != "weight" or target is None or target.dim() != 2:
            return None
        inputs, gradients = [], []
        for micro_batch in range(self._num_micro_batches):
            call = next(
                (
                    each
                    for each in self._judge.reference.facts["calls"]
                    if (each["name"], each["step"], each["micro_batch"]) == (module, key.step, micro_batch)
                ),
                None,
            )
            if call is None or not call["inputs"] or call["inputs"][0] < 0:
                return None
            of_input = self._judge.reference.recorded[call["inputs"][0]]
            of_gradient = Key("output gradient", module, key.step, micro_batch, 0, "")
            entries = [self._judge.reference.entries(each) for each in (of_input, of_gradient)]
            if not all(entries) or not all(each[0].sketch.is_whole for each in entries):
                return None
            pair = [each[0].sketch.doubled().views["slice"] for each in entries]
            inputs.append(pair[0])
            gradients.append(pair[1])
        size = max([*self._axes.values(), 1])
        for dim in range(inputs[0].dim() - 1):
            if inputs[0].size(dim) % size:
                continue
            # The gradient's terms: each part of the positions, with the input of each micro-batch.
            parts = [
                (first, second, part, own.flatten(0, -2).T @ other.flatten(0, -2))
                for first, gradient in enumerate(gradients)
                for second, input_ in enumerate(inputs)
                for part, (own, other) in enumerate(
                    zip(gradient.chunk(size, dim), input_.chunk(size, dim), strict=True)
                )
            ]
            if parts[0][3].shape != target.shape:
                return None
            matrix = torch.stack([term.flatten() for *_, term in parts], 1)
            factors = torch.linalg.lstsq(matrix, target.flatten().unsqueeze(1)).solution.flatten()
            crossed = [part for part, factor in zip(parts, factors, strict=True) if part[0] != part[1] and factor > 0.9]
            if crossed and self._agrees(wrong, (matrix @ factors).view(target.shape), target):
                first, second, *_ = crossed[0]
                return Explanation(STALE, f"micro-batch {first} used the input of micro-batch {second}")
        return None

    def _factor(self, wrong: Judged) -> Explanation | None:
        factors = []
        for merged in wrong.merged:
            one, other = merged.views.get("slice"), wrong.whole.views.get("slice")
            if one is None or other is None or not float(other.square().sum()):
                return None
            factor = float((one * other).sum() / other.square().sum())
            if not math.isfinite(factor) or not self._fits(wrong, [merged], wrong.whole.scaled(factor)):
                return None
            factors.append(factor)
        if not factors or max(factors) - min(factors) > _FACTOR * abs(factors[0]):
            return None
        factor = factors[0]
        causes = [(f"the size of {axis}", float(size)) for axis, size in self._axes.items() if size > 1]
        if self._num_micro_batches > 1:
            causes.append(("the number of micro-batches", float(self._num_micro_batches)))
        causes += [("2", 2.0)]
        for what, number in causes:
            for inverse in (False, True):
                if abs(factor / (1 / number if inverse else number) - 1) <= _FACTOR:
                    kind = MICRO_BATCHES if "micro" in what else SCALED
                    return Explanation(kind, f"it is the reference times {'1 / ' if inverse else ''}{what}")
        for counts in (self._num_labels(wrong.key), self._num_labels(dataclasses.replace(wrong.key, micro_batch=-1))):
            mean = sum(counts.values()) / max(len(counts), 1)
            for rank, count in counts.items():
                if any(abs(factor / (of / count) - 1) <= _FACTOR / 10 for of in (mean, sum(counts.values()))):
                    return Explanation(LABELS, f"it is divided by the {count} labels of rank {rank} alone")
        return Explanation(SCALED, f"it is the reference times {factor:.4g}")

    def _local_means(self, wrong: Judged) -> Explanation | None:
        """Whether a sum over ranks is right if each rank's term is weighted with its number of labels."""
        counts = self._num_labels(wrong.key)
        shards = list(wrong.shards.values())
        equal = all(self._agrees_all(wrong, each, shards[0]) for each in shards)
        if len(counts) != len(shards) or len(set(counts.values())) == 1 or equal:
            return None
        for scale in (len(shards), 1):
            weights = [scale * count / sum(counts.values()) for count in counts.values()]
            total = added([each.scaled(weight) for each, weight in zip(shards, weights, strict=True)])
            if self._fits(wrong, [total]):
                numbers = " and ".join(map(str, counts.values()))
                return Explanation(LABELS, f"each rank divides by its own number of labels: {numbers}")
        return None

    def _num_labels(self, key: Key) -> dict[int, int]:
        """Return the number of labels of each rank in a micro-batch, or in a step, if it was stated."""
        found: dict[int, int] = {}
        for rank, inputs in enumerate(self._judge.suspect.of_ranks("inputs")):
            for each in inputs:
                if each["step"] == key.step and key.micro_batch in (-1, each["micro_batch"]) and each["num_labels"]:
                    found[rank] = found.get(rank, 0) + each["num_labels"]
        return found

    def _with_every_micro_batch(self, wrong: Judged) -> Explanation | None:
        if wrong.key.what not in ("gradient", "accumulated") or not wrong.merged:
            return None
        sums = []
        for micro_batch in itertools.count():
            key = Key("accumulated", wrong.key.name, wrong.key.step, micro_batch)
            entries = self._judge.reference.entries(key)
            if not entries:
                break
            sums.append(alike([entries[0].sketch, wrong.whole])[0].views.get("slice"))
        target = wrong.merged[0].views.get("slice")
        if len(sums) < 2 or target is None or any(each is None or each.shape != target.shape for each in sums):
            return None
        whole: list[Tensor] = [each for each in sums if each is not None]
        terms = [whole[0], *(after - before for before, after in itertools.pairwise(whole))]
        matrix = torch.stack([term.flatten() for term in terms], 1)
        factors = torch.linalg.lstsq(matrix, target.flatten().unsqueeze(1)).solution.flatten()
        rebuilt = (matrix @ factors).view(target.shape)
        rounded = [round(float(each)) for each in factors]
        near = max(abs(float(each) - number) for each, number in zip(factors, rounded, strict=True))
        if not self._agrees(wrong, target, rebuilt) or near > _FACTOR or len(set(rounded)) < 2:
            return None
        return Explanation(
            MICRO_BATCHES,
            f"summed again with every micro-batch: their gradients count {', '.join(map(str, rounded))} times",
        )

    def _stale(self, wrong: Judged) -> Explanation | None:
        key = wrong.key
        earlier = [(key.step, each) for each in range(key.micro_batch - 1, -1, -1)]
        if key.micro_batch <= 0 and key.step > 0:
            earlier.append((key.step - 1, key.micro_batch))
        if key.what == "updated" and key.step == 0:
            earlier.append((0, -2))
        for step, micro_batch in earlier:
            before = Key(
                "used" if micro_batch == -2 else key.what, key.name, step, max(micro_batch, -1), key.call, key.leaf
            )
            entries = self._judge.reference.entries(before)
            if not entries:
                continue
            old, new, *merged = alike([entries[0].sketch, wrong.whole, *wrong.merged])
            if any("slice" not in each.views or each.shape != new.shape for each in (old, *merged)):
                continue
            for each in merged:
                here, then, now = each.views["slice"], old.views["slice"], new.views["slice"]
                limit = self._limit(wrong, now)
                is_old = (here - then).abs() <= limit
                is_new = (here - now).abs() <= limit
                differs = (then - now).abs() > 2 * limit
                explained = (is_old | is_new).float().mean()
                if float(explained) > 0.99 and float((is_old & differs).float().sum()) > 0.5 * float(
                    (~is_new).float().sum()
                ):
                    when = "step" if step != key.step or micro_batch == -2 else "micro-batch"
                    return Explanation(STALE, f"where it is wrong it has the values of the {when} before")
        return None

    def _random_stream(self, wrong: Judged) -> Explanation | None:
        for merged in wrong.merged:
            here, there = merged.views.get("slice"), wrong.whole.views.get("slice")
            if here is None or there is None or here.shape != there.shape:
                continue
            other = ((here == 0) != (there == 0)).float().mean()
            zeros = (there == 0).float().mean()
            if float(other) > 0.02 and 0.01 < float(zeros) < 0.99:
                return Explanation(RANDOM, f"{float(other):.0%} of its elements are zero in one of the runs only")
        return None

    def _positions(self, wrong: Judged) -> Explanation | None:
        """Whether all is right up to the first rank's part of a dimension, and wrong behind it."""
        if wrong.key.micro_batch < 0:
            return None
        sizes = [size for size in self._axes.values() if size > 1]
        for merged in wrong.merged:
            here, there = merged.views.get("slice"), wrong.whole.views.get("slice")
            if here is None or there is None or here.shape != there.shape:
                continue
            limit = self._limit(wrong, there)
            for dim, size in itertools.product(range(here.dim()), sizes):
                length = here.size(dim)
                if length < 2 * size:
                    continue
                others = [other for other in range(here.dim()) if other != dim]
                is_wrong = (
                    ((here - there).abs() > limit).any(dim=others[0])
                    if len(others) == 1
                    else _any((here - there).abs() > limit, others)
                )
                first = -(-length // size)
                if not bool(is_wrong[:first].any()) and float(is_wrong[first:].float().mean()) > 0.5:
                    return Explanation(
                        POSITIONS,
                        f"its first {first} of {length} rows along dimension {dim} are right, and later ones wrong",
                    )
        return None

    def _drifted(self, wrong: Judged) -> Explanation | None:
        shards = list(wrong.shards.values())
        if len(shards) < 2 or any(each.shape != wrong.whole.shape for each in shards):
            return None
        apart = [number for number, each in enumerate(shards) if not self._agrees_all(wrong, each, shards[0])]
        if apart:
            return Explanation(DRIFTED, f"copies differ: ranks {apart} have other values than rank 0")
        return None

    def _limit(self, wrong: Judged, whole: Tensor) -> float:
        expected = self._judge.rounding.of(wrong.key, wrong.whole, merged=True).get("slice", 0.0)
        # Single elements are further away than the root mean square.
        return 4 * _LIMIT * expected

    def _agrees(self, wrong: Judged, one: Tensor, other: Tensor) -> bool:
        expected = self._judge.rounding.of(wrong.key, wrong.whole, merged=True).get("slice", 0.0)
        return float((one - other).square().mean().sqrt()) <= _LIMIT * expected

    def _agrees_all(self, wrong: Judged, one: Sketch, other: Sketch) -> bool:
        expected = self._judge.rounding.of(wrong.key, wrong.whole, merged=True)
        return one.shape == other.shape and self._judge.ratio(one, other, expected) <= _LIMIT


_LIMIT = 20.0


def _any(mask: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in sorted(dims, reverse=True):
        mask = mask.any(dim=dim)
    return mask


def _with(wrong: Judged, values: Tensor) -> Sketch:
    whole = wrong.whole
    return Sketch(whole.shape, whole.dtype, whole.strides, {"slice": values})


def _centred(values: Tensor) -> Tensor:
    """Return the rows less their mean."""
    return values - values.mean(dim=tuple(range(values.dim() - 1)), keepdim=True)


def _is_constant(values: Tensor, dim: int) -> bool:
    return bool((values == values.narrow(dim, 0, 1)).all())


def _shown(layouts: dict[str, Kind]) -> str:
    words = {"I": "copies", "P": "partial sums", "placed": "stated parts"}
    return (
        ", ".join(f"{axis}: {words.get(kind[0], f'shards of dimension {kind[-1]}')}" for axis, kind in layouts.items())
        or "one tensor"
    )
