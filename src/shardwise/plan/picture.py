"""A picture of a rank's memory over a planned step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from shardwise.plan.plan import Plan, RankPlan
from shardwise.run.pictures import check_picture, import_pyplot, save_picture
from shardwise.run.quantities import shown_bytes

_STATE = ("weights", "gradients", "masters", "optimizer", "others")
_TITLES = {"masters": "fp32 copies", "others": "other tensors"}
_COLOURS = {"forward": "C0", "backward": "C1"}
# Parts without products, such as the update, are as wide as this share of a micro-batch.
_NARROWEST = 0.02


def draw_memory(plan: Plan, path: str, *, limit: int | None = None) -> None:
    """Draw the memory of the rank that needs the most over its step, into a PNG or SVG file."""
    check_picture(path)
    pyplot, rank = import_pyplot(), plan.worst
    parts = list(_parts(rank, plan.mesh.num_micro_batches(plan.workload)))
    unit, scale = ("GiB", 1 << 30) if rank.total >= 1 << 30 else ("MiB", 1 << 20)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    edges = [0.0, *accumulate(part.width for part in parts)]
    peaks, left = [part.peak / scale for part in parts], edges[-1]
    bottom, step = 0.0, rank.step
    for number, name in enumerate(_STATE):
        size = getattr(step, name) / scale
        if size and not (name == "gradients" and step.makes_gradients):
            axes.fill_between([0, left], bottom, bottom + size, color=f"C{number + 2}", alpha=0.5, linewidth=0)
            title = _TITLES.get(name, name)
            axes.plot([], [], color=f"C{number + 2}", alpha=0.5, linewidth=6, label=title)
            bottom += size
    for action, colour in _COLOURS.items():
        for part, start, end in zip(parts, edges, edges[1:], strict=False):
            if part.action == action:
                axes.axvspan(start, end, color=colour, alpha=0.08, linewidth=0)
        axes.plot([], [], color=colour, alpha=0.2, linewidth=6, label=action)
    axes.stairs(peaks, edges, baseline=bottom, fill=True, color="black", alpha=0.12, label="activations")
    axes.stairs(peaks, edges, baseline=None, color="black", linewidth=1.0, label="peak of each part")
    held = [rank.held / scale, *(part.held / scale for part in parts)]
    axes.plot(edges, held, color="black", linewidth=1.0, linestyle=":", label="held after it")
    for part, start, end in zip(parts, edges, edges[1:], strict=False):
        if part.repeats:
            middle = (start + end) / 2, (bottom + part.peak / scale) / 2
            style = {"ha": "center", "va": "center", "fontsize": "small", "rotation": 90}
            axes.annotate(f"{part.repeats} more micro-batches", middle, **style)
    highest = max(range(len(peaks)), key=peaks.__getitem__)
    place = (edges[highest] + edges[highest + 1]) / 2
    axes.plot([place], [peaks[highest]], marker="o", color="C3")
    side = "right" if place > left / 2 else "left"
    text = f"{shown_bytes(rank.total)}: {rank.peak_at}"
    axes.annotate(text, (place, peaks[highest]), (0, 6), textcoords="offset points", ha=side, fontsize="small")
    if limit is not None:
        axes.axhline(limit / scale, color="C3", linestyle="--", linewidth=1.0, label=f"limit {shown_bytes(limit)}")
    axes.set(xlabel="the step; each part is as wide as its products", ylabel=unit, xticks=[])
    axes.set_title(f"memory of rank {rank.rank} of {plan.mesh.world_size:,}: {plan.mesh}", parse_math=False)
    axes.set(xlim=(0, left), ylim=(0, 1.12 * max([*peaks, (limit or 0) / scale])))
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    save_picture(pyplot, figure, path)


@dataclass(frozen=True)
class _Part:
    """A part of the step as it is drawn.

    ``width`` is in floating-point operations, or a little; of micro-batches that are alike those of one. ``repeats``
    counts the micro-batches that it stands for besides those that are drawn.
    """

    action: str
    width: float
    peak: int
    held: int
    repeats: int = 0


def _parts(rank: RankPlan, number: int) -> Iterator[_Part]:
    live, segments = rank.held, rank.step.segments
    drawn = {segment.place.micro_batch for segment in segments if segment.parts}
    one = sum(segment.flops for segment in segments if segment.parts and segment.place.micro_batch == 0)
    narrowest = _NARROWEST * max(one, 1)
    for segment in segments:
        action, inner = segment.place.action, live
        for part in segment.parts:
            yield _Part(action, max(part.flops, narrowest / 10), inner + part.peak, inner + part.net)
            inner += part.net
        live += segment.net
        if not segment.parts:
            repeats = number - len(drawn) if segment.flops > one else 0
            width = max(min(segment.flops, one), narrowest)
            yield _Part(action, width, live - segment.net + segment.peak, live, repeats)
