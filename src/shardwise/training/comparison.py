"""Where two runs part: the first step, tensor and element in which their metrics or checkpoints differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from shardwise.checkpoint.comparing import TensorDifference, tensor_differences
from shardwise.checkpoint.folder import checkpoints
from shardwise.checkpoint.manifest import Manifest
from shardwise.errors import CheckpointError, ConfigError
from shardwise.training.metrics import read_metrics

# What a step computes; speeds and memory are another matter.
RESULTS = ("loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "held_out_bits_per_byte")
_TENSORS_SHOWN = 5


def compare_runs(one: Path, other: Path) -> tuple[bool, list[str]]:
    """Compare two runs' metrics, and their checkpoints of the same steps.

    Args:
        one: ``--out`` of a run, or a checkpoint.
        other: of another.

    Returns:
        Whether all that both have is the same bit for bit, and lines for people.

    Raises:
        ConfigError: there is nothing that both have.
        CheckpointError: a checkpoint is damaged.
    """
    for folder in (one, other):
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; give the --out of a training run, or one of its checkpoints")
    same_metrics, lines = _compare_metrics(one, other)
    found = _checkpoints(one), _checkpoints(other)
    steps = sorted(found[0].keys() & found[1].keys())
    if not steps and not lines:
        raise ConfigError(
            f"{one} and {other} have no step in common: checkpoints of steps {sorted(found[0]) or 'none'} and "
            f"{sorted(found[1]) or 'none'}, and no metrics of the same steps"
        )
    same_tensors = True
    for step in steps:
        differences = tensor_differences(found[0][step], found[1][step])
        shown = list(itertools.islice(differences, _TENSORS_SHOWN))
        if not shown:
            lines.append(f"checkpoints of step {step}: the same bits")
            continue
        same_tensors = False
        more = sum(1 for _ in differences)
        lines.append(f"checkpoints of step {step}: {len(shown) + more} tensors differ")
        lines += (f"  {_line(difference)}" for difference in shown)
        if more:
            lines.append(f"  and {more} more")
        break
    return same_metrics and same_tensors, lines


def _compare_metrics(one: Path, other: Path) -> tuple[bool, list[str]]:
    rows = [{row["step"]: row for row in read_metrics(folder / "metrics.jsonl")} for folder in (one, other)]
    steps = sorted(rows[0].keys() & rows[1].keys())
    if not steps:
        return True, []
    differences = list(_metric_differences(rows[0], rows[1], steps))
    if not differences:
        return True, [f"metrics of {len(steps)} steps: the same bits"]
    step, name, values = differences[0]
    line = f"metrics differ from step {step} on: {name} is {values[0]} and {values[1]}"
    largest = max((abs(b - a) / abs(a), at, what) for at, what, (a, b) in differences if a) if differences else None
    return False, [
        line,
        *([f"  the largest distance is {largest[0]:.1e}, of {largest[2]} at step {largest[1]}"] if largest else []),
    ]


def _metric_differences(
    one: dict[int, dict[str, float]], other: dict[int, dict[str, float]], steps: list[int]
) -> Iterator[tuple[int, str, tuple[float, float]]]:
    for step in steps:
        for name in RESULTS:
            values = one[step].get(name), other[step].get(name)
            if values[0] is not None and values[1] is not None and values[0] != values[1]:
                yield step, name, (values[0], values[1])


def _checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step; of a checkpoint itself."""
    if (folder / "meta.json").is_file():
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
