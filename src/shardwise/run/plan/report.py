"""Plans as tables for people, and as JSON for programs."""

from collections.abc import Sequence
from typing import Any

from shardwise.run.plan.plan import Plan, RankPlan
from shardwise.run.plan.workload import Mesh
from shardwise.run.quantities import shown_bytes
from shardwise.training.optimizer.mixed_precision import PRECISIONS

_AXES = ("tp", "pp", "dp")


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """All numbers of a plan, in bytes."""
    return {
        "layout": layout_as_json(plan.mesh),
        "parameters": plan.num_parameters,
        "stages": [_rank_as_json(rank) for rank in plan.stages],
        "worst": {"stage": plan.worst.stage, "tp_rank": plan.worst.tp_rank, "total": plan.worst.total},
        "sent": plan.sent,
        "repeated_work": plan.repeated_work,
        "idle_share": plan.idle_share,
    }


def _rank_as_json(rank: RankPlan) -> dict[str, Any]:
    step = rank.step
    live, parts = rank.held, []
    for segment in step.segments:
        parts.append(
            {"part": step.name(segment.place), "bytes": live, "peak": live + segment.peak, "flops": segment.flops}
        )
        live += segment.net
    return {
        "stage": rank.stage,
        "tp_rank": rank.tp_rank,
        "rank": rank.rank,
        "layers": [[part.start, part.stop] for part in step.parts],
        "parameters": step.num_parameters,
        "weights": step.weights,
        "gradients": step.gradients,
        "masters": step.masters,
        "optimizer": step.optimizer,
        "others": step.others,
        "activations": step.kept,
        "in_flight": step.in_flight,
        "working": rank.working,
        "total": rank.total,
        "peak_at": rank.peak_at,
        "flops": rank.flops,
        "sent": {axis: rank.sent(axis) for axis in _AXES},
        "collectives": [
            {"axis": call.axis, "name": call.name, "bytes": call.num_bytes, "calls": number}
            for call, number in sorted(rank.calls.items())
        ],
        "step": parts,
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
    workload, mesh, settings = plan.workload, plan.mesh, plan.workload.settings
    precision = PRECISIONS[settings.training.dtype]
    header = ["stage", "layers", "weights", "gradients", "fp32 copies", "optimizer", "activations", "working", "total"]
    axes = [axis for axis in _AXES if getattr(mesh, axis) > 1]
    rows = [header + [f"sent {axis}" for axis in axes]]
    for rank in plan.stages:
        step = rank.step
        layers = "+".join(f"{part.start}-{part.stop - 1}" for part in step.parts)
        numbers = (step.weights, step.gradients, step.masters, step.optimizer, step.kept, rank.working, rank.total)
        rows.append([str(rank.stage), layers, *map(shown_bytes, (*numbers, *map(rank.sent, axes)))])
    worst = plan.worst
    samples, number = workload.global_batch_size, mesh.num_micro_batches(workload)
    lines = [
        f"model  {plan.num_parameters:,} parameters, {precision.params_dtype.itemsize} bytes each"
        + (", with fp32 copies" if precision.has_masters else "")
        + f", {settings.optimizer.name}",
        f"ranks  {mesh.world_size}: {mesh}",
        f"step   {samples:,} sample{'s' * (samples > 1)} of {settings.sequence_length:,} tokens: on each rank "
        f"{number} micro-batch{'es' if number > 1 else ''} of {mesh.micro_batch_size}"
        + (f", {_in_flight(plan)} in flight at a time" if mesh.pp > 1 else ""),
        "",
        aligned(rows),
        "",
        f"Most memory: tensor-parallel rank {worst.tp_rank} of stage {worst.stage}, {shown_bytes(worst.total)}, in the "
        f"{worst.peak_at}.",
    ]
    return "\n".join(lines)


def _in_flight(plan: Plan) -> str:
    numbers = [rank.step.in_flight for rank in plan.stages]
    return str(numbers[0]) if len(set(numbers)) == 1 else f"{min(numbers)} to {max(numbers)}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns to the right, two spaces between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
