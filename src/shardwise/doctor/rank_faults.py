"""Faults of the ranks' parts of a tensor: not summed, in another place, of another rank.

Each function returns the evidence for one class of faults, or None.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.doctor.evidence import (
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
from shardwise.doctor.findings import Judged, merge, shown_layouts
from shardwise.doctor.places import Key
from shardwise.doctor.sketches import Sketch, alike

_MOST_SHARDS = 4
_MOST_USERS = 4
# Gated activations of joint layers.
_GATES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda one, other: F.silu(one) * other,
    lambda one, other: F.gelu(one) * other,
    lambda one, other: F.gelu(one, approximate="tanh") * other,
    lambda one, other: one.sigmoid() * other,
    lambda one, other: one.relu() * other,
]
_GATES += [lambda one, other, gate=gate: gate(other, one) for gate in tuple(_GATES)]  # type: ignore[misc]


def restarted(case: Case, wrong: Judged) -> Explanation | None:
    """Whether each rank has the first rank's part of something that depends on the position alone."""
    shards, whole = list(wrong.shards.values()), wrong.whole.slice
    if wrong.key.what not in ("input", "output") or whole is None or len(shards) < 2:
        return None
    for dim in range(whole.dim()):
        if are_constant(whole, dim) or not _is_of_positions(case, wrong, whole, dim):
            continue
        heres = [each.slice for each in (*shards, *wrong.merged)]
        lengths = [here.size(dim) for here in heres[: len(shards)] if here is not None and here.dim() == whole.dim()]
        # Each rank has its part, or all have those of all.
        of_each = len(lengths) == len(shards) and all(
            length < whole.size(dim)
            and here is not None
            and here.shape == (first := whole.narrow(dim, 0, length)).shape
            and case.agrees(wrong, here, first)
            for here, length in zip(heres, lengths, strict=False)
        )
        size, rest = len(shards), whole.size(dim) % len(shards)
        repeated = torch.cat([whole.chunk(size, dim)[0]] * size, dim)
        if of_each or any(
            not rest and here is not None and here.shape == repeated.shape and case.agrees(wrong, here, repeated)
            for here in heres
        ):
            return Explanation(POSITIONS, f"positions along dimension {dim} restart on each of {size} ranks")
    return None


def _is_of_positions(case: Case, wrong: Judged, whole: Tensor, dim: int) -> bool:
    """Whether a tensor of the reference is the same at other times or for all samples, or the first rows of a table."""
    key = wrong.key
    for step, micro_batch in ((key.step, 1 - key.micro_batch), (1 - key.step, key.micro_batch)):
        other = case.reference(dataclasses.replace(key, step=step, micro_batch=micro_batch), wrong.whole)
        if other is not None and other.shape == whole.shape and bool((other == whole).all()):
            return True
    if any(other != dim and whole.size(other) > 1 and are_constant(whole, other) for other in range(whole.dim() - 1)):
        return True
    table = case.reference_whole(Key("used", f"{key.name}.weight", key.step))
    rows = whole.movedim(dim, 0).reshape(whole.size(dim), -1)
    return table is not None and table[: len(rows)].shape == rows.shape and bool((table[: len(rows)] == rows).all())


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
        added = [axis for axis, kind in layouts.items() if kind == ("I",) and wrong.layouts.get(axis) == ("P",)]
        if added:
            return Explanation(SCALED, f"each rank of {' and '.join(added)} has all of it, and the ranks' sum is taken")
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
    if (found := reordered(case, wrong)) is not None:
        axis, dim, orders = found
        begins = " and ".join(f"{rank} with that of {order[0]}" for rank, order in enumerate(orders))
        ranks = f"rank of {axis} begins: {begins}" if len(orders) > 1 else f"ranks begin with that of {orders[0][0]}"
        return Explanation(MISPLACED, f"its rows along dimension {dim} are in another order: {ranks}")
    for one, other in wrong.pairs():
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


