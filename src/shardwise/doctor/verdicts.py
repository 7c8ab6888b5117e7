"""Verdicts on all tensors of a run, and the differences that are no faults."""

from __future__ import annotations

import dataclasses
import math

from shardwise.core.json_text import first_of
from shardwise.doctor.evidence import Case
from shardwise.doctor.findings import Judged
from shardwise.doctor.rank_faults import reordered


class Verdicts:
    """Judged tensors in the order of the reference, by key and by position; ``notes`` say what was excused."""

    def __init__(self, case: Case, judged: list[Judged], notes: list[str]) -> None:
        self.case, self.judged, self.notes = case, judged, notes
        self.by_key = {each.key: each for each in judged}
        self.by_number = {each.number: each for each in judged}

    def excuse_inner(self) -> None:
        """Excuse tensors inside a module whose output is right: ranks may hold them in an order that is not known."""
        outputs: dict[tuple[str, int, int], list[Judged]] = {}
        for each in self.judged:
            if each.key.what == "output":
                outputs.setdefault((each.key.name, each.key.step, each.key.micro_batch), []).append(each)
        excused: set[str] = set()
        for each in self.judged:
            key = each.key
            is_param = key.what == "used" and key.step == 0
            if not each.is_wrong or not (is_param or key.what in ("input", "output")):
                continue
            around = key.name
            while around:
                around = parent_of(around)
                own = outputs.get((around, key.step, max(key.micro_batch, 0)), [])
                if own and not any(output.is_wrong for output in own):
                    if is_param and self.case.holds_copies(each):
                        # No order explains copies with other values.
                        break
                    each.is_excused = True
                    excused.add(key.name)
                    if is_param:
                        self._learn_order(each)
                    gradient = self.by_key.get(dataclasses.replace(key, what=f"{key.what} gradient"))
                    if gradient is not None:
                        gradient.is_excused = True
                    break
        if excused:
            self.notes.append(
                f"tensors of {first_of(sorted(excused))} differ, and the output of the module around them is right: "
                "their order on the ranks is not known"
            )

    def _learn_order(self, used: Judged) -> None:
        """Judge a parameter by the order of its rows in the forward, whose outputs are right; excuse it without one."""
        found, name = reordered(self.case, used, by_rank=True), used.key.name
        for at, each in enumerate(self.judged):
            if each.key.name != name or each.key.what not in ("used", "gradient", "updated", "accumulated"):
                continue
            again = None
            if found is not None:
                axis, dim, orders = found
                intervals = [[[row, row + 1] for row in rows] for rows in orders]
                again = self.case.judge.judge(each.key, each.number, order={axis: ["placed", dim, intervals]})
            if again is None:
                each.is_excused = True
            else:
                self.judged[at] = self.by_key[each.key] = self.by_number[each.number] = again

    def excuse_losses(self, step: int) -> None:
        """Excuse losses of each rank's samples whose mean is the reference's, if gradients of parameters are right."""
        params = [
            each for each in self.judged if each.key.what in ("gradient", "accumulated") and each.key.step == step
        ]
        if not params or any(each.is_wrong or each.partial_axes for each in params):
            return
        for each in self.judged:
            if each.key.step == step and each.is_wrong and self.case.is_loss(each):
                each.is_excused = self.case.is_mean(each)

    def excuse_factor(self, step: int) -> None:
        """Excuse gradients of activations that are too large by the number of replicas, which are averaged later."""
        params = [each for each in self.judged if each.key.what == "gradient" and each.key.step == step]
        for each in self.judged:
            # These were recorded before the ranks averaged them.
            if each.key.what == "accumulated" and each.key.step == step and each.is_wrong:
                each.is_excused = any(
                    each.layouts.get(axis) == ("P",) and self.case.is_multiple(each, size)
                    for axis, size in self.case.axes.items()
                )
        inner = [each for each in self.judged if each.key.what.endswith(" gradient") and each.key.step == step]
        if not params or not inner or sum(each.is_wrong for each in params) > len(params) / 2:
            return
        # The gradient of a loss that a module returns is 1.
        first = next((each for each in inner if not each.is_excused and math.prod(each.whole.shape) > 1), None)
        if first is None or not first.is_wrong:
            return
        for axis, size in self.case.axes.items():
            if size < 2 or not self.case.is_multiple(first, size):
                continue
            for each in inner:
                each.is_excused = each.is_excused or self.case.is_multiple(each, size)
            self.notes.append(
                f"step {step}: gradients of activations are {size} times the reference's, and averaged over {axis}"
            )
            return


def parent_of(name: str) -> str:
    """Return the name of the module around a module or parameter."""
    return name.rpartition(".")[0]
