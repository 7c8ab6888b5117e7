"""Faults of the ranks' parts of a tensor: not summed, in another place, of another rank.

Each function returns the evidence for one class of faults, or None.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from shardwise.run.doctor.evidence import (
    DRIFTED,
    FACTOR,
    MISPLACED,
    NEVER_SUMMED,
    ONE_COPY,
    POSITIONS,
    SCALED,
    WRONG_GROUP,
    Case,
    Explanation,
    are_constant,
    centred,
)
from shardwise.run.doctor.judging import Judged, merge, shown_layouts
from shardwise.run.doctor.places import Key
from shardwise.run.doctor.sketches import Sketch, alike

_MOST_SHARDS = 4


def restarted(case: Case, wrong: Judged) -> Explanation | None:
    """Whether each rank has the first rank's part of something that depends on the position alone."""
    key, shards = wrong.key, list(wrong.shards.values())
    other = case.reference(dataclasses.replace(key, micro_batch=1 - key.micro_batch), wrong.whole)
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
        if are_constant(whole, dim):
            continue
        for here in heres:
            if here is not None and here.shape == repeated.shape and case.agrees(wrong, here, repeated):
                return Explanation(POSITIONS, f"positions along dimension {dim} restart on each of {size} ranks")
        if all(
            here is not None and here.shape == first.shape and case.agrees(wrong, here, first) for here in heres[:size]
        ):
            return Explanation(POSITIONS, f"positions along dimension {dim} restart on each of {size} ranks")
    return None


def other_layout(case: Case, wrong: Judged) -> Explanation | None:
    """Whether another layout gives the reference: partial sums, or other shards."""
    for layouts, merged in case.layouts(wrong):
        if layouts == wrong.layouts or not case.fits(wrong, merged):
            continue
        partial = [axis for axis, kind in layouts.items() if kind[0] in ("P", "placed sums")]
        if partial and all(
            case.agrees_all(wrong, each, next(iter(wrong.shards.values()))) for each in wrong.shards.values()
        ):
            # Averages.
            continue
        if partial:
            ranks = " and ".join(f"{axis} (ranks 0 to {case.axes.get(axis, 2) - 1})" for axis in partial)
            return Explanation(NEVER_SUMMED, f"the sum over {ranks} is the reference, and each rank has its term")
        return Explanation(
            MISPLACED, f"the ranks hold it as {shown_layouts(layouts)}, not as {shown_layouts(wrong.layouts)}"
        )
    return None


def misplaced(case: Case, wrong: Judged) -> Explanation | None:
    """Whether the shards in another order, or rows at an offset, give the reference."""
    axes = case.axes_of(wrong)
    for layouts, _ in case.layouts(wrong):
        for at, axis in enumerate(axes):
            size = case.axes.get(axis, 0)
            if layouts[axis][0] not in ("V", "placed", "sections", "positions") or not 1 < size <= _MOST_SHARDS:
                continue
            for order in itertools.permutations(range(size)):
                moved = {
                    (*place[:at], order[place[at]], *place[at + 1 :]): each for place, each in wrong.shards.items()
                }
                if list(order) != sorted(order) and case.fits(wrong, merge(moved, axes, layouts)):
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
                if case.agrees(wrong, here, there) and not are_constant(there, dim):
                    return Explanation(MISPLACED, f"its rows along dimension {dim} are offset by {offset}")
    return None


def one_copy(case: Case, wrong: Judged) -> Explanation | None:
    """Whether every rank has the same rank's shard."""
    shards = list(wrong.shards.values())
    if len(shards) < 2 or any(each.shape != shards[0].shape for each in shards):
        return None
    alike_ = all(case.agrees_all(wrong, each, shards[0]) for each in shards[1:])
    if not alike_:
        return None
    for axis, kind in wrong.layouts.items():
        size, whole = case.axes.get(axis, 1), wrong.whole
        dim = kind[1] if kind[0] in ("V", "placed", "sections") else None
        if dim is None or "slice" not in whole.views or whole.shape[dim] % size:
            continue
        for rank, part in enumerate(whole.views["slice"].chunk(size, dim)):
            here = shards[0].views.get("slice")
            if here is not None and here.shape == part.shape and case.agrees(wrong, here, part):
                return Explanation(ONE_COPY, f"every rank of {axis} has the shard of rank {rank}")
    return None


def one_term(case: Case, wrong: Judged) -> Explanation | None:
    """Whether a gradient is the term of one rank, of those that the ranks had before they were summed."""
    key = wrong.key
    if key.what != "gradient" or not wrong.merged:
        return None
    found: dict[int, Sketch] = {}
    for micro_batch in itertools.count():
        entries = case.judge.suspect.entries(Key("accumulated", key.name, key.step, micro_batch))
        if not entries:
            break
        found = {rank: entry.sketch for rank, entry in entries.items()}
    for rank, sketch in found.items():
        term, *merged = alike([sketch, *wrong.merged])
        if all(case.agrees_all(wrong, each, term) for each in merged):
            if len(wrong.shards) == 1:
                return Explanation(NEVER_SUMMED, f"it is the term of rank {rank}, the only rank that holds it")
            return Explanation(ONE_COPY, f"it is the term of rank {rank}, and the other ranks' terms are lost")
    return None


