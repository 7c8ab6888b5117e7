"""The loss curve as a picture."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_loss(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    references: Mapping[str, float],
    title: str,
    curves: tuple[str, str] = ("bits_per_byte", "held_out_bits_per_byte"),
    unit: str = "bits per byte",
) -> str | None:
    """Draw two metrics over the steps: of the training batch, and of held-out data.

    Args:
        rows: of ``metrics.jsonl``.
        path: PNG file to write.
        references: horizontal lines, by name, in the same unit.
        title: above the picture.
        curves: names of the two metrics.
        unit: of both.

    Returns:
        None, or why there is no picture: matplotlib is not installed.
    """
    # It tells of folders that it cannot write to.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except (Exception, SystemExit) as error:  # an optional package can fail in any way
        return f"no picture: matplotlib cannot be imported ({error}); pip install 'shardwise[plots]'"
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for key, label, style in (
        (curves[0], "training batch", {"linewidth": 1.0, "alpha": 0.7}),
        (curves[1], "held-out data", {"marker": "o", "linewidth": 2.0}),
    ):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    for number, (name, value) in enumerate(references.items()):
        axes.axhline(value, linestyle="--", linewidth=1.0, color=f"C{number + 2}", label=f"{name}: {value:.2f}")
    axes.set(xlabel="step", ylabel=unit)
    # A dollar sign in a file's name begins no formula.
    axes.set_title(title, parse_math=False)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    with warnings.catch_warnings():
        # Its font may lack characters of the title.
        warnings.simplefilter("ignore")
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return None