def reordered(case: Case, wrong: Judged, *, by_rank: bool = False) -> tuple[str, int, list[list[int]]] | None:
    """Return axis, dimension and each rank's rows if the ranks hold the reference's rows in another order."""
    whole = wrong.whole.slice
    if whole is None or not wrong.whole.is_whole:
        return None
    axes = [axis for axis, size in case.axes.items() if size > 1]
    options = [] if by_rank else [("", [each]) for each in wrong.merged]
    if wrong.shards and len(next(iter(wrong.shards))) == 1 and (len(axes) == 1 or not by_rank):
        options.append((axes[0] if len(axes) == 1 else "the ranks", list(wrong.shards.values())))
    for axis, sketches in options:
        parts = [each.slice for each in sketches]
        for dim in range(whole.dim()):
            if any(part is None or part.dim() != whole.dim() for part in parts):
                continue
            orders = [case.matches(wrong, part, whole, dim) for part in parts if part is not None]
            found = [order for order in orders if order is not None]
            rows = [row for order in found for row in order]
            if len(found) == len(orders) and sorted(rows) == list(range(whole.size(dim))) and rows != sorted(rows):
                return axis, dim, found
    return None


def own_terms(case: Case, wrong: Judged) -> Explanation | None:
    """Whether a gradient has the rank's own term of linear layers whose terms are to be summed, or a slice of it."""
    key, whole = wrong.key, wrong.whole.slice
    if not key.what.endswith(" gradient") or whole is None or not wrong.whole.is_whole or len(wrong.shards) < 2:
        return None
    of = dataclasses.replace(key, what=key.what.removesuffix(" gradient"))
    terms = {
        call["name"]: found
        for call in case.calls_with(of)
        if call["step"] == key.step and (found := _terms_of(case, wrong, call)) is not None
    }
    parts = _parts_of_ranks(wrong, whole)
    if parts is None:
        return None
    for number in range(1, min(len(terms), _MOST_USERS) + 1):
        for names in itertools.combinations(terms, number):
            lost = {
                place: sum(sum(terms[name].values()) - terms[name][place] for name in names) for place in wrong.shards
            }
            if all(
                case.agrees(wrong, sketch.views["slice"], (whole - lost[place])[parts[place]])
                for place, sketch in wrong.shards.items()
            ):
                verb = "returns" if len(names) == 1 else "return"
                evidence = f"each rank has its own term of the gradient that {' and '.join(names)} {verb}"
                return Explanation(NEVER_SUMMED, evidence, names[0] if len(names) == 1 else "")
    return None


def _terms_of(case: Case, wrong: Judged, call: dict[str, Any]) -> dict[tuple[int, ...], Tensor] | None:
    """Return each rank's term of the gradient of a linear layer's input, from its weight and its output's gradient."""
    name, key = call["name"], wrong.key
    weight = case.judge.judge(Key("used", f"{name}.weight", key.step))
    gradient = case.judge.judge(Key("output gradient", name, key.step, key.micro_batch, call["call"]))
    if weight is None or gradient is None or not weight.shards.keys() == gradient.shards.keys() == wrong.shards.keys():
        return None
    found = {}
    for place in wrong.shards:
        own, other = weight.shards[place], gradient.shards[place]
        if not own.is_whole or not other.is_whole or len(own.shape) != 2:
            return None
        matrix, of_output = own.views["slice"], other.views["slice"]
        if of_output.size(-1) != matrix.size(0):
            matrix = matrix.T
        if of_output.size(-1) != matrix.size(0) or (*of_output.shape[:-1], matrix.size(1)) != wrong.whole.shape:
            return None
        found[place] = of_output @ matrix
    return found


def _parts_of_ranks(wrong: Judged, whole: Tensor) -> dict[tuple[int, ...], tuple[slice, ...]] | None:
    """Return each rank's part of the reference if the ranks hold copies, or shards of one dimension in order."""
    parts, at = {}, 0
    for place, sketch in sorted(wrong.shards.items()):
        if not sketch.is_whole or len(sketch.shape) != whole.dim():
            return None
        dims = [dim for dim, size in enumerate(sketch.shape) if size != whole.size(dim)]
        if len(dims) > 1:
            return None
        part = [slice(None)] * whole.dim()
        if dims:
            part[dims[0]] = slice(at, at + sketch.shape[dims[0]])
            at += sketch.shape[dims[0]]
        parts[place] = tuple(part)
        if whole[parts[place]].shape != sketch.shape:
            return None
    return parts