def wrong_group(case: Case, wrong: Judged) -> Explanation | None:
    """Whether terms were summed over one axis instead of another: then other parts of the tensor are added."""
    axes, whole = case.axes_of(wrong), wrong.whole.views.get("slice")
    if whole is None:
        return None
    for micro_batch in range(case.judge.reference.num_micro_batches(wrong.key.step)):
        # The ranks of another group had other samples at the same time.
        other_samples = case.reference(dataclasses.replace(wrong.key, micro_batch=micro_batch), wrong.whole)
        if micro_batch == wrong.key.micro_batch or wrong.key.micro_batch < 0 or other_samples is None:
            continue
        if other_samples.shape == whole.shape and case.fits(wrong, wrong.merged, _with(wrong, whole + other_samples)):
            return Explanation(
                WRONG_GROUP, f"the samples of micro-batch {micro_batch} are added, which other ranks have"
            )
    if len(axes) != 2:
        return None
    for at, axis in enumerate(axes):
        size, other = case.axes[axis], axes[1 - at]
        # By the place on the other axis, what the ranks of this axis have.
        groups: dict[int, list[Sketch]] = {}
        for place, sketch in sorted(wrong.shards.items()):
            groups.setdefault(place[1 - at], []).append(sketch)
        if any(not case.agrees_all(wrong, each, group[0]) for group in groups.values() for each in group):
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
                if case.agrees(wrong, found, mixed) or case.agrees(wrong, centred(found), centred(mixed)):
                    return Explanation(WRONG_GROUP, f"it was summed over {axis} {what}")
    return None


def but_bias(case: Case, wrong: Judged) -> Explanation | None:
    """Whether the rows' differences from their mean are sums or multiples: a bias hides it."""
    whole = wrong.whole.views.get("slice")
    shards = [each.views.get("slice") for each in wrong.shards.values()]
    if whole is None or whole.dim() < 2 or any(each is None or each.shape != whole.shape for each in shards):
        return None
    own = [centred(each) for each in shards if each is not None]
    expected = centred(whole)
    if not case.agrees(wrong, own[0], own[-1]) and case.agrees(wrong, torch.stack(own).sum(0), expected):
        return Explanation(NEVER_SUMMED, "but for a bias, the sum over the ranks is the reference")
    factor = float((own[0] * expected).sum() / expected.square().sum()) if float(expected.square().sum()) else 0.0
    if abs(factor) > 1e-6 and abs(factor - 1) > FACTOR and case.agrees(wrong, own[0], expected * factor):
        return Explanation(SCALED, f"but for a bias, it is the reference times {factor:.4g}")
    return None


def other_rows(case: Case, wrong: Judged) -> Explanation | None:
    """Whether an embedding returns other rows of its table, or none where another rank has them."""
    key, whole = wrong.key, wrong.whole.views.get("slice")
    table = case.judge.reference.entries(Key("used", f"{key.name}.weight", key.step))
    if key.what != "output" or not table or not wrong.merged or whole is None:
        return None
    rows = table[0].sketch.doubled().views.get("slice")
    here = wrong.merged[0].views.get("slice")
    if rows is None or rows.dim() != 2 or here is None or here.shape != whole.shape or rows.size(-1) != whole.size(-1):
        return None
    one, other = here.flatten(0, -2)[:512], whole.flatten(0, -2)[:512]
    is_wrong = (one - other).abs().amax(1) > case.limit(wrong)
    if bool((one[is_wrong] == 0).all()):
        share = float(is_wrong.float().mean())
        return Explanation(ONE_COPY, f"{share:.0%} of its rows are zero: those that other ranks hold")
    distances = torch.cdist(one[is_wrong], rows), torch.cdist(other[is_wrong], rows)
    offsets = distances[0].argmin(1) - distances[1].argmin(1)
    offset = int(offsets.mode().values)
    exact = distances[0].amin(1) <= 4 * case.limit(wrong)
    if offset and float((exact & (offsets == offset)).float().mean()) > 0.5:
        return Explanation(MISPLACED, f"its rows are those of ids that are larger by {offset}")
    return None


def positions(case: Case, wrong: Judged) -> Explanation | None:
    """Whether all is right up to the first rank's part of a dimension, and wrong behind it."""
    if wrong.key.micro_batch < 0:
        return None
    sizes = [size for size in case.axes.values() if size > 1]
    for merged in wrong.merged:
        here, there = merged.views.get("slice"), wrong.whole.views.get("slice")
        if here is None or there is None or here.shape != there.shape:
            continue
        limit = case.limit(wrong)
        for dim, size in itertools.product(range(here.dim()), sizes):
            length = here.size(dim)
            if length < 2 * size:
                continue
            is_wrong = ((here - there).abs() > limit).movedim(dim, 0).flatten(1).any(1)
            first = -(-length // size)
            if not bool(is_wrong[:first].any()) and float(is_wrong[first:].float().mean()) > 0.5:
                return Explanation(
                    POSITIONS,
                    f"its first {first} of {length} rows along dimension {dim} are right, and later ones wrong",
                )
    return None


def drifted(case: Case, wrong: Judged) -> Explanation | None:
    """Whether copies differ between ranks."""
    shards = list(wrong.shards.values())
    if len(shards) < 2 or any(each.shape != wrong.whole.shape for each in shards):
        return None
    apart = [number for number, each in enumerate(shards) if not case.agrees_all(wrong, each, shards[0])]
    if apart:
        return Explanation(DRIFTED, f"copies differ: ranks {apart} have other values than rank 0")
    return None


def _with(wrong: Judged, values: Tensor) -> Sketch:
    whole = wrong.whole
    return Sketch(whole.shape, whole.dtype, whole.strides, {"slice": values})
