"""Judge two runs that differ: repeat their steps on one rank, and compare both with the repetition.

A result of a run is judged by its difference from one rank's, divided by the expected rounding: the difference of the
same step on one rank with another rounding.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.core.atomic_files import read_regular
from shardwise.core.errors import ConfigError, OutOfMemoryError
from shardwise.core.json_text import parse_json, shown
from shardwise.doctor.findings import MOST_ROUNDING, RARE
from shardwise.doctor.repeating import Repetition, command_of, repeat, settings_on_one_rank
from shardwise.doctor.sketches import Sketch, distance
from shardwise.storage.checkpoint.comparing import StoredCheckpoint
from shardwise.storage.checkpoint.manifest import Manifest

MOST_STEPS = 20
"""Steps that are repeated at most."""

# Sections and fields that choose a layout, what is stored or how fast it goes, but not the results.
_NO_EXPERIMENT = {
    "": {
        *("out", "data", "resume", "device", "timeout", "validate", "peak_tflops", "parallel", "recompute", "profile"),
        *("record_routing", "track"),
    },
    "lora": {"lora_merge"},
    "training": {
        "micro_batch_size",
        "eval_every",
        "save_every",
        "save_minutes",
        "keep_checkpoints",
        "asynchronous_saves",
        "doctor_every",
        "tensorboard",
        "loss",
    },
}
_MAX_BYTES = 1 << 24
# The rounding of a metric is the largest of its first steps at least, since two roundings may agree by chance in one.
_FEW_STEPS = 4
# Rounding decides ties in these shares of samples. The losses and rewards behind them are judged.
_COUNTED = ("accuracy", "accuracies", "f1")
# Kinds of the optimizer's tensors that grow in proportion to the gradient.
_OF_GRADIENTS = ("exp_avg", "momentum")
_BACKWARD = "the backward, or a sum of it"


@dataclass(frozen=True)
class OneRun:
    """A run, or one checkpoint of it: metrics by step, and checkpoints by the number of completed steps."""

    folder: Path
    rows: Mapping[int, Mapping[str, Any]]
    checkpoints: Mapping[int, Path]

    def settings(self) -> dict[str, Any]:
        """Return the settings that the run left, or raise ConfigError."""
        for step in sorted(self.checkpoints, reverse=True):
            values = Manifest.read(self.checkpoints[step]).meta.get("settings")
            if isinstance(values, dict):
                return values
        path = self.folder / "settings.json"
        if not path.is_file():
            raise ConfigError(f"{self.folder} has no settings of a run")
        try:
            return parse_json(read_regular(path, limit=_MAX_BYTES))
        except ValueError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True)
class JudgedResult:
    """A result of both runs, and how many times the expected rounding each is ``away`` from one rank's."""

    name: str
    step: int
    away: tuple[float, float]
    expected: float

    @property
    def ratio(self) -> float:
        """The larger of ``away``; infinite for NaN."""
        return max(each if each == each else math.inf for each in self.away)

    @property
    def is_wrong(self) -> bool:
        """Whether a run differs from one rank by more than rounding."""
        return self.ratio > MOST_ROUNDING


@dataclass
class Judgement:
    """Judgement of two runs: the metrics and tensors that differ, the worst first, and what it means."""

    steps: range
    dtypes: tuple[str, str]
    metrics: list[JudgedResult] = field(default_factory=list)
    tensors: list[JudgedResult] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def what(self) -> str:
        """Say what both runs are compared with."""
        one, two = self.dtypes
        how = f"in {one} and with perturbed operations" if one == two else f"in {one} and {two}"
        return (
            f"each result is followed by its distance from one rank's, which repeated steps {self.steps.start} to "
            f"{self.steps.stop - 1} {how}"
        )

    @property
    def worst(self) -> JudgedResult | None:
        """The result with the largest ratio."""
        return max([*self.metrics, *self.tensors], key=lambda each: each.ratio, default=None)


