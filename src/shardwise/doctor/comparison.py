"""Compare two runs: find the first step, tensor and element in which their metrics or checkpoints differ.

Differences of plain runs are judged: the steps are repeated on one rank, which gives each result a reference and the
expected rounding (``doctor.compare_runs``).
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardwise.core.errors import CheckpointError, ConfigError, DataError, ShardwiseError
from shardwise.core.json_text import shown
from shardwise.data.json_records import counted
from shardwise.doctor.compare_runs import JudgedResult, Judgement, OneRun, check_settings, judge
from shardwise.run.metrics import SAMPLES, MetricsFile, scan_metrics
from shardwise.run.pictures import check_picture, draw_folders
from shardwise.storage.checkpoint.comparing import StoredCheckpoint, TensorDifference, tensor_differences
from shardwise.storage.checkpoint.folder import checkpoints
from shardwise.storage.checkpoint.manifest import MANIFEST_NAME, Manifest
from shardwise.training.bounds import require

# Fields of a row that are not results of its step.
_SPEEDS = ("tokens_per_second", "computed_tokens_per_second", "learned_tokens_per_second", "mfu")
_NO_RESULTS = ("step", *_SPEEDS, "peak_allocated_bytes", "peak_resident_bytes")
# Differences that are shown.
_SHOWN = 5
# Name for the whole row of a step.
_ALL = "metrics"

# Step, name, and the value in each run.
_Difference = tuple[int, str, tuple[Any, Any]]

Verdict = Literal["same bits", "rounding", "fault", "different"]
"""Of two runs: all results have the same bits; all differences are rounding; a fault is suspected; they differ, and
that was not judged."""


class Comparison(NamedTuple):
    """Result of comparing two runs.

    Attributes:
        lines: the differences, as text for the user.
    """

    verdict: Verdict
    lines: list[str]

    @property
    def is_sound(self) -> bool:
        """Whether all results have the same bits, or differ by rounding alone."""
        return self.verdict in ("same bits", "rounding")


def compare(
    run_a: str | PathLike[str],
    run_b: str | PathLike[str],
    *,
    rerun: bool = True,
    picture: str | PathLike[str] | None = None,
    also: Sequence[str | PathLike[str]] = (),
    on_repeat: Callable[[str], object] = lambda text: None,
) -> Comparison:
    """Compare the metrics of two runs and their checkpoints of the same steps, and judge the differences.

    The judgement repeats at most 20 steps on one rank, in this process: from the last checkpoint that has the same bits
    in both runs, or from the start.

    Args:
        run_a: ``--out`` of a run, or a checkpoint, which has no metrics.
        run_b: ``--out`` or a checkpoint of the other run.
        rerun: whether to judge differences.
        picture: PNG or SVG file for a picture of the losses of the runs, drawn first.
        also: further runs, which only the picture has.
        on_repeat: callback for a message, called when steps are repeated.

    Returns:
        The result of the comparison. If an exact run differs, or if the differences cannot be judged, the verdict is
        ``"different"``.

    Raises:
        ConfigError: the runs have no step in common, or there is nothing to draw or no matplotlib.
        CheckpointError: a checkpoint is damaged.
        DataError: a line of metrics cannot be read and is not a truncated last line.
    """
    for folder in (Path(run_a), Path(run_b)):
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; give the --out of a training run, or one of its checkpoints")
    require(picture is not None or not also, "--also is for --picture, which is not given; give it")
    if picture is not None:
        check_picture(picture)
        draw_folders([run_a, run_b, *also], picture)
    notes = list[str]()
    has_metrics = not any(_is_checkpoint(Path(folder)) for folder in (run_a, run_b))
    runs = _read(Path(run_a), notes, has_metrics=has_metrics), _read(Path(run_b), notes, has_metrics=has_metrics)
    found = _differences(runs)
    if not found.steps and not found.checkpoints:
        raise ConfigError(
            f"{runs[0].folder} and {runs[1].folder} have no step in common: checkpoints of steps "
            f"{sorted(runs[0].checkpoints) or 'none'} and {sorted(runs[1].checkpoints) or 'none'}, and no metrics of "
            "the same steps"
        )
    if found.is_same:
        return Comparison("same bits", notes + found.lines(None))
    if not rerun:
        return Comparison("different", notes + found.lines(None))
    try:
        judgement = _judged(runs, found, on_repeat)
    except ShardwiseError as error:
        return Comparison("different", [*notes, *found.lines(None), f"different, not judged: {error}"])
    lines = [*notes, judgement.what(), *found.lines(judgement), *judgement.lines]
    if judgement.worst is not None and judgement.worst.is_wrong:
        return Comparison("fault", lines)
    return Comparison("rounding", lines)


def results(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of the step in a row of metrics, without speeds and memory."""
    return {name: value for name, value in row.items() if name not in _NO_RESULTS}


