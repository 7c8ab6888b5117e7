"""Faults of values: multiples, values of another time, other samples, labels or random numbers.

Each function returns the evidence for one class of faults, or None.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.doctor.evidence import FACTOR, LABELS, MICRO_BATCHES, RANDOM, SCALED, STALE, Case, Explanation
from shardwise.doctor.findings import Judged
from shardwise.doctor.places import Key
from shardwise.doctor.sketches import added, alike

# The gradients of a row of logits add to zero within this share of their sizes.
_ZERO = 1e-2


def with_every_micro_batch(case: Case, wrong: Judged) -> Explanation | None:
    """Whether a gradient counts its micro-batches different numbers of times."""
    if wrong.key.what not in ("gradient", "accumulated") or not wrong.merged:
        return None
    accumulated = case.judge.reference.accumulated(wrong.key.name, wrong.key.step)
    sums = [alike([entries[0].sketch, wrong.whole])[0].slice for entries in accumulated]
    target = wrong.merged[0].slice
    if len(sums) < 2 or target is None or any(each is None or each.shape != target.shape for each in sums):
        return None
    whole: list[Tensor] = [each for each in sums if each is not None]
    terms = [whole[0], *(after - before for before, after in itertools.pairwise(whole))]
    matrix = torch.stack([term.flatten() for term in terms], 1)
    factors = torch.linalg.lstsq(matrix, target.flatten().unsqueeze(1)).solution.flatten()
    rebuilt = (matrix @ factors).view(target.shape)
    rounded = [round(float(each)) for each in factors]
    near = max(abs(float(each) - number) for each, number in zip(factors, rounded, strict=True))
    if not case.agrees(wrong, target, rebuilt) or near > FACTOR or len(set(rounded)) < 2:
        return None
    return Explanation(
        MICRO_BATCHES,
        f"summed again with every micro-batch: their gradients count {', '.join(map(str, rounded))} times",
    )


def local_means(case: Case, wrong: Judged) -> Explanation | None:
    """Whether a sum over ranks is right if each rank's term is weighted with its number of labels."""
    counts = case.num_labels(wrong.key)
    shards = list(wrong.shards.values())
    equal = all(case.agrees_all(wrong, each, shards[0]) for each in shards)
    if len(counts) != len(shards) or len(set(counts.values())) == 1 or equal:
        return None
    for scale in (len(shards), 1):
        weights = [scale * count / sum(counts.values()) for count in counts.values()]
        total = added([each.scaled(weight) for each, weight in zip(shards, weights, strict=True)])
        if case.fits(wrong, [total]):
            numbers = " and ".join(map(str, counts.values()))
            return Explanation(LABELS, f"each rank divides by its own number of labels: {numbers}")
    return None


def factor(case: Case, wrong: Judged) -> Explanation | None:
    """Whether a tensor is a multiple of the reference's."""
    factors = []
    for merged in wrong.merged:
        one, other = merged.slice, wrong.whole.slice
        if one is None or other is None or not float(other.square().sum()):
            return None
        factor = float((one * other).sum() / other.square().sum())
        if not math.isfinite(factor) or not case.fits(wrong, [merged], wrong.whole.scaled(factor)):
            return None
        factors.append(factor)
    if not factors or max(factors) - min(factors) > FACTOR * abs(factors[0]):
        return None
    factor, is_loss = factors[0], case.is_loss(wrong)

    def is_it(number: float, limit: float) -> bool:
        if is_loss:
            return case.fits(wrong, wrong.merged, wrong.whole.scaled(number))
        return abs(factor / number - 1) <= limit

    causes = [(f"the size of {axis}", float(size)) for axis, size in case.axes.items() if size > 1]
    if case.num_micro_batches > 1:
        causes.append(("the number of micro-batches", float(case.num_micro_batches)))
    causes += [("2", 2.0)]
    for what, number in causes:
        for inverse in (False, True):
            if is_it(1 / number if inverse else number, FACTOR):
                kind = MICRO_BATCHES if "micro" in what else SCALED
                return Explanation(kind, f"it is the reference times {'1 / ' if inverse else ''}{what}")
    for counts in (case.num_labels(wrong.key), case.num_labels(dataclasses.replace(wrong.key, micro_batch=-1))):
        mean = sum(counts.values()) / max(len(counts), 1)
        for rank, count in counts.items():
            if any(is_it(of / count, FACTOR / 10) for of in (mean, sum(counts.values()))):
                return Explanation(LABELS, f"it is divided by the {count} labels of rank {rank} alone")
    return None if is_loss else Explanation(SCALED, f"it is the reference times {factor:.4g}")


