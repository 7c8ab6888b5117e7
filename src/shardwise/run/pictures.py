"""Pictures of the metrics of runs, and of evaluations."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise.core.atomic_files import check_output, write_output
from shardwise.core.errors import ConfigError
from shardwise.run.metrics import read_metrics

Rows = Sequence[Mapping[str, Any]]
_FORMATS = (".png", ".svg")
_PANELS = {"learning_rate": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens/s"}
_LONGEST_TITLE, _LONGEST_NAME = 80, 40
# Above the highest point of a panel.
_ROOM = 1.1
_HELD_OUT = {"marker": "o", "markersize": 4, "linewidth": 1.5}


def import_pyplot() -> Any:
    """Return matplotlib's pyplot, for pictures in files."""
    # matplotlib logs a warning about each folder that it cannot write to.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except (Exception, SystemExit) as error:  # an optional package can fail in any way
        raise ConfigError(
            f"no picture: matplotlib cannot be imported ({error}); pip install 'shardwise[plots]'"
        ) from error
    return pyplot


def check_picture(path: str | PathLike[str]) -> None:
    """Raise ConfigError unless a file can be written, and its name ends in a known format."""
    if Path(path).suffix not in _FORMATS:
        raise ConfigError(f"--picture {path} is no picture; its name must end in {' or '.join(_FORMATS)}")
    check_output(path, flag="--picture")


def save_picture(pyplot: Any, figure: Any, path: str | PathLike[str]) -> None:
    """Write a figure into a PNG or SVG file, and close it."""
    written = io.BytesIO()
    with warnings.catch_warnings():
        # The font may lack characters of the title.
        warnings.simplefilter("ignore")
        figure.savefig(written, dpi=120, format=Path(path).suffix[1:])
    pyplot.close(figure)
    write_output(path, lambda file: file.write(written.getvalue()), flag="--picture")


def draw_folders(folders: Sequence[str | PathLike[str]], path: str | PathLike[str]) -> None:
    """Draw the runs in some folders. Raises as ``draw_runs``, and ConfigError if a folder has no metrics."""
    runs = {os.fspath(folder): read_metrics(Path(folder) / "metrics.jsonl") for folder in folders}
    if lacking := [name for name, rows in runs.items() if not rows]:
        raise ConfigError(f"{lacking[0]} has no metrics to draw; give the --out of a training run")
    title = f"{len(runs)} runs: lines of training batches, points of held-out data"
    if any("bits_per_byte" in row for rows in runs.values() for row in rows):
        draw_runs(runs, path, title=title)
    else:
        draw_runs(runs, path, title=title, curves=("loss", "held_out_loss"), unit="loss")


def draw_runs(
    runs: Mapping[str, Rows],
    path: str | PathLike[str],
    *,
    title: str,
    references: Mapping[str, float] | None = None,
    curves: tuple[str, str] = ("bits_per_byte", "held_out_bits_per_byte"),
    unit: str = "bits per byte",
) -> None:
    """Plot the losses of runs over the steps; below them learning rate, gradient norm, tokens/s and loads of experts.

    Args:
        runs: rows of ``metrics.jsonl`` by the name of the run.
        path: PNG or SVG file to write.
        title: title of the plot.
        references: horizontal lines, by name, in the same unit.
        curves: names of the metrics of training batches and of held-out data.
        unit: unit of both metrics.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = import_pyplot()
    is_one = len(runs) == 1
    has_loads = is_one and any("expert_load_max" in row for rows in runs.values() for row in rows)
    layout = [["loss"] * 3, list(_PANELS), *([["loads"] * 3] if has_loads else [])]
    heights = [3.2, 1.3, 1.5][: len(layout)]
    figure, axes = pyplot.subplot_mosaic(
        layout, figsize=(9, 1.3 + sum(heights)), layout="constrained", height_ratios=heights
    )
    loss = axes["loss"]
    for number, (name, rows) in enumerate(zip(_short_names(runs), runs.values(), strict=True)):
        first = {"linewidth": 1.0, "alpha": 0.6, "color": f"C{number}"}
        second = {**_HELD_OUT, "color": f"C{number + is_one}"}
        for key, label, style in (
            (curves[0], "training batch" if is_one else name, first),
            (curves[1], "held-out data" if is_one else None, second),
        ):
            if points := _points(rows, key):
                loss.plot(*zip(*points, strict=True), label=label, **style)
        for key in _PANELS:
            if points := _points(rows, key):
                axes[key].plot(*zip(*points, strict=True), linewidth=1.0, color=f"C{number}")
    for number, (name, value) in enumerate((references or {}).items()):
        loss.axhline(value, linestyle="--", linewidth=1.0, color=f"C{number + 2}", label=f"{name}: {value:.2f}")
    loss.set(xlabel="step", ylabel=unit, ylim=(0, None))
    # Dollar signs of file names would start a formula.
    loss.set_title(_short(title, _LONGEST_TITLE), parse_math=False)
    for key, name in _PANELS.items():
        axes[key].set_title(name, fontsize="small")
        axes[key].tick_params(labelsize="x-small")
        axes[key].locator_params(nbins=4)
        axes[key].ticklabel_format(axis="y", scilimits=(-3, 4))
        axes[key].yaxis.offsetText.set_fontsize("x-small")
        highest = axes[key].dataLim.y1
        axes[key].set_ylim(0, _ROOM * highest if highest > 0 else 1)
    if has_loads:
        (rows,) = runs.values()
        keys = ("step", "expert_load_min", "expert_load_max")
        loads = [[row[key] for key in keys] for row in rows if keys[1] in row]
        below = axes["loads"]
        below.fill_between(*zip(*loads, strict=True), alpha=0.5, label="experts, from the least to the most loaded")
        below.axhline(1.0, linestyle="--", linewidth=1.0, color="C1", label="equal loads")
        below.set(xlabel="step", ylabel="load / mean", ylim=(0, 1.5 * below.dataLim.y1))
    for each in axes.values():
        each.grid(alpha=0.3)
        if each.get_legend_handles_labels()[0]:
            for text in each.legend(fontsize="small").get_texts():
                text.set_parse_math(False)
    save_picture(pyplot, figure, path)


def draw_evaluations(values: Mapping[str, float], path: str | PathLike[str], *, title: str, unit: str) -> None:
    """Draw a bar for each evaluated model. Raises as ``draw_runs``."""
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.4 * len(values)), layout="constrained")
    bars = axes.barh(_short_names(values), list(values.values()), height=0.6)
    axes.bar_label(bars, fmt="%.4f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel(unit)
    axes.set_title(_short(title, _LONGEST_TITLE), parse_math=False)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    save_picture(pyplot, figure, path)


def _points(rows: Rows, key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if key in row]


def _short_names(names: Iterable[str]) -> list[str]:
    """Return the names without the folders that all of them are in."""
    names = list(names)
    # Up to the last slash of what they have in common; the end of one name may be a folder of another.
    common = os.path.commonprefix(names).rfind("/") + 1 if len(names) > 1 else 0  # noqa: RUF071
    return [_short(name[common:], _LONGEST_NAME) for name in names]


def _short(name: str, longest: int) -> str:
    """Return a name that fits into a picture, without its middle if it is long."""
    half = longest // 2
    return name if len(name) <= longest else f"{name[: half - 1]}…{name[-half:]}"