@dataclass
class _Differences:
    """Differences of two runs: ``checkpoints`` up to the first that differs, and how that one does."""

    steps: list[int]
    metrics: list[_Difference]
    alone: dict[tuple[str, Path], list[int]]
    checkpoints: list[int]
    facts: list[str]
    tensors: list[TensorDifference]

    @property
    def has_same_checkpoints(self) -> bool:
        return not self.facts and not self.tensors

    @property
    def is_same(self) -> bool:
        return self.has_same_checkpoints and not self.metrics and not self.alone

    def lines(self, judgement: Judgement | None) -> list[str]:
        """Return the differences as text, the largest first, with their judgement if there is one."""
        lines = self._metric_lines(judgement)
        if self.steps and not self.metrics and all(name == _ALL for name, _ in self.alone):
            lines.append(f"metrics of {counted(len(self.steps), 'step')}: the same bits")
        for (name, folder), steps in self.alone.items():
            of = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps):,} steps, the first of them step {steps[0]}"
            lines.append(f"only {folder} has {name} of {of}")
        differing = [] if self.has_same_checkpoints else self.checkpoints[-1:]
        lines += [f"checkpoints of step {step}: the same bits" for step in self.checkpoints if step not in differing]
        lines += self.facts
        if self.tensors:
            verb = "differ" if len(self.tensors) > 1 else "differs"
            lines.append(f"checkpoints of step {differing[0]}: {counted(len(self.tensors), 'tensor')} {verb}")
            lines += self._tensor_lines(judgement)
        return lines

    def _metric_lines(self, judgement: Judgement | None) -> list[str]:
        if not self.metrics:
            return []
        step, name, values = self.metrics[0]
        lines = [f"metrics differ from step {step} on: {name} is {values[0]} and {values[1]}"]
        if judgement is not None:
            both = {(at, what): pair for at, what, pair in self.metrics}
            for each in judgement.metrics[:_SHOWN]:
                a, b = both[each.step, each.name]
                lines.append(f"  {each.name} of step {each.step}: {a} and {b}, {_away(each)}")
            return lines
        distances = [
            (abs(b - a) / abs(a), at, what)
            for at, what, (a, b) in self.metrics
            if isinstance(a, float) and isinstance(b, float) and a
        ]
        if distances:
            largest = max(distances, key=lambda each: each[0])
            lines.append(f"  the largest distance is {largest[0]:.1e}, of {largest[2]} at step {largest[1]}")
        return lines

    def _tensor_lines(self, judgement: Judgement | None) -> list[str]:
        judged = {} if judgement is None else {each.name: each for each in judgement.tensors}

        def size(difference: TensorDifference) -> float:
            by = judged[difference.name].ratio if difference.name in judged else difference.distance
            return math.inf if difference.facts is not None or by != by else by

        ordered = sorted(self.tensors, key=lambda each: -size(each))
        lines = []
        for each in ordered[:_SHOWN]:
            away = f", {_away(judged[each.name])}" if each.name in judged else ""
            lines.append(f"  {_line(each)}{away}")
        if len(ordered) > _SHOWN:
            lines.append(f"  and {len(ordered) - _SHOWN} more")
        return lines


def _judged(runs: tuple[OneRun, OneRun], found: _Differences, on_repeat: Callable[[str], object]) -> Judgement:
    check_settings(runs)
    lacking = [name for name, _ in found.alone if name != _ALL and not name.startswith("held_out")]
    if lacking:
        raise ConfigError(f"one run lacks {', '.join(dict.fromkeys(lacking))} in some steps")
    if found.facts:
        raise ConfigError("contents of the checkpoints other than tensors differ")
    if any(not isinstance(value, float) for _, _, pair in found.metrics for value in pair):
        raise ConfigError("a metric is not a number")
    equal = [step for step in found.checkpoints if found.has_same_checkpoints or step != found.checkpoints[-1]]
    starts = [step for step, _, _ in found.metrics[:1]]
    tensors = None
    if found.tensors:
        tensors = found.checkpoints[-1], [each.name for each in found.tensors]
        starts.append(tensors[0] - 1)
    if not starts:
        raise ConfigError("the runs have no result of the same step that differs")
    base = max((step for step in equal if step <= min(starts)), default=0)
    differing = [(step, name) for step, name, _ in found.metrics]
    return judge(runs, base=base, first=min(starts), metrics=differing, tensors=tensors, on_repeat=on_repeat)


