"""Plans as tables for people, and as JSON for programs."""

import re
from collections.abc import Sequence
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.run.plan.plan import Plan
from shardwise.run.plan.workload import Mesh

_UNITS = {"": 1, "B": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)}}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)}
_AXES = ("tp", "pp", "dp")


def shown_bytes(number: int) -> str:
    """In the unit that fits, to three digits or more.

    >>> shown_bytes(999), shown_bytes(80 << 30), shown_bytes(1_500_000)
    ('999 B', '80.0 GiB', '1.43 MiB')
    """
    size, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            break
        size /= 1024
    return f"{number} B" if unit == "B" else f"{size:.{2 if size < 10 else 1}f} {unit}"


def read_bytes(text: str) -> int:
    """A number of bytes as people write it.

    >>> read_bytes("80GiB"), read_bytes("1.5 GB"), read_bytes("4096")
    (85899345920, 1500000000, 4096)

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    if match is None or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] < 1:
        raise ConfigError(f"{text!r} is not a number of bytes; write it as 80GiB, 40.5GB or 1024MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """All numbers of a plan, in bytes."""
    mesh = plan.mesh
    return {
        "layout": layout_as_json(mesh),
        "parameters": plan.num_parameters,
        "stages": [
            {
                "stage": rank.stage,
                "tp_rank": rank.tp_rank,
                "layers": [[chunk.layers.start, chunk.layers.stop] for chunk in parts],
                "parameters": rank.num_parameters,
                "weights": rank.weights,
                "gradients": rank.gradients,
                "masters": rank.masters,
                "optimizer": rank.optimizer,
                "activations": rank.activations,
                "in_flight": rank.in_flight,
                "working": rank.working,
                "total": rank.total,
                "sent": {axis: rank.traffic.sent(mesh, axis) for axis in _AXES},
                "collectives": [
                    {"axis": axis, "name": name, "bytes": num_bytes, "calls": times}
                    for (axis, name, num_bytes), times in sorted(rank.traffic.calls.items())
                ],
            }
            for rank, parts in zip(plan.stages, plan.parts, strict=True)
        ],
        "worst": {"stage": plan.worst.stage, "tp_rank": plan.worst.tp_rank, "total": plan.worst.total},
        "sent": plan.sent,
        "repeated_work": plan.repeated_work,
        "idle_share": plan.idle_share,
    }


def layout_as_json(mesh: Mesh) -> dict[str, Any]:
    """The layout's settings by name."""
    recompute = mesh.recomputation
    return {
        "ranks": mesh.world_size,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "dp": mesh.dp,
        "sequence_parallel": mesh.splits_sequence,
        "pipeline_schedule": mesh.schedule,
        "virtual_stages": mesh.virtual_stages,
        "zero": mesh.zero,
        "fsdp": mesh.fsdp,
        "recompute_granularity": None if recompute.granularity == "none" else recompute.granularity,
        "recompute_modules": [module for module in recompute.modules if recompute.recomputes(module)],
        "micro_batch_size": mesh.micro_batch_size,
    }


def plan_as_table(plan: Plan) -> str:
    """A line for each pipeline stage, and which rank needs the most."""
    workload, mesh = plan.workload, plan.mesh
    header = ["stage", "layers", "weights", "gradients", "fp32 copies", "optimizer", "activations", "working", "total"]
    axes = [axis for axis in _AXES if getattr(mesh, axis) > 1]
    rows = [header + [f"sent {axis}" for axis in axes]]
    for rank, parts in zip(plan.stages, plan.parts, strict=True):
        layers = "+".join(f"{part.layers.start}-{part.layers.stop - 1}" for part in parts)
        numbers = (rank.weights, rank.gradients, rank.masters, rank.optimizer, rank.activations, rank.working)
        sent = (rank.traffic.sent(mesh, axis) for axis in axes)
        rows.append([str(rank.stage), layers, *map(shown_bytes, (*numbers, rank.total, *sent))])
    worst = plan.worst
    samples, number = workload.global_batch_size, mesh.num_micro_batches(workload)
    lines = [
        f"model  {plan.num_parameters:,} parameters, {workload.element_bytes} bytes each"
        + (", with fp32 copies" if workload.has_masters else "")
        + f", {workload.optimizer}",
        f"ranks  {mesh.world_size}: {mesh}",
        f"step   {samples:,} sample{'s' * (samples > 1)} of {workload.sequence_length:,} tokens: on each rank "
        f"{number} micro-batch{'es' if number > 1 else ''} of {mesh.micro_batch_size}"
        + (f", {_in_flight(plan)} in flight at a time" if mesh.pp > 1 else ""),
        "",
        aligned(rows),
        "",
        f"Most memory: tensor-parallel rank {worst.tp_rank} of stage {worst.stage}, {shown_bytes(worst.total)}.",
    ]
    return "\n".join(lines)


def _in_flight(plan: Plan) -> str:
    numbers = [rank.in_flight for rank in plan.stages]
    return str(numbers[0]) if len(set(numbers)) == 1 else f"{min(numbers)} to {max(numbers)}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns to the right, two spaces between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
