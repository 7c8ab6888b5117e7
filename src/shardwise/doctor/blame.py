"""Find the module in which a tensor became wrong, and the known fault that explains its values."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from shardwise.doctor import rank_faults, value_faults
from shardwise.doctor.evidence import NEVER_SUMMED, UNEXPLAINED, Case, Explanation
from shardwise.doctor.findings import Judged
from shardwise.doctor.places import Key
from shardwise.doctor.verdicts import Verdicts, parent_of


class Blame:
    """Follows a wrong tensor through the calls of the reference's modules."""

    def __init__(self, verdicts: Verdicts, calls: list[dict[str, Any]]) -> None:
        self._verdicts, self._calls = verdicts, calls

    def of(self, wrong: Judged) -> tuple[str, Explanation | None]:
        """Return the module in which a tensor became wrong, and the explanation if an earlier tensor has it."""
        key = wrong.key
        if key.what in ("gradient", "updated", "used"):
            return key.name, None
        if key.what in ("input", "output"):
            if (added := value_faults.added_by_each(self._verdicts.case, wrong)) is not None:
                return key.name, added
            for number in self._sources(key):
                source = self._verdicts.by_number.get(number)
                if source is not None and source.summed_axes:
                    source = self._begin_of_sums(source)
                    axes = " and ".join(source.summed_axes)
                    evidence = f"its output is a partial sum over {axes}, which what follows takes for the whole"
                    return source.key.name, Explanation(NEVER_SUMMED, evidence)
            if key.what == "output":
                if (changed := self._changed_weight(key)) is not None:
                    return changed
                return key.name, None
            return parent_of(key.name), None
        # The gradient of a tensor comes from the modules that used it.
        users = self._users_of(wrong)
        for user in users:
            for number in user["outputs"]:
                later = self._gradient_of(number)
                if later is not None and later.summed_axes:
                    axes = " and ".join(later.summed_axes)
                    evidence = (
                        f"its input's gradient is a partial sum over {axes}, and what follows takes it for the whole"
                    )
                    return self._end_of_sums(later), Explanation(NEVER_SUMMED, evidence)
        if users:
            return _common([call["name"] for call in users]), None
        # Modules that pass it on are not the ones that made it.
        return key.name if key.what == "output gradient" else parent_of(key.name), None

    def _begin_of_sums(self, output: Judged) -> Judged:
        """Return the first of the partial sums that each come from the one before."""
        while True:
            sources = [self._verdicts.by_number.get(number) for number in self._sources(output.key)]
            earlier = [each for each in sources if each and each.summed_axes and each.number < output.number]
            if not earlier:
                return output
            output = earlier[0]

    def without_sum(self, gradient: Judged) -> str:
        """Return the module that left a sum out, if the gradient of the output of a parameter's module lacks it too."""
        owner = parent_of(gradient.key.name)
        for each in self._verdicts.by_key.values():
            key = each.key
            if (key.what, key.name, key.step) == ("output gradient", owner, gradient.key.step):
                return self._end_of_sums(each) if set(each.summed_axes) & set(gradient.partial_axes) else ""
        return ""

    def _end_of_sums(self, gradient: Judged) -> str:
        """Return the module whose input's gradient is a partial sum, and its outputs' gradients are not."""
        seen = {gradient.key}
        while True:
            users = self._users_of(gradient)
            found = [self._gradient_of(number) for user in users for number in user["outputs"]]
            later = next(
                (each for each in found if each is not None and each.summed_axes and each.key not in seen), None
            )
            if later is None:
                return _common([call["name"] for call in users]) if users else gradient.key.name
            gradient = later
            seen.add(later.key)

    def _gradient_of(self, number: int) -> Judged | None:
        forward = self._verdicts.by_number.get(number)
        if forward is None:
            return None
        return self._verdicts.by_key.get(dataclasses.replace(forward.key, what=f"{forward.key.what} gradient"))

    def _users_of(self, gradient: Judged) -> list[dict[str, Any]]:
        """Return the calls that computed something from the tensor of a gradient, and did not only pass it on."""
        key = gradient.key
        forward = self._verdicts.by_key.get(dataclasses.replace(key, what=key.what.removesuffix(" gradient")))
        if forward is None:
            return []
        calls = [call for call in self._calls if call["step"] == key.step and forward.number in call["inputs"]]
        return [call for call in calls if forward.number not in call["outputs"]]

    def _sources(self, key: Key) -> list[int]:
        """Return the numbers of the tensors that a tensor was computed from."""
        calls = [call for call in self._calls if call["step"] == key.step and call["micro_batch"] == key.micro_batch]
        limit = self._verdicts.by_key[key].number
        own = [call for call in calls if key.what == "output" and call["name"] == key.name and call["call"] == key.call]
        parent = key.name if own else parent_of(key.name)
        inside = [call for call in calls if parent_of(call["name"]) == parent and call["name"] != parent]
        before = list(dict.fromkeys(number for call in inside for number in call["outputs"] if number < limit))
        return [*(number for call in own for number in call["inputs"]), *before[-2:]]

    def _changed_weight(self, key: Key) -> tuple[str, Explanation] | None:
        """Return the parameter of a module that has other values than the reference's, and why; at first the module."""
        for judged in self._verdicts.by_key.values():
            used = judged.key
            if used.what == "used" and used.step == key.step and parent_of(used.name) == key.name and judged.is_wrong:
                return used.name if key.step else key.name, explain(self._verdicts.case, judged)
        return None


def _common(names: list[str]) -> str:
    """Return the innermost module that uses a tensor, or the module around several such modules."""
    inner = [
        name for name in names if not any(other.startswith(f"{name}.") or not name for other in names if other != name)
    ]
    parts = [name.split(".") for name in dict.fromkeys(inner or names)]
    if len(parts) == 1:
        return ".".join(parts[0])
    shared = [each[0] for each in itertools.takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False))]
    return ".".join(shared)


# The most exact explanations come first.
_FAULTS = (
    rank_faults.restarted,
    rank_faults.other_layout,
    rank_faults.misplaced,
    rank_faults.one_copy,
    rank_faults.one_term,
    value_faults.with_every_micro_batch,
    value_faults.local_means,
    value_faults.factor,
    value_faults.added_by_each,
    rank_faults.own_terms,
    rank_faults.halves_of_joint,
    value_faults.labels_of_loss,
    value_faults.stale,
    value_faults.stale_input,
    rank_faults.wrong_group,
    rank_faults.but_bias,
    rank_faults.other_rows,
    value_faults.other_labels,
    value_faults.random_stream,
    rank_faults.positions,
    rank_faults.drifted,
)


def explain(case: Case, wrong: Judged) -> Explanation:
    """Return the first explanation that turns the reference into the suspect's values within rounding."""
    for fault in _FAULTS:
        if (found := fault(case, wrong)) is not None:
            return found
    return Explanation(UNEXPLAINED, f"it differs by {wrong.relative:.1e} relative to the reference")
