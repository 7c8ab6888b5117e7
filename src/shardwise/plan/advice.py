"""Advice for a run that is out of memory: its plan, and the smallest change of settings that fits."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import groupby

from shardwise.models.config import ModelConfig
from shardwise.plan.fit import fitted, layouts, micro_batch_sizes
from shardwise.plan.plan import make_plan
from shardwise.plan.rehearsal import Rehearsals
from shardwise.plan.report import plan_as_table
from shardwise.plan.workload import Mesh, Workload, mesh_of, workload_of
from shardwise.run.quantities import shown_bytes
from shardwise.run.settings import RunSettings

# The rest is for memory outside of the plan, and for fragmentation.
_USABLE = 0.9


def plan_table(pickled: bytes) -> str:
    """Return the plan of a run as text, for trackers; the arguments are the first four of ``advice``, pickled.

    Raises:
        ConfigError: the run cannot be planned.
    """
    settings, model, device_type, world_size = pickle.loads(pickled)
    workload = replace(workload_of(settings, model), device_type=device_type)
    return plan_as_table(make_plan(workload, mesh_of(settings, world_size)), machines=False)


def advice(settings: RunSettings, model: ModelConfig, device_type: str, world_size: int, available: int) -> str:
    """Return the plan of a run, and the smallest change that makes it fit into memory.

    Args:
        settings: settings of the run.
        model: description of its model.
        device_type: device of the ranks.
        world_size: number of ranks.
        available: bytes that a rank may use; 0 if unknown.

    Raises:
        ConfigError: the run cannot be planned.
    """
    workload, mesh = replace(workload_of(settings, model), device_type=device_type), mesh_of(settings, world_size)
    plan = make_plan(workload, mesh)
    table, usable = plan_as_table(plan, machines=False), int(_USABLE * available)
    if not usable:
        return f"{table}\nshardwise plan ... --fit MEMORY lists the layouts that fit (docs/memory.md)."
    if plan.worst.total <= usable:
        return (
            f"{table}\nBy the plan {shown_bytes(usable)} are enough: look for what else takes memory on this machine, "
            "or use a smaller --training.micro-batch-size."
        )
    return f"{table}\n{_smallest_change(workload, mesh, usable)}"


def _smallest_change(workload: Workload, mesh: Mesh, usable: int) -> str:
    rehearsals = Rehearsals(workload, limit=usable, estimates=True)
    others = {
        replace(other, micro_batch_size=samples)
        for like in (mesh, mesh.without_recomputation)
        for other in layouts(workload, [mesh.world_size], 8, like)
        for given in (mesh.micro_batch_size, None)
        for samples in micro_batch_sizes(workload, other, given)
    }
    overlaps = workload.settings.parallel.tp_comm_overlap
    flags = {other: changes(mesh, other, overlaps=overlaps) for other in others}
    # Few changes first: the first number of changes with a layout that fits is enough.
    in_order = sorted(others, key=lambda other: (len(flags[other]), -other.micro_batch_size))
    for _, group in groupby(in_order, key=lambda other: len(flags[other])):
        found = [choice for other in group if (choice := fitted(rehearsals, other, usable)) is not None]
        if found:
            nearest = min(
                found, key=lambda choice: (*choice.order[:1], -choice.plan.mesh.micro_batch_size, *choice.order[1:])
            )
            change = " ".join(changes(mesh, nearest.plan.mesh, overlaps=overlaps))
            return f"The smallest change that fits, with {shown_bytes(nearest.plan.worst.total)}: {change}"
    return (
        f"No layout of {mesh.world_size} ranks needs as little as {shown_bytes(usable)} of each; use more ranks, "
        "shorter samples or a smaller model."
    )


def changes(before: Mesh, after: Mesh, *, overlaps: bool = False) -> list[str]:
    """The flags that turn the mesh of a run, with ``--tp-comm-overlap`` if ``overlaps``, into another one."""
    flags = [
        f"--{name} {getattr(after, name)}"
        for name in ("tp", "pp", "zero", "ep")
        if getattr(before, name) != getattr(after, name)
    ]
    # Models without experts have no such number, except in exact runs, where it is 1 and no flag.
    if after.etp is not None and (before.etp or after.tp) != after.etp:
        flags.append(f"--etp {after.expert_tp}")
    # Any schedule but the interleaved one runs a single stage.
    if before.schedule != after.schedule and (after.pp > 1 or before.schedule == "interleaved"):
        flags.append(f"--pipeline-schedule {after.schedule}")
    if before.virtual_stages != after.virtual_stages:
        flags.append(f"--virtual-stages {after.virtual_stages}")
    if before.splits_sequence != after.splits_sequence:
        flags.append("--sequence-parallel" if after.splits_sequence else "--parallel.no-sequence-parallel")
        if overlaps and not after.splits_sequence:
            flags.append("--parallel.no-tp-comm-overlap")
    if before.shards_fully != after.shards_fully:
        flags.append("--fsdp" if after.shards_fully else "--parallel.no-fsdp")
    recomputation = after.recomputation
    # Compare as text: the settings and the layouts of plans have different classes.
    if str(before.recomputation) != str(recomputation):
        is_selective = recomputation.granularity == "selective"
        modules = f" --recompute.modules {' '.join(recomputation.modules)}" if is_selective else ""
        flags.append(f"--recompute.granularity {recomputation.granularity}{modules}")
    if before.micro_batch_size != after.micro_batch_size:
        flags.append(f"--training.micro-batch-size {after.micro_batch_size}")
    return flags