def added_by_each(case: Case, wrong: Judged) -> Explanation | None:
    """Whether the difference is a multiple of one summand, such as a bias that every rank adds before a sum."""
    key, whole = wrong.key, wrong.whole.slice
    merged = [each.slice for each in wrong.merged]
    if key.what != "output" or not merged or whole is None or not wrong.whole.is_whole or not whole.dim():
        return None
    if wrong.summed_axes and not case.is_summed_after(wrong):
        return None
    reference = case.judge.reference
    inside = f"{key.name}." if key.name else ""
    summands = [each for each in reference.recorded if each.what == "used" and each.step == key.step]
    summands = [each for each in summands if each.name.startswith(inside)]
    own = next((call for call in reference.facts["calls"] if _is_call_of(call, key)), None)
    summands += [reference.recorded[number] for number in (own["inputs"] if own else ()) if number >= 0]
    summands += list(itertools.islice(case.before(key), 2))
    for summand in summands:
        values = case.reference_whole(summand)
        if values is None or values.shape not in (whole.shape, whole.shape[-1:]) or not float(values.square().sum()):
            continue
        values = values.expand(whole.shape)
        factors = []
        for here in merged:
            if here is None or here.shape != whole.shape:
                return None
            times = float(((here - whole) * values).sum() / values.square().sum())
            if case.agrees(wrong, here - whole, times * values) and min(abs(times), abs(times + 1)) > FACTOR:
                factors.append(1 + times)
        if len(factors) == len(merged) and max(factors) - min(factors) <= FACTOR:
            name = summand.name or "the model"
            what = name if summand.what == "used" else f"the {summand.what} of {name}"
            return Explanation(SCALED, f"{what} is added {factors[0]:.4g} times")
    return None


def _is_call_of(call: dict[str, Any], key: Key) -> bool:
    return all(call[name] == getattr(key, name) for name in ("name", "step", "micro_batch", "call"))


def stale(case: Case, wrong: Judged) -> Explanation | None:
    """Whether the wrong elements have the values of a micro-batch or a step before."""
    key = wrong.key
    earlier = [(key.step, each) for each in range(key.micro_batch - 1, -1, -1)]
    if key.micro_batch <= 0 and key.step > 0:
        earlier.append((key.step - 1, key.micro_batch))
    if key.what == "updated" and key.step == 0:
        earlier.append((0, -2))
    for step, micro_batch in earlier:
        what = "used" if micro_batch == -2 else key.what
        before = dataclasses.replace(key, what=what, step=step, micro_batch=max(micro_batch, -1))
        entries = case.judge.reference.entries(before)
        if not entries:
            continue
        old, new, *merged = alike([entries[0].sketch, wrong.whole, *wrong.merged])
        if any("slice" not in each.views or each.shape != new.shape for each in (old, *merged)):
            continue
        for each in merged:
            here, then, now = each.views["slice"], old.views["slice"], new.views["slice"]
            limit = case.limit(wrong)
            is_old, is_new = ((here - each).abs() <= limit for each in (then, now))
            differs = is_old & ((then - now).abs() > 2 * limit)
            if float((is_old | is_new).float().mean()) > 0.99 and int(differs.sum()) > 0.5 * int((~is_new).sum()):
                when = "step" if step != key.step or micro_batch == -2 else "micro-batch"
                return Explanation(STALE, f"where it is wrong it has the values of the {when} before")
    return None