def _away(judged: JudgedResult) -> str:
    one, other = (f"{each:,.1f}" for each in judged.away)
    return f"{one} and {other} times the expected rounding of {judged.expected:.1e}"


def _read(folder: Path, notes: list[str], *, has_metrics: bool) -> OneRun:
    rows = {}
    if has_metrics:
        path = folder / "metrics.jsonl"
        file = _readable(path)
        if file.is_cut:
            notes.append(f"note: the last line of {path} was cut")
        rows = {row["step"]: results(row) for row in file.rows}
    return OneRun(folder, rows, _checkpoints(folder))


def _differences(runs: tuple[OneRun, OneRun]) -> _Differences:
    rows = [run.rows for run in runs]
    common = sorted(rows[0].keys() & rows[1].keys())
    metrics: list[_Difference] = []
    alone: dict[tuple[str, Path], list[int]] = {}
    for run, others in zip(runs, rows[::-1], strict=True):
        if steps := sorted(run.rows.keys() - others.keys()):
            alone[_ALL, run.folder] = steps
    for step in common:
        both = rows[0][step], rows[1][step]
        # Runs of other lengths measure other parts of the held-out data before their ends.
        is_other = SAMPLES in both[0] and SAMPLES in both[1] and both[0][SAMPLES] != both[1][SAMPLES]
        for name in dict.fromkeys([*both[0], *both[1]]):
            if name == SAMPLES or (is_other and name.startswith("held_out")):
                continue
            if name in both[0] and name in both[1]:
                values = both[0][name], both[1][name]
                # Compare as text, because 0.0 == -0.0. Python's repr of a float is exact.
                if json.dumps(values[0]) != json.dumps(values[1]):
                    metrics.append((step, name, values))
            else:
                alone.setdefault((name, (runs[0] if name in both[0] else runs[1]).folder), []).append(step)
    checkpoints: list[int] = []
    facts: list[str] = []
    tensors: list[TensorDifference] = []
    for step in sorted(runs[0].checkpoints.keys() & runs[1].checkpoints.keys()):
        checkpoints.append(step)
        stored = StoredCheckpoint(runs[0].checkpoints[step]), StoredCheckpoint(runs[1].checkpoints[step])
        facts, tensors = _facts(step, stored), list(tensor_differences(*stored))
        if facts or tensors:
            break
    return _Differences(common, metrics, alone, checkpoints, facts, tensors)


def _readable(path: Path) -> MetricsFile:
    file = scan_metrics(path)
    if file.unreadable:
        raise DataError(
            f"{path} has lines that cannot be read: {shown(file.unreadable)}; mend them, or compare checkpoints of the "
            "two runs"
        )
    return file


def _facts(step: int, stored: tuple[StoredCheckpoint, StoredCheckpoint]) -> list[str]:
    # Settings include the layout and the folder of the run.
    metas = [{name: value for name, value in each.manifest.meta.items() if name != "settings"} for each in stored]
    texts = [{name: json.dumps(value, sort_keys=True) for name, value in meta.items()} for meta in metas]
    names = [name for name in dict.fromkeys([*texts[0], *texts[1]]) if texts[0].get(name) != texts[1].get(name)]
    lines = [f"checkpoints of step {step}: contents other than tensors differ"] if names else []
    for name in names:
        values = " and ".join(shown(meta[name]) if name in meta else "missing" for meta in metas)
        lines.append(f"  {name} is {values}")
    return lines


def _is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()


def _checkpoints(folder: Path) -> dict[int, Path]:
    if _is_checkpoint(folder):
        return {Manifest.read(folder).step: folder}
    root = folder / "checkpoints"
    if not root.is_dir():
        return {}
    readable, damaged = checkpoints(root)
    if damaged:
        raise CheckpointError(str(damaged[0][1])) from damaged[0][1]
    return {manifest.step: path for path, manifest in readable}


def _line(difference: TensorDifference) -> str:
    if difference.facts is not None:
        return f"{difference.name} {difference.facts}"
    share = f"{difference.num_different:,} of {difference.num_elements:,} elements"
    values = " and ".join(map(repr, difference.values))
    place = f"{difference.name}{list(difference.first)}"
    return f"{place}: {values}; {share} differ, relative distance {difference.distance:.1e}"