def check_settings(runs: tuple[OneRun, OneRun]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of two plain runs of one experiment; raise ConfigError if they are not."""
    one, two = runs[0].settings(), runs[1].settings()
    both = _with_routing(one, two), _with_routing(two, one)
    exact = [is_exact(settings) for settings in both]
    if any(exact):
        raise ConfigError("both runs are exact" if all(exact) else f"{runs[exact.index(True)].folder} is exact")
    flat = [dict(_experiment(settings)) for settings in both]
    names = [name for name in dict.fromkeys([*flat[0], *flat[1]]) if flat[0].get(name) != flat[1].get(name)]
    if names:
        words = [f"{name} is {shown(flat[0].get(name))} and {shown(flat[1].get(name))}" for name in names[:3]]
        raise ConfigError(f"the settings of the runs differ: {'; '.join(words)}")
    return both


def _with_routing(settings: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with a replay of the recorded routing instead of the record, if the other run replays it."""
    recorded = settings.get("record_routing")
    if recorded is None or recorded != other.get("replay_routing"):
        return settings
    return settings | {"record_routing": None, "replay_routing": recorded}


def is_exact(settings: Mapping[str, Any]) -> bool:
    """Whether a run with these settings was exact."""
    parallel = settings.get("parallel", {})
    return isinstance(parallel, dict) and parallel.get("exact") is True


def judge(
    runs: tuple[OneRun, OneRun],
    *,
    base: int,
    first: int,
    metrics: Iterable[tuple[int, str]],
    tensors: tuple[int, Sequence[str]] | None,
    on_repeat: Callable[[str], object],
) -> Judgement:
    """Judge the differences of two runs.

    Args:
        runs: the runs.
        base: number of completed steps of the last checkpoint with the same bits; 0 for none.
        first: first step that differs.
        metrics: steps and names of metrics that differ.
        tensors: number of completed steps and names of the tensors that differ, of the first checkpoint that does.
        on_repeat: callback for a message, called before steps are repeated.

    Raises:
        ShardwiseError: they cannot be judged; the message says why.
    """
    settings, _ = check_settings(runs)
    last = max(*(max(run.rows, default=-1) for run in runs), first if tensors is None else tensors[0] - 1)
    stop = min(base + MOST_STEPS, last + 1)
    if first >= stop:
        raise ConfigError(
            f"the first difference is {first + 1 - base} steps after "
            f"{f'the checkpoint of step {base}' if base else 'the start'}, and at most {MOST_STEPS} steps are repeated"
        )
    metrics = [(step, name) for step, name in metrics if step < stop]
    if tensors is not None and tensors[0] > stop:
        tensors = None
    steps = range(base, stop)
    if base and base not in runs[0].checkpoints:
        raise ConfigError(f"{runs[0].folder} has no checkpoint of step {base}")
    on_repeat(f"repeating steps {base} to {stop - 1} on one rank, twice; --no-rerun skips this")
    folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
    try:
        own, other = repeat(
            settings_on_one_rank(settings),
            steps,
            base=runs[0].checkpoints[base] if base else None,
            saved=next(iter(runs[0].checkpoints.values()), None),
            evaluated={step for step, name in metrics if name.startswith("held_out")},
            kept=() if tensors is None else (tensors[0],),
            folder=folder / "recording",
        )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(f"one rank has too little memory for the run: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    judgement = Judgement(steps, (own.dtype, other.dtype))
    judgement.metrics = sorted(_metrics(runs, metrics, own, other), key=lambda each: -each.ratio)
    if tensors is not None:
        judgement.tensors = sorted(_tensors(runs, *tensors, own, other), key=lambda each: -each.ratio)
    judgement.lines = _meaning(runs, judgement, own, tensors, command_of(settings))
    return judgement


def _experiment(settings: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    optimizer = settings.get("optimizer")
    constant = isinstance(optimizer, dict) and optimizer.get("schedule") == "constant"
    for name, value in settings.items():
        if name in _NO_EXPERIMENT[""]:
            continue
        if not isinstance(value, dict):
            yield name, value
            continue
        for key, inner in value.items():
            if key not in _NO_EXPERIMENT.get(name, ()) and not (constant and (name, key) == ("training", "steps")):
                yield f"{name}.{key}", inner


def _metrics(
    runs: tuple[OneRun, OneRun], differing: Sequence[tuple[int, str]], own: Repetition, other: Repetition
) -> Iterable[JudgedResult]:
    eps = torch.finfo(torch.float32).eps
    relative: dict[str, dict[int, float]] = {}
    for step, row in own.rows.items():
        for name, value in row.items():
            apart = abs(other.rows[step].get(name, math.nan) - value)
            relative.setdefault(name, {})[step] = apart / abs(value) if value and math.isfinite(apart) else 0.0
    for step, name in differing:
        if name.endswith(_COUNTED):
            continue
        reference = own.rows[step].get(name, math.nan)
        values = [float(run.rows[step][name]) for run in runs]
        until = max(step, min(own.rows) + _FEW_STEPS - 1)
        before = {key: max(found.get(at, 0.0) for at in own.rows if at <= until) for key, found in relative.items()}
        expected = max(before.get(name, 0.0), 4 * eps)
        if before.get(name):
            expected = max(expected, 0.05 * max(before.values()))
        scale = expected * abs(reference) or 1e-300
        away = tuple(abs(value - reference) / scale for value in values)
        yield JudgedResult(name, step, (away[0], away[1]), expected)


def _tensors(
    runs: tuple[OneRun, OneRun], step: int, names: Sequence[str], own: Repetition, other: Repetition
) -> Iterable[JudgedResult]:
    stored = [StoredCheckpoint(run.checkpoints[step]) for run in runs]
    one, two = own.states[step], other.states[step]
    rounding, sizes = {}, {}
    for name, tensor in one.items():
        if tensor.is_floating_point():
            rounding[name], sizes[name] = _apart(name, tensor, two[name]), _rms(tensor)
    usual = {}
    for kind in {_kind(name) for name in rounding}:
        shares = [rounding[name] / sizes[name] for name in rounding if _kind(name) == kind and sizes[name] > 0]
        usual[kind] = statistics.median(shares) if shares else 0.0
    for name in names:
        if name not in rounding or any(list(one[name].shape) != _shape(each, name) for each in stored):
            yield JudgedResult(name, step, (math.inf, math.inf), 0.0)
            continue
        eps = torch.finfo(one[name].dtype).eps
        expected = max(rounding[name], sizes[name] * max(0.25 * usual[_kind(name)], 0.5 * eps), 1e-300)
        away = [_apart(name, _read(each, name), one[name]) / expected for each in stored]
        yield JudgedResult(name, step, (away[0], away[1]), expected / (sizes[name] or 1.0))


def _kind(name: str) -> str:
    part, _, rest = name.partition(".")
    return rest.partition(".")[0] if part == "optimizer" else part


def _shape(stored: StoredCheckpoint, name: str) -> list[int] | None:
    record = stored.manifest.tensors.get(name)
    return None if record is None else list(record.shape)


def _read(stored: StoredCheckpoint, name: str) -> Tensor:
    shape = stored.manifest.tensors[name].shape
    return stored.read(name, [0] * len(shape), shape)


def _apart(name: str, one: Tensor, other: Tensor) -> float:
    """Return the root mean square of the difference; of weights without the rare elements of whole updates."""
    whole = [Sketch.of(each, most_elements=each.numel()).doubled() for each in (one, other)]
    return distance(*whole, left_out=RARE if _kind(name) == "model" else 0.0).get("slice", 0.0)


def _rms(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.double().square().mean())) if tensor.numel() else 0.0


def _meaning(
    runs: tuple[OneRun, OneRun],
    judgement: Judgement,
    own: Repetition,
    tensors: tuple[int, Sequence[str]] | None,
    command: str,
) -> list[str]:
    worst = judgement.worst
    steps = judgement.steps
    last = max((step for run in runs for step in run.rows), default=0)
    later = [f"steps {steps.stop} to {last} were not repeated, and are not judged"] if last >= steps.stop else []
    if worst is None or not worst.is_wrong:
        most = 0.0 if worst is None else worst.ratio
        return [
            f"only rounding: no result of steps {steps.start} to {steps.stop - 1} is more than {most:.1f} times the "
            f"expected rounding from one rank's (a fault: more than {MOST_ROUNDING:.0f} times)",
            *later,
        ]
    results = [*judgement.metrics, *judgement.tensors]
    wrong = [
        run.folder
        for at, run in enumerate(runs)
        if any(not each.away[at] <= MOST_ROUNDING for each in results if each.is_wrong)
    ]
    lines = [f"a fault is suspected in {' and in '.join(map(str, wrong))}, by the same steps on one rank"]
    part = _part(judgement)
    lines += [f"  {part}"] if part else []
    if judgement.tensors and tensors is not None:
        at = 0 if wrong[0] == runs[0].folder else 1
        stored = StoredCheckpoint(runs[at].checkpoints[tensors[0]])
        lines += [f"  {line}" for line in _suspected_parameters(stored, judgement, own, has_factor=_BACKWARD in part)]
    lines.append(f"  shardwise doctor {command}, with the flags of {wrong[0]}, names the first wrong module")
    return lines + later


def _part(judgement: Judgement) -> str:
    wrong = {(each.step, each.name) for each in judgement.metrics if each.is_wrong}
    for step in judgement.steps:
        here = {name for at, name in wrong if at == step and not name.startswith("held_out")}
        if here - {"grad_norm", "learning_rate", "loss_scale", "skipped"}:
            if step == judgement.steps.start:
                return f"the loss of step {step} is wrong: the forward, or the data"
            return f"the loss of step {step} is wrong, and the gradient norms before are right: the update before"
        if "grad_norm" in here:
            return f"the loss of step {step} is right, and its gradient norm is wrong: {_BACKWARD}"
        if here:
            return f"{', '.join(sorted(here))} of step {step} is wrong"
    return ""


def _suspected_parameters(
    stored: StoredCheckpoint, judgement: Judgement, own: Repetition, *, has_factor: bool
) -> list[str]:
    """Name the parameters whose gradients differ most, after a factor that all have in common."""
    step = judgement.tensors[0].step
    judged = {each.name: each for each in judgement.tensors if _kind(each.name) in _OF_GRADIENTS}
    factors: dict[str, float] = {}
    read: dict[str, Tensor] = {}
    for name in judged:
        if math.isinf(judged[name].expected) or list(own.states[step][name].shape) != _shape(stored, name):
            continue
        one, read[name] = own.states[step][name].double(), _read(stored, name).double()
        square = float(one.square().sum())
        if square > 0:
            factors[name] = float((one * read[name]).sum()) / square
    if not factors:
        names = [each.name for each in judgement.tensors if each.is_wrong]
        return [f"the tensors that differ most: {', '.join(names[:3])}"] if names else []
    # Clipping by a wrong norm scales all gradients.
    common = statistics.median(factors.values())
    if not common > 0:
        common = 1.0
    left = {}
    for name in factors:
        one = own.states[step][name].double()
        scale = judged[name].expected * (_rms(one) or 1e-300)
        left[name] = _apart(name, read[name] / common, one) / scale
    lines = []
    if has_factor and abs(common - 1) > MOST_ROUNDING * statistics.median(judged[name].expected for name in factors):
        lines.append(f"gradients of most parameters have {common:.6g} times their size: clipping, or a factor of all")
    names = sorted((name for name in left if left[name] > MOST_ROUNDING), key=lambda name: -left[name])
    if names:
        # Names of the optimizer's tensors end with those of parameters.
        shown_names = ", ".join(name.split(".", 2)[-1] for name in names[:3])
        lines.append(f"gradients that differ most: {shown_names} ({left[names[0]]:,.0f} times the expected rounding)")
    return lines