def stale_input(case: Case, wrong: Judged) -> Explanation | None:
    """Whether the gradient of a linear layer's weight comes from the inputs of other micro-batches."""
    key = wrong.key
    module, _, parameter = key.name.rpartition(".")
    target = wrong.merged[0].slice if wrong.merged else None
    if key.what != "gradient" or parameter != "weight" or target is None or target.dim() != 2:
        return None
    inputs, gradients = [], []
    for micro_batch in range(case.num_micro_batches):
        at = Key("", module, key.step, micro_batch)
        call = next((each for each in case.judge.reference.facts["calls"] if _is_call_of(each, at)), None)
        if call is None or not call["inputs"] or call["inputs"][0] < 0:
            return None
        of_input = case.judge.reference.recorded[call["inputs"][0]]
        of_gradient = Key("output gradient", module, key.step, micro_batch, 0, "")
        entries = [case.judge.reference.entries(each) for each in (of_input, of_gradient)]
        if not all(entries) or not all(each[0].sketch.is_whole for each in entries):
            return None
        pair = [each[0].sketch.doubled().views["slice"] for each in entries]
        inputs.append(pair[0])
        gradients.append(pair[1])
    size = max([*case.axes.values(), 1])
    for dim in range(inputs[0].dim() - 1):
        if inputs[0].size(dim) % size:
            continue
        # The gradient's terms: each part of the positions, with the input of each micro-batch.
        parts = [
            (first, second, part, own.flatten(0, -2).T @ other.flatten(0, -2))
            for first, gradient in enumerate(gradients)
            for second, input_ in enumerate(inputs)
            for part, (own, other) in enumerate(zip(gradient.chunk(size, dim), input_.chunk(size, dim), strict=True))
        ]
        if parts[0][3].shape != target.shape:
            return None
        matrix = torch.stack([term.flatten() for *_, term in parts], 1)
        factors = torch.linalg.lstsq(matrix, target.flatten().unsqueeze(1)).solution.flatten()
        crossed = [part for part, factor in zip(parts, factors, strict=True) if part[0] != part[1] and factor > 0.9]
        if crossed and case.agrees(wrong, (matrix @ factors).view(target.shape), target):
            first, second, *_ = crossed[0]
            return Explanation(STALE, f"micro-batch {first} used the input of micro-batch {second}")
    return None


def other_labels(case: Case, wrong: Judged) -> Explanation | None:
    """Whether other rows have no gradient: other labels are ignored."""
    if "gradient" not in wrong.key.what:
        return None
    for here, there in wrong.pairs():
        if here.dim() < 2:
            continue
        labels = [_labels_of(each) for each in (here, there)]
        if labels[0] is not None and labels[1] is not None:
            share = float((labels[0] != labels[1]).float().mean())
            if share > 0:
                return Explanation(LABELS, f"{share:.0%} of the rows have another label")
        one, other = (here == 0).all(-1), (there == 0).all(-1)
        share = float((one != other).float().mean())
        if share > 0 and bool(((here == 0) == one.unsqueeze(-1)).float().mean() > 0.9):
            return Explanation(LABELS, f"{share:.0%} of the rows have a gradient in one of the runs only")
    return None


def _labels_of(gradient: Tensor) -> Tensor | None:
    """Return the labels that a gradient of logits shows, the only negative number of each row; -1 for none."""
    is_negative = gradient < 0
    sums, sizes = gradient.sum(-1).abs(), gradient.abs().sum(-1)
    counts = is_negative.sum(-1)
    if gradient.size(-1) < 3 or not bool(((counts == 1) | (sizes == 0)).all()) or bool((sums > _ZERO * sizes).any()):
        return None
    return gradient.argmin(-1).masked_fill(counts == 0, -1)


def labels_of_loss(case: Case, wrong: Judged) -> Explanation | None:
    """Whether the gradient of what a loss is computed from shows other labels, or a division by other numbers."""
    if not case.is_loss(wrong):
        return None
    for key in itertools.islice(case.before(wrong.key), 3):
        gradient = case.judge.judge(dataclasses.replace(key, what=f"{key.what} gradient"))
        if gradient is None or not gradient.is_wrong:
            continue
        for fault in (local_means, factor, other_labels):
            found = fault(case, gradient)
            if found is not None and found.kind == LABELS:
                return Explanation(LABELS, f"in the gradient of {key.name or 'the model'}, {found.evidence}")
    return None


def random_stream(case: Case, wrong: Judged) -> Explanation | None:
    """Whether other elements are zero, as after dropout with other random numbers."""
    for here, there in wrong.pairs():
        other = ((here == 0) != (there == 0)).float().mean()
        zeros = (there == 0).float().mean()
        if float(other) > 0.02 and 0.01 < float(zeros) < 0.99:
            return Explanation(RANDOM, f"{float(other):.0%} of its elements are zero in one of the runs only")
    return None
