"""Compare two runs: find the first step, tensor and element in which their metrics or checkpoints differ."""

import itertools
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.core.errors import CheckpointError, ConfigError, DataError
from shardwise.core.files import shown
from shardwise.data.json_records import counted
from shardwise.run.metrics import MetricsFile, scan_metrics
from shardwise.storage.checkpoint.comparing import StoredCheckpoint, TensorDifference, tensor_differences
from shardwise.storage.checkpoint.folder import checkpoints
from shardwise.storage.checkpoint.manifest import MANIFEST_NAME, Manifest

# Fields of a row that are not results of its step.
_NO_RESULTS = ("step", "tokens_per_second", "mfu", "peak_allocated_bytes", "peak_resident_bytes")
_TENSORS_SHOWN = 5

# Step, name, and the value in each run.
_Difference = tuple[int, str, tuple[Any, Any]]


class Comparison(NamedTuple):
    """Result of comparing two runs.

    Attributes:
        same: True if both runs have metrics of the same steps, and if all results in the metrics and all tensors in
            checkpoints of common steps are bit-identical.
        lines: the differences, as text for the user.
    """

    same: bool
    lines: list[str]


def compare(run_a: str | PathLike[str], run_b: str | PathLike[str]) -> Comparison:
    """Compare the metrics of two runs and their checkpoints of the same steps.

    Args:
        run_a: ``--out`` of a run, or a checkpoint, which has no metrics.
        run_b: ``--out`` or a checkpoint of the other run.

    Returns:
        The result of the comparison.

    Raises:
        ConfigError: the runs have no step in common.
        CheckpointError: a checkpoint is damaged.
        DataError: a line of metrics cannot be read and is not a truncated last line.
    """
    one, other = runs = Path(run_a), Path(run_b)
    for folder in runs:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; give the --out of a training run, or one of its checkpoints")
    lines, num_steps, same = list[str](), 0, True
    if not any(_is_checkpoint(folder) for folder in runs):
        lines, num_steps, same = _compare_metrics(runs)
    found = _checkpoints(one), _checkpoints(other)
    steps = sorted(found[0].keys() & found[1].keys())
    if not steps and not num_steps:
        raise ConfigError(
            f"{one} and {other} have no step in common: checkpoints of steps {sorted(found[0]) or 'none'} and "
            f"{sorted(found[1]) or 'none'}, and no metrics of the same steps"
        )
    for step in steps:
        if differences := _checkpoint_differences(step, found[0][step], found[1][step]):
            return Comparison(False, lines + differences)
        lines.append(f"checkpoints of step {step}: the same bits")
    return Comparison(same, lines)


def results(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of the step in a row of metrics, without speeds and memory."""
    return {name: value for name, value in row.items() if name not in _NO_RESULTS}


def _compare_metrics(runs: tuple[Path, Path]) -> tuple[list[str], int, bool]:
    """Return text lines, the number of common steps, and True if all results are the same."""
    paths = [folder / "metrics.jsonl" for folder in runs]
    files = [_readable(path) for path in paths]
    notes = [f"note: the last line of {path} was cut" for path, file in zip(paths, files, strict=True) if file.is_cut]
    rows = [{row["step"]: results(row) for row in file.rows} for file in files]
    common = sorted(rows[0].keys() & rows[1].keys())
    differences: list[_Difference] = []
    alone: dict[tuple[str, Path], list[int]] = {}
    for folder, own, others in zip(runs, rows, rows[::-1], strict=True):
        if steps := sorted(own.keys() - others.keys()):
            alone["metrics", folder] = steps
    for step in common:
        both = rows[0][step], rows[1][step]
        for name in dict.fromkeys([*both[0], *both[1]]):
            if name in both[0] and name in both[1]:
                values = both[0][name], both[1][name]
                # Compare as text, because 0.0 == -0.0. Python's repr of a float is exact.
                if json.dumps(values[0]) != json.dumps(values[1]):
                    differences.append((step, name, values))
            else:
                alone.setdefault((name, runs[0] if name in both[0] else runs[1]), []).append(step)
    lines = _difference_lines(differences)
    if common and not differences and all(name == "metrics" for name, _ in alone):
        lines = [f"metrics of {counted(len(common), 'step')}: the same bits"]
    for (name, folder), steps in alone.items():
        of = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps):,} steps, the first of them step {steps[0]}"
        lines.append(f"only {folder} has {name} of {of}")
    return notes + lines, len(common), not differences and not alone


def _readable(path: Path) -> MetricsFile:
    file = scan_metrics(path)
    if file.unreadable:
        raise DataError(
            f"{path} has lines that cannot be read: {shown(file.unreadable)}; mend them, or compare checkpoints of the "
            "two runs"
        )
    return file


def _difference_lines(differences: Sequence[_Difference]) -> list[str]:
    if not differences:
        return []
    step, name, values = differences[0]
    lines = [f"metrics differ from step {step} on: {name} is {values[0]} and {values[1]}"]
    distances = [
        (abs(b - a) / abs(a), at, what)
        for at, what, (a, b) in differences
        if isinstance(a, float) and isinstance(b, float) and a
    ]
    if distances:
        largest = max(distances, key=lambda each: each[0])
        lines.append(f"  the largest distance is {largest[0]:.1e}, of {largest[2]} at step {largest[1]}")
    return lines


def _checkpoint_differences(step: int, one: Path, other: Path) -> list[str]:
    """Describe the differences between two checkpoints of a step in lines; empty if they are equal."""
    stored = StoredCheckpoint(one), StoredCheckpoint(other)
    lines = []
    # Settings include the layout and the folder of the run.
    metas = [{name: value for name, value in each.manifest.meta.items() if name != "settings"} for each in stored]
    texts = [{name: json.dumps(value, sort_keys=True) for name, value in meta.items()} for meta in metas]
    if names := [name for name in dict.fromkeys([*texts[0], *texts[1]]) if texts[0].get(name) != texts[1].get(name)]:
        lines.append(f"checkpoints of step {step}: what is kept beside tensors differs")
        for name in names:
            values = " and ".join(shown(meta[name]) if name in meta else "missing" for meta in metas)
            lines.append(f"  {name} is {values}")
    differences = tensor_differences(*stored)
    if first := list(itertools.islice(differences, _TENSORS_SHOWN)):
        more = sum(1 for _ in differences)
        verb = "differ" if len(first) + more > 1 else "differs"
        lines.append(f"checkpoints of step {step}: {counted(len(first) + more, 'tensor')} {verb}")
        lines += (f"  {_line(difference)}" for difference in first)
        if more:
            lines.append(f"  and {more} more")
    return lines


def _is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step; for a checkpoint, only itself."""
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