def halves_of_joint(case: Case, wrong: Judged) -> Explanation | None:
    """Whether each rank multiplies other halves of a joint layer's output than the reference does."""
    whole = wrong.whole.slice
    if wrong.key.what not in ("input", "output") or whole is None or not whole.dim():
        return None
    for key in itertools.islice(case.before(wrong.key), 2):
        joint, judged = case.reference_whole(key), case.judge.judge(key)
        if joint is None or judged is None or joint.shape != (*whole.shape[:-1], 2 * whole.size(-1)):
            continue
        for gate in _GATES:
            if not case.agrees(wrong, gate(*joint.chunk(2, -1)), whole):
                continue
            pairs = [(judged.shards.get(place), sketch) for place, sketch in wrong.shards.items()]
            if all(
                one is not None
                and one.is_whole
                and one.shape == (*sketch.shape[:-1], 2 * sketch.shape[-1])
                and case.agrees(wrong, gate(*one.views["slice"].chunk(2, -1)), sketch.views["slice"])
                for one, sketch in pairs
            ):
                evidence = f"the halves that each rank multiplies are not parts of the halves of {key.name}'s output"
                return Explanation(MISPLACED, evidence, key.name)
    return None


def one_copy(case: Case, wrong: Judged) -> Explanation | None:
    """Whether every rank has the same rank's shard."""
    shards = list(wrong.shards.values())
    if len(shards) < 2 or any(each.shape != shards[0].shape for each in shards):
        return None
    if not all(case.agrees_all(wrong, each, shards[0]) for each in shards[1:]):
        return None
    for axis, kind in wrong.layouts.items():
        size, whole = case.axes.get(axis, 1), wrong.whole
        dim = kind[1] if kind[0] in ("V", "placed", "sections") else None
        if dim is None or "slice" not in whole.views or whole.shape[dim] % size:
            continue
        for rank, part in enumerate(whole.views["slice"].chunk(size, dim)):
            here = shards[0].slice
            if here is not None and here.shape == part.shape and case.agrees(wrong, here, part):
                return Explanation(ONE_COPY, f"every rank of {axis} has the shard of rank {rank}")
    return None


def one_term(case: Case, wrong: Judged) -> Explanation | None:
    """Whether a gradient is the term of one rank, of those that the ranks had before they were summed."""
    key = wrong.key
    if key.what != "gradient" or not wrong.merged or case.judge.suspect.world_size == 1:
        return None
    terms = case.judge.suspect.accumulated(key.name, key.step)
    found = {rank: entry.sketch for rank, entry in terms[-1].items()} if terms else {}
    if len(found) > 1 and all(
        case.agrees_all(wrong, each, other) for other in wrong.merged for each in alike([*found.values(), other])[:-1]
    ):
        # Each rank has the whole gradient, not a term of it.
        return None
    for rank, sketch in found.items():
        term, *merged = alike([sketch, *wrong.merged])
        if all(case.agrees_all(wrong, each, term) for each in merged):
            if len(wrong.shards) == 1:
                return Explanation(NEVER_SUMMED, f"it is the term of rank {rank}, the only rank that holds it")
            return Explanation(ONE_COPY, f"it is the term of rank {rank}, and the other ranks' terms are lost")
    return None


def wrong_group(case: Case, wrong: Judged) -> Explanation | None:
    """Whether terms were summed over one axis instead of another: then other parts of the tensor are added."""
    axes, whole = case.axes_of(wrong), wrong.whole.slice
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
        firsts = [group[0].slice for group in groups.values()]
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
    whole = wrong.whole.slice
    shards = [each.slice for each in wrong.shards.values()]
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
    key, whole = wrong.key, wrong.whole.slice
    table = case.judge.reference.entries(Key("used", f"{key.name}.weight", key.step))
    if key.what != "output" or not table or not wrong.merged or whole is None:
        return None
    rows = table[0].sketch.doubled().slice
    here = wrong.merged[0].slice
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
    limit = case.limit(wrong)
    for here, there in wrong.pairs():
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
    if len(shards) < 2 or any(each.shape != wrong.whole.shape for each in shards) or case.is_loss(wrong):
        return None
    apart = [number for number, each in enumerate(shards) if not case.agrees_all(wrong, each, shards[0])]
    if apart:
        return Explanation(DRIFTED, f"copies differ: ranks {apart} have other values than rank 0")
    return None


def _with(wrong: Judged, values: Tensor) -> Sketch:
    return dataclasses.replace(wrong.whole, views={"slice": values})
