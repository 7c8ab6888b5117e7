"""Diagnose a run: the first wrong module of the forward, the backward and the update, and the class of the fault."""

from __future__ import annotations

import dataclasses
import math
from os import PathLike
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.core.json_text import first_of
from shardwise.core.slow_work import told_if_slow
from shardwise.doctor.blame import Blame, explain
from shardwise.doctor.evidence import LABELS, NEVER_SUMMED, NORM, SAMPLES, STALE, Case, Explanation
from shardwise.doctor.findings import PASSES, Judge, Judged, Rounding, eps_of
from shardwise.doctor.micro_batches import match_micro_batches, name_of_ids, rows_read, samples_of
from shardwise.doctor.places import Key
from shardwise.doctor.recording import Recording
from shardwise.doctor.sketches import alike, distance
from shardwise.doctor.verdicts import Verdicts

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
    with told_if_slow(f"comparing {suspect} with {reference}"):
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
        self._steps = range(min(reference.steps, suspect.steps))
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
        of_data = self._check_data()
        findings = [] if of_data is None else [of_data]
        judge = Judge(self.reference, self.suspect, self.rounding, match_micro_batches(self.reference, self.suspect))
        judged = list(judge.all())
        compared = {each.key for each in judged}
        missing = sum(1 for key in self.reference.recorded if PASSES[key.what] and key not in compared)
        if missing:
            self.notes.append(f"{missing} tensors of the reference are not in the suspect, and were not compared")
        if dropped := [name for names in self.suspect.of_ranks("dropped") for name in names]:
            names = first_of(sorted(set(dropped)))
            self.notes.append(f"the recording's budget was used up; not all tensors of these are in it: {names}")
        micro_batches = {each["micro_batch"] for each in self.suspect.of_ranks("calls")[0] if not each["name"]}
        self._case = Case(judge, self.suspect.axes, max(1, len(micro_batches)))
        verdicts = Verdicts(self._case, judged, self.notes)
        self._judged, self._blame = verdicts.by_key, Blame(verdicts, self.calls)
        verdicts.excuse_inner()
        self._check_initial_weights(judged)
        for step in self._steps:
            verdicts.excuse_factor(step)
            verdicts.excuse_losses(step)
        for step in self._steps:
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
        return Diagnosis(
            findings,
            judged,
            self.rounding.is_measured,
            self.notes,
            self.suspect.axes,
            list(seen.values()),
            len(self._steps),
            self._not_recorded(judged),
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
        elif lost := lacking & {key.name for key in self.reference.recorded if key.what in ("gradient", "accumulated")}:
            found.append(f"gradients of {first_of(sorted(lost))}")
        if not any(each.key.what == "updated" for each in judged):
            found.append("parameters after an update (optimizer=... or recorder.updated() records them)")
        return found

    def _check_initial_weights(self, judged: list[Judged]) -> None:
        initial = [each for each in judged if each.key.what == "used" and each.key.step == 0]
        wrong = [each for each in initial if each.is_wrong]
        if len(wrong) > len(initial) / 2:
            raise ConfigError(
                f"{len(wrong)} of {len(initial)} parameters begin with other values in {self.suspect.folder} than in "
                f"{self.reference.folder}, {wrong[0].key.name} among them; give both runs the same initial weights"
            )

    def _check_data(self) -> Finding | None:
        for step in self._steps:
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
        judged = sorted(judged, key=self._order) if where == "backward" else judged
        judged = [each for each in judged if each.key.step == step and (PASSES[each.key.what] or "backward") == where]
        wrong = next((each for each in judged if each.is_wrong), None)
        params = (each for each in judged if each.key.what in ("gradient", "updated"))
        partial = next((each for each in params if each.partial_axes), None)
        if partial is not None and (wrong is None or judged.index(partial) < judged.index(wrong)):
            axes = " and ".join(partial.partial_axes)
            evidence = f"the sum over {axes} is the reference, and each rank has its term"
            module = self._blame.without_sum(partial) or partial.key.name
            return self._finding(where, partial, module, Explanation(NEVER_SUMMED, evidence))
        if wrong is None:
            return None
        module, cause = self._blame.of(wrong)
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
        gradients = (each for each in self._judged.values() if each.key.what.endswith("gradient"))
        first = max((each.number for each in gradients if each.key.step == judged.key.step), default=0)
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
            new, old = (sketch.slice for sketch in aligned)
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
