"""Diagnose a run: the first wrong module of the forward, the backward and the update, and the class of the fault."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from os import PathLike
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.core.files import first_of
from shardwise.doctor.evidence import LABELS, NEVER_SUMMED, NORM, SAMPLES, STALE, Case, Explanation
from shardwise.doctor.explaining import explain
from shardwise.doctor.judging import PASSES, Judge, Judged, Rounding, eps_of
from shardwise.doctor.micro_batches import match_micro_batches, name_of_ids, rows_read, samples_of
from shardwise.doctor.places import Key
from shardwise.doctor.rank_faults import reordered
from shardwise.doctor.recording import Recording
from shardwise.doctor.sketches import alike, distance
from shardwise.doctor.value_faults import added_by_each

# Share of the elements of a parameter that an update changes at least, to tell one that changes nothing.
_CHANGED = 0.1
_PASSES = ("data", "forward", "backward", "update")
# The factor of clipping is recognised within this relative distance.
_FACTOR = 1e-3


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first fault of a pass.

    Attributes:
        where: ``data``, ``forward``, ``backward`` or ``update``.
        module: name of the module or parameter; empty for the model itself.
        tensor: which of its tensors is wrong.
        step, micro_batch: where it was seen first, from 0; -1 for what a step has once.
        kind: class of the fault.
        evidence: what shows it.
        ratio: difference over expected rounding.
        relative, expected: difference and expected rounding, relative to the reference.
        others: other parameters whose gradients, or values after the update, are wrong in this step.
    """

    where: str
    module: str
    tensor: str
    step: int
    micro_batch: int
    kind: str
    evidence: str
    ratio: float
    relative: float
    expected: float
    others: tuple[str, ...] = ()

    def line(self) -> str:
        """The finding in one sentence."""
        name = self.module or "(the model itself)"
        when = f"step {self.step}" + (f", micro-batch {self.micro_batch}" if self.micro_batch >= 0 else "")
        return f"{self.where}: {name}, {self.tensor}, {when}: {self.kind}: {self.evidence}"


@dataclasses.dataclass
class Diagnosis:
    """Result of a diagnosis.

    Attributes:
        findings: the first fault of each pass, in the order of the data flow; empty if all differences are rounding.
        judged: all compared tensors, in the order of the reference.
        rounding_is_measured: whether the expected rounding comes from a third recording.
        notes: what was not compared, and what was assumed.
        axes: sizes of the suspect's axes.
        calls: each call of a module in the suspect's first rank that has it, with class, inputs, outputs and moves.
        steps: number of compared steps.
        not_recorded: what was not compared at all, because one of the recordings lacks it.
    """

    findings: list[Finding]
    judged: list[Judged]
    rounding_is_measured: bool
    notes: list[str]
    axes: dict[str, int]
    calls: list[dict[str, Any]]
    steps: int
    not_recorded: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether all differences are rounding, as far as tensors were recorded."""
        return not self.findings

    @property
    def sound_line(self) -> str:
        """The verdict on a run without a fault, with what was not recorded."""
        if not self.not_recorded:
            return "sound: all differences are rounding"
        return f"all recorded differences are rounding, and these were not recorded: {'; '.join(self.not_recorded)}"

    @property
    def first(self) -> Finding | None:
        """The first fault in the order of the data flow."""
        return self.findings[0] if self.findings else None


def diagnose(
    reference: str | PathLike[str], suspect: str | PathLike[str], rounding: str | PathLike[str] | None = None
) -> Diagnosis:
    """Compare two recordings, and find the first wrong module of the suspect.

    Args:
        reference: folder of a recording of one rank, or of one at the suspect's layout.
        suspect: folder of the recording of the parallel run.
        rounding: folder of a recording of the reference's run that differs in rounding alone, such as one in another
            dtype or one with ``perturb``; None to estimate the rounding from the dtype.

    Raises:
        ConfigError: the recordings are not of one model, or the reference has another layout of several ranks.
        DataError: a recording is incomplete.
    """
    one, other = Recording(reference), Recording(suspect)
    twin = None if rounding is None else Recording(rounding)
    for recording in (other, *(() if twin is None else (twin,))):
        _check_alike(one, recording)
    return _Diagnoser(one, other, twin).run()


def _check_alike(reference: Recording, suspect: Recording) -> None:
    if reference.world_size > 1 and reference.axes != suspect.axes:
        raise ConfigError(
            f"{reference.folder} was recorded on {reference.axes}, and {suspect.folder} on {suspect.axes}; record the "
            "reference on one rank, or at the suspect's layout"
        )
    common = reference.names & suspect.names
    if not common - {""}:
        raise ConfigError(
            f"{reference.folder} and {suspect.folder} have no module or parameter in common: "
            f"{first_of(sorted(reference.names))}, and {first_of(sorted(suspect.names))}; record the same model"
        )


class _Diagnoser:
    def __init__(self, reference: Recording, suspect: Recording, twin: Recording | None) -> None:
        self.reference, self.suspect = reference, suspect
        self.notes: list[str] = []
        self._eps = eps_of(suspect)
        self.rounding = Rounding(reference, twin, self._eps)
        if twin is None:
            self.notes.append(
                "the expected rounding is estimated from the dtype; a recording of the reference with perturb=1, or in "
                "another dtype, measures it (rounding=...)"
            )
        versions = [recording.facts["torch"] for recording in (reference, suspect)]
        if versions[0] != versions[1]:
            self.notes.append(
                f"the reference was recorded with PyTorch {versions[0]}, and the suspect with {versions[1]}"
            )
        self.calls = [call for facts in reference.of_ranks("calls") for call in facts]

    def run(self) -> Diagnosis:
        findings = []
        if (of_data := self._check_data()) is not None:
            findings.append(of_data)
        judge = Judge(self.reference, self.suspect, self.rounding, match_micro_batches(self.reference, self.suspect))
        judged = list(judge.all())
        compared = {each.key for each in judged}
        missing = sum(1 for key in self.reference.recorded if PASSES[key.what] and key not in compared)
        if missing:
            self.notes.append(f"{missing} tensors of the reference are not in the suspect, and were not compared")
        if dropped := [name for names in self.suspect.of_ranks("dropped") for name in names]:
            names = first_of(sorted(set(dropped)))
            self.notes.append(f"the recording's budget was used up; not all tensors of these are in it: {names}")
        counts = Counter(
            (each["step"], each["micro_batch"]) for each in self.suspect.of_ranks("calls")[0] if not each["name"]
        )
        self._case = Case(judge, self.suspect.axes, max(1, len({micro for _, micro in counts})))
        self._judged = {each.key: each for each in judged}
        self._by_number = {each.number: each for each in judged}
        self._excuse_inner(judged)
        self._check_initial_weights(judged)
        for step in range(min(self.reference.steps, self.suspect.steps)):
            self._excuse_factor(judged, step)
            self._excuse_losses(judged, step)
        for step in range(min(self.reference.steps, self.suspect.steps)):
            found = [self._first(where, step, judged) for where in _PASSES[1:]]
            wrong = [each for each in found if each is not None]
            if (lost := self._check_updates(step)) is not None and all(each.where != "update" for each in wrong):
                wrong.append(lost)
            if (norm := self._check_norm(step)) is not None:
                wrong = [each for each in wrong if each.where != "update"] + [norm]
            if wrong:
                findings += wrong
                break
        seen: dict[Any, dict[str, Any]] = {}
        for calls in self.suspect.of_ranks("calls"):
            for call in calls:
                seen.setdefault((call["name"], call["step"], call["micro_batch"], call["call"]), call)
        steps = min(self.reference.steps, self.suspect.steps)
        calls = list(seen.values())
        not_recorded = self._not_recorded(judged)
        return Diagnosis(
            findings, judged, self.rounding.is_measured, self.notes, self.suspect.axes, calls, steps, not_recorded
        )

    def _not_recorded(self, judged: list[Judged]) -> list[str]:
        """Return what no verdict is about, since one of the recordings lacks it."""
        found = []
        if not any(each.key.what in ("input", "output") for each in judged):
            found.append("what modules get and return (in training mode, with gradients)")
        of = {name for name, facts in self.reference.facts["parameters"].items() if facts["is_trained"]}
        lacking = of - {each.key.name for each in judged if each.key.what in ("gradient", "accumulated")}
        if lacking == of:
            found.append("gradients of parameters (recorder.gradients() records them)")
        elif lost := [name for name in lacking if self._has_gradient(self.reference, name)]:
            found.append(f"gradients of {first_of(sorted(lost))}")
        if not any(each.key.what == "updated" for each in judged):
            found.append("parameters after an update (optimizer=... or recorder.updated() records them)")
        return found

    @staticmethod
    def _has_gradient(recording: Recording, name: str) -> bool:
        return any(key.what in ("gradient", "accumulated") and key.name == name for key in recording.recorded)

    def _check_initial_weights(self, judged: list[Judged]) -> None:
        initial = [each for each in judged if each.key.what == "used" and each.key.step == 0]
        wrong = [each for each in initial if each.is_wrong]
        if len(wrong) > len(initial) / 2:
            raise ConfigError(
                f"{len(wrong)} of {len(initial)} parameters begin with other values in {self.suspect.folder} than in "
                f"{self.reference.folder}, {wrong[0].key.name} among them; give both runs the same initial weights"
            )

    def _excuse_inner(self, judged: list[Judged]) -> None:
        """Excuse tensors inside a module whose output is right: ranks may hold them in an order that is not known."""
        outputs: dict[tuple[str, int, int], list[Judged]] = {}
        for each in judged:
            if each.key.what == "output":
                outputs.setdefault((each.key.name, each.key.step, each.key.micro_batch), []).append(each)
        excused: set[str] = set()
        for each in judged:
            key = each.key
            is_param = key.what == "used" and key.step == 0
            if not each.is_wrong or not (is_param or key.what in ("input", "output")):
                continue
            around = key.name
            while around:
                around = _parent(around)
                own = outputs.get((around, key.step, max(key.micro_batch, 0)), [])
                if own and not any(output.is_wrong for output in own):
                    if is_param and self._case.holds_copies(each):
                        # No order explains copies with other values.
                        break
                    each.is_excused = True
                    excused.add(key.name)
                    if is_param:
                        self._learn_order(each, judged)
                    gradient = self._judged.get(dataclasses.replace(key, what=f"{key.what} gradient"))
                    if gradient is not None:
                        gradient.is_excused = True
                    break
        if excused:
            self.notes.append(
                f"tensors of {first_of(sorted(excused))} differ, and the output of the module around them is right: "
                "their order on the ranks is not known"
            )

    def _learn_order(self, used: Judged, judged: list[Judged]) -> None:
        """Judge a parameter by the order of its rows in the forward, whose outputs are right; excuse it without one."""
        found, name = reordered(self._case, used, by_rank=True), used.key.name
        for at, each in enumerate(judged):
            if each.key.name != name or each.key.what not in ("used", "gradient", "updated", "accumulated"):
                continue
            again = None
            if found is not None:
                axis, dim, orders = found
                intervals = [[[row, row + 1] for row in rows] for rows in orders]
                again = self._case.judge.judge(each.key, each.number, order={axis: ["placed", dim, intervals]})
            if again is None:
                each.is_excused = True
            else:
                judged[at] = self._judged[each.key] = self._by_number[each.number] = again

    def _excuse_losses(self, judged: list[Judged], step: int) -> None:
        """Excuse losses of each rank's samples whose mean is the reference's, if gradients of parameters are right."""
        params = [each for each in judged if each.key.what in ("gradient", "accumulated") and each.key.step == step]
        if not params or any(each.is_wrong or each.partial_axes for each in params):
            return
        for each in judged:
            if each.key.step == step and each.is_wrong and self._case.is_loss(each):
                each.is_excused = self._case.is_mean(each)

    def _excuse_factor(self, judged: list[Judged], step: int) -> None:
        """Excuse gradients of activations that are too large by the number of replicas, which are averaged later."""
        params = [each for each in judged if each.key.what == "gradient" and each.key.step == step]
        for each in judged:
            # These were recorded before the ranks averaged them.
            if each.key.what == "accumulated" and each.key.step == step and each.is_wrong:
                each.is_excused = any(
                    each.layouts.get(axis) == ("P",) and self._case.is_multiple(each, size)
                    for axis, size in self.suspect.axes.items()
                )
        inner = [each for each in judged if each.key.what.endswith(" gradient") and each.key.step == step]
        if not params or not inner or sum(each.is_wrong for each in params) > len(params) / 2:
            return
        # The gradient of a loss that a module returns is 1.
        first = next((each for each in inner if not each.is_excused and math.prod(each.whole.shape) > 1), None)
        if first is None or not first.is_wrong:
            return
        for axis, size in self.suspect.axes.items():
            if size < 2 or not self._case.is_multiple(first, size):
                continue
            for each in inner:
                each.is_excused = each.is_excused or self._case.is_multiple(each, size)
            self.notes.append(
                f"step {step}: gradients of activations are {size} times the reference's, and averaged over {axis}"
            )
            return

    def _check_data(self) -> Finding | None:
        """Compare the samples of the ranks, and the labels of equal samples."""
        for step in range(min(self.reference.steps, self.suspect.steps)):
            expected = samples_of(self.reference, step)
            found = samples_of(self.suspect, step)
            if not expected or not found:
                continue
            first = next(iter(expected.values()))
            both = [*expected.values(), *found.values()]
            names = [name for name in first["rows"] if all(name in each["rows"] for each in both)]
            lengths = [each.get("lengths", {}) for each in both]
            names = [name for name in names if len({each.get(name) for each in lengths}) == 1]
            if not names:
                self.notes.append("the samples were not compared, since no rows of integers are whole on each rank")
                continue
            ids = name_of_ids({name: first["rows"][name] for name in names})
            wanted, seen = rows_read(self.reference, expected, ids), rows_read(self.suspect, found, ids)
            if seen != wanted:
                again = sum((seen - wanted).values())
                left = sum((wanted - seen).values())
                evidence = f"{again} samples are read too often or are not the reference's, and {left} are not read"
                return Finding("data", "", ids, step, -1, SAMPLES, evidence, math.inf, 1.0, 0.0)
            for name in names:
                pairs = {
                    row: other
                    for each in expected.values()
                    for row, other in zip(each["rows"][ids], each["rows"][name], strict=False)
                }
                for each in found.values():
                    for row, other in zip(each["rows"][ids], each["rows"][name], strict=False):
                        if pairs.get(row, other) != other:
                            evidence = f"samples with the reference's {ids} have other {name}"
                            return Finding("data", "", name, step, -1, LABELS, evidence, math.inf, 1.0, 0.0)
        return None

    def _first(self, where: str, step: int, judged: list[Judged]) -> Finding | None:
        # The backward computes the gradients of the last modules first.
        judged = sorted(judged, key=lambda each: self._order(each)) if where == "backward" else judged
        wrong = next(
            (
                each
                for each in judged
                if (PASSES[each.key.what] or "backward") == where and each.key.step == step and each.is_wrong
            ),
            None,
        )
        partial = next(
            (
                each
                for each in judged
                if each.key.what in ("gradient", "updated")
                and PASSES[each.key.what] == where
                and each.key.step == step
                and each.partial_axes
            ),
            None,
        )
        if partial is not None and (wrong is None or judged.index(partial) < judged.index(wrong)):
            axes = " and ".join(partial.partial_axes)
            evidence = f"the sum over {axes} is the reference, and each rank has its term"
            module = self._module_without_sum(partial) or partial.key.name
            return self._finding(where, partial, module, Explanation(NEVER_SUMMED, evidence))
        if wrong is None:
            return None
        module, cause = self._blame(wrong)
        explained = cause or explain(self._case, wrong)
        is_weight = wrong.key.what == "used" or module != wrong.key.name
        if is_weight and Key("updated", module, step - 1) in self._judged:
            # Its values were right when the update ended.
            where = "update"
        return self._finding(where, wrong, explained.module or module, explained)

    def _order(self, judged: Judged) -> tuple[int, int]:
        of_params = ("gradient", "accumulated")
        if judged.key.what not in of_params:
            return judged.number, 0
        used = self._judged.get(Key("used", judged.key.name, judged.key.step))
        first = max(
            (each.number for each in self._judged.values() if _is_gradient_in(each.key, judged.key.step)), default=0
        )
        return first, -(used.number if used is not None else 0)

    def _finding(self, where: str, wrong: Judged, module: str, explained: Explanation) -> Finding:
        key = wrong.key
        tensor = f"{key.what} {key.leaf}".strip() + ("" if key.name == module else f" of {key.name or 'the model'}")
        return Finding(
            where,
            module,
            tensor,
            key.step,
            key.micro_batch,
            explained.kind,
            explained.evidence,
            wrong.ratio,
            wrong.relative,
            wrong.expected,
            self._others(wrong),
        )

    def _others(self, wrong: Judged) -> tuple[str, ...]:
        if wrong.key.what not in ("gradient", "updated"):
            return ()
        found = [each for each in self._judged.values() if each.key.what == wrong.key.what]
        found = [each for each in found if each.key.step == wrong.key.step and (each.is_wrong or each.partial_axes)]
        return tuple(each.key.name for each in found if each is not wrong)

    def _blame(self, wrong: Judged) -> tuple[str, Explanation | None]:
        """Return the module in which a tensor became wrong, and the explanation if an earlier tensor has it."""
        key = wrong.key
        if key.what in ("gradient", "updated", "used"):
            return key.name, None
        if key.what in ("input", "output"):
            if (added := added_by_each(self._case, wrong)) is not None:
                return key.name, added
            for number in self._sources(key):
                source = self._by_number.get(number)
                if source is not None and source.summed_axes:
                    source = self._begin_of_sums(source)
                    axes = " and ".join(source.summed_axes)
                    evidence = f"its output is a partial sum over {axes}, which what follows takes for the whole"
                    return source.key.name, Explanation(NEVER_SUMMED, evidence)
            if key.what == "output":
                if (changed := self._changed_weight(key)) is not None:
                    return changed
                return key.name, None
            return _parent(key.name), None
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
        return key.name if key.what == "output gradient" else _parent(key.name), None

    def _begin_of_sums(self, output: Judged) -> Judged:
        """Return the first of the partial sums that each come from the one before."""
        while True:
            sources = [self._by_number.get(number) for number in self._sources(output.key)]
            earlier = [each for each in sources if each and each.summed_axes and each.number < output.number]
            if not earlier:
                return output
            output = earlier[0]

    def _module_without_sum(self, gradient: Judged) -> str:
        """Return the module that left a sum out, if the gradient of the output of a parameter's module lacks it too."""
        owner = _parent(gradient.key.name)
        for each in self._judged.values():
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
        forward = self._by_number.get(number)
        if forward is None:
            return None
        return self._judged.get(dataclasses.replace(forward.key, what=f"{forward.key.what} gradient"))

    def _users_of(self, gradient: Judged) -> list[dict[str, Any]]:
        """Return the calls that computed something from the tensor of a gradient, and did not only pass it on."""
        key = gradient.key
        forward = self._judged.get(dataclasses.replace(key, what=key.what.removesuffix(" gradient")))
        if forward is None:
            return []
        calls = [call for call in self.calls if call["step"] == key.step and forward.number in call["inputs"]]
        return [call for call in calls if forward.number not in call["outputs"]]

    def _sources(self, key: Key) -> list[int]:
        """Return the numbers of the tensors that a tensor was computed from."""
        calls = [call for call in self.calls if call["step"] == key.step and call["micro_batch"] == key.micro_batch]
        limit = self._judged[key].number
        own = [call for call in calls if key.what == "output" and call["name"] == key.name and call["call"] == key.call]
        parent = key.name if own else _parent(key.name)
        inside = [call for call in calls if _parent(call["name"]) == parent and call["name"] != parent]
        before = list(dict.fromkeys(number for call in inside for number in call["outputs"] if number < limit))
        return [*(number for call in own for number in call["inputs"]), *before[-2:]]

    def _changed_weight(self, key: Key) -> tuple[str, Explanation] | None:
        """Return the parameter of a module that has other values than the reference's, and why; at first the module."""
        for judged in self._judged.values():
            used = judged.key
            if used.what == "used" and used.step == key.step and _parent(used.name) == key.name and judged.is_wrong:
                return used.name if key.step else key.name, explain(self._case, judged)
        return None

    def _check_updates(self, step: int) -> Finding | None:
        """Find a parameter that an update changed in the reference and not on a rank."""
        for judged in self._judged.values():
            key = judged.key
            if key.what != "updated" or key.step != step:
                continue
            before = dataclasses.replace(key, what="used")
            own, then = self.reference.entries(key), self.reference.entries(before)
            if not own or not then:
                continue
            aligned = alike([each[min(each)].sketch for each in (own, then)])
            new, old = (sketch.views.get("slice") for sketch in aligned)
            if new is None or old is None or float((new != old).float().mean()) < _CHANGED:
                continue
            for rank, entry in self.suspect.entries(key).items():
                earlier = self.suspect.entries(before).get(rank)
                if earlier is None or earlier.sketch.shape != entry.sketch.shape or math.prod(entry.sketch.shape) < 2:
                    continue
                if ("P",) not in judged.layouts.values() and not any(
                    distance(*alike([earlier.sketch, entry.sketch])).values()
                ):
                    evidence = f"rank {rank} has the values of before the update, which changed the reference's"
                    return self._finding("update", judged, key.name, Explanation(STALE, evidence))
        return None

    def _check_norm(self, step: int) -> Finding | None:
        """Compare the factor of clipping with the reference's: it shows the norm that was used."""
        own, other = (
            next((each for each in recording.of_ranks("updates")[0] if each["step"] == step), None)
            for recording in (self.reference, self.suspect)
        )
        if not own or not other or own["was_clipped"] or other["was_clipped"]:
            return None
        one, two = own["clip_factor"], other["clip_factor"]
        if not one or not two or abs(two / one - 1) <= max(_FACTOR, 4 * self._eps):
            return None
        gradients = [each for each in self._judged.values() if each.key.what == "gradient" and each.key.step == step]
        if any(each.is_wrong for each in gradients):
            return None
        larger = (one / two) * (one / two)
        evidence = (
            f"all gradients are right, and clipping multiplied them by {two:.4g} instead of {one:.4g}: the square of "
            f"its norm is {larger:.3g} times the true one"
        )
        return Finding("update", "", "gradient norm", step, -1, NORM, evidence, math.inf, abs(two / one - 1), 0.0)


def _is_gradient_in(key: Key, step: int) -> bool:
    return key.what.endswith("gradient") and key.step == step


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


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
