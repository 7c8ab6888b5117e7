"""Plans for people, and for programs.

Out of memory in a run: what it needs by the plan, and the smallest change of its settings that fits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.core.errors import ConfigError, OutOfMemoryError, ShardwiseError
from shardwise.data.labelled import counted
from shardwise.models.description import ModelDescription
from shardwise.run.plan.fit import Choice, fitting, mesh_of, workload_of
from shardwise.run.plan.memory_plan import Plan, make_plan
from shardwise.run.plan.parameters import parameters_of, parts_of
from shardwise.run.plan.workload import Mesh
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import RunSettings
from shardwise.training.bounds import launcher_number

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
        "parameters": sum_of_parameters(plan),
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
            for rank, parts in zip(plan.stages, _parts(plan), strict=True)
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
        "recompute_granularity": recompute.granularity,
        "recompute_modules": list(recompute.modules),
        "micro_batch_size": mesh.micro_batch_size,
    }


def sum_of_parameters(plan: Plan) -> int:
    """Of the whole model, tied weights once."""
    model = plan.workload.model
    ((whole,),) = parts_of(model, 1)
    return sum(param.numel for param in parameters_of(model, whole, tp=1, rank=0))


def _parts(plan: Plan) -> Any:
    return parts_of(plan.workload.model, plan.mesh.pp, plan.mesh.virtual_stages)


def plan_as_table(plan: Plan) -> str:
    """A line for each pipeline stage, and which rank needs the most."""
    workload, mesh = plan.workload, plan.mesh
    header = ["stage", "layers", "weights", "gradients", "fp32 copies", "optimizer", "activations", "working", "total"]
    axes = [axis for axis in _AXES if getattr(mesh, axis) > 1]
    rows = [header + [f"sent {axis}" for axis in axes]]
    for rank, parts in zip(plan.stages, _parts(plan), strict=True):
        layers = "+".join(f"{part.layers.start}-{part.layers.stop - 1}" for part in parts)
        numbers = (rank.weights, rank.gradients, rank.masters, rank.optimizer, rank.activations, rank.working)
        sent = (rank.traffic.sent(mesh, axis) for axis in axes)
        rows.append([str(rank.stage), layers, *map(shown_bytes, (*numbers, rank.total, *sent))])
    worst = plan.worst
    number = mesh.num_micro_batches(workload)
    lines = [
        f"model  {sum_of_parameters(plan):,} parameters, {workload.element_bytes} bytes each"
        + (", with fp32 copies" if workload.has_masters else "")
        + f", {workload.optimizer}",
        f"ranks  {mesh.world_size}: {mesh}",
        f"step   {counted(workload.global_batch_size, 'sample')} of {workload.sequence_length:,} tokens: on each "
        f"rank {number} micro-batch{'es' if number > 1 else ''} of {mesh.micro_batch_size}"
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


def fitting_as_table(choices: Sequence[Choice]) -> str:
    """A line for each layout that fits."""
    header = ["ranks", "tp", "pp", "dp", "sp", "sharded", "recompute", "micro-batch", "a rank", "extra work", "sent"]
    rows = [header]
    for choice in choices:
        plan, mesh = choice.plan, choice.plan.mesh
        numbers = (mesh.world_size, mesh.tp, mesh.pp, mesh.dp)
        sharded = "zero 1" if mesh.zero else "fsdp" if mesh.fsdp else "-"
        recompute = mesh.recomputation
        again = str(recompute) if recompute.granularity == "selective" else recompute.granularity or "-"
        rows.append(
            [
                *map(str, numbers),
                "yes" if mesh.splits_sequence else "-",
                sharded,
                again,
                str(mesh.micro_batch_size),
                shown_bytes(plan.worst.total),
                f"{100 * choice.extra_work:.1f} %",
                shown_bytes(plan.sent),
            ]
        )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns to the right, two spaces between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


_SIGNS = ("DefaultCPUAllocator", "out of memory", "bad_alloc", "ALLOC_FAILED")
# What a plan leaves out, and memory in pieces.
_USABLE = 0.9


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of PyTorch, Python or the system says that there is no more memory."""
    if isinstance(error, ShardwiseError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@dataclass(frozen=True)
class Shortage:
    """What is said when a rank runs out of memory.

    Attributes:
        settings: of the run.
        model: that it trains.
        is_planned: whether there is a plan of such a run; of adapters, say, there is none.
        ranks: who this process is.
        available: bytes that the run may take on this rank, from before the model was made; 0 if nobody knows.
    """

    settings: RunSettings
    model: ModelDescription
    is_planned: bool
    ranks: Ranks
    available: int

    @classmethod
    def of(cls, settings: RunSettings, model: ModelDescription, ranks: Ranks, *, is_planned: bool) -> Shortage:
        """Of this rank, before its model is made."""
        return cls(settings, model, is_planned, ranks, available_memory(ranks.device))

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Within, what runs out of memory is an OutOfMemoryError that says what the run needs."""
        try:
            yield
        except (MemoryError, RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            # The frames that failed still hold tensors, and there is work to do.
            traceback.clear_frames(error.__traceback__)
            raise OutOfMemoryError(self._message(error), self._details()) from error

    def _message(self, error: BaseException) -> str:
        asked = re.search(r"tried to allocate ([\d.]+ ?\w+)", str(error), re.IGNORECASE)
        more = f", which asked for {_readable(asked[1])} more" if asked else ""
        there = f"; the run has about {shown_bytes(self.available)} here" if self.available else ""
        return f"out of memory on a rank{more}{there}"

    def _details(self) -> str:
        """The plan, and what to change; nothing where the run cannot be planned."""
        if not self.is_planned:
            return "Use a smaller --training.micro-batch-size, shorter samples, or --recompute.granularity full."
        try:
            workload = workload_of(self.settings, self.model)
            plan = make_plan(workload, mesh_of(self.settings, self.ranks.world_size))
            return f"{plan_as_table(plan)}\n{self._advice(plan)}"
        except ShardwiseError as error:
            return f"There is no plan of it: {error}"

    def _advice(self, plan: Plan) -> str:
        usable = int(_USABLE * self.available)
        if not usable:
            return "shardwise plan ... --fit MEMORY lists the layouts that fit (docs/memory.md)."
        if plan.worst.total <= usable:
            return (
                f"By the plan {shown_bytes(usable)} are enough: look for what else takes memory on this machine, or "
                "use a smaller --training.micro-batch-size."
            )
        choices = self._fitting(plan, usable)
        if not choices:
            return (
                f"No layout of {plan.mesh.world_size} ranks needs as little as {shown_bytes(usable)} of each; use "
                "more ranks, shorter samples or a smaller model."
            )
        nearest = min(choices, key=lambda choice: (len(changes(plan.mesh, choice.plan.mesh)), choice.order))
        flags = " ".join(changes(plan.mesh, nearest.plan.mesh))
        return f"The smallest change that fits, with {shown_bytes(nearest.plan.worst.total)}: {flags}"

    def _fitting(self, plan: Plan, limit: int) -> list[Choice]:
        mesh = plan.mesh
        likes = [mesh, replace(mesh, recomputation=type(mesh.recomputation)())]
        return [
            choice
            for like in likes
            for micro in (mesh.micro_batch_size, None)
            for choice in fitting(
                plan.workload, limit, world_sizes=[mesh.world_size], micro_batch_size=micro, like=like
            )
        ]


def changes(before: Mesh, after: Mesh) -> list[str]:
    """The flags that make the one of the other."""
    flags = [
        f"--{name} {getattr(after, name)}"
        for name in ("tp", "pp", "zero")
        if getattr(before, name) != getattr(after, name)
    ]
    if before.splits_sequence != after.splits_sequence:
        flags.append("--sequence-parallel" if after.splits_sequence else "--parallel.no-sequence-parallel")
    if before.shards_fully != after.shards_fully:
        flags.append("--fsdp" if after.shards_fully else "--parallel.no-fsdp")
    recomputation = after.recomputation
    if before.recomputation != recomputation:
        modules = f" --recompute.modules {' '.join(recomputation.modules)}" if recomputation.modules else ""
        flags.append(f"--recompute.granularity {recomputation.granularity or 'none'}{modules}")
    if before.micro_batch_size != after.micro_batch_size:
        flags.append(f"--training.micro-batch-size {after.micro_batch_size}")
    return flags


def available_memory(device: torch.device) -> int:
    """Bytes that this rank may take from now on.

    All of the GPU's; on a CPU what the process's limit (``ulimit -v``) leaves, or its share of the machine's memory.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return max(0, limit - _mapped())
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return 0
    ranks = launcher_number("LOCAL_WORLD_SIZE") or launcher_number("WORLD_SIZE") or 1
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _mapped() -> int:
    """Bytes of this process's address space."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _readable(size: str) -> str:
    """Bytes, as the CPU's allocator counts them, in their unit."""
    number, _, unit = size.partition(" ")
    return shown_bytes(int(number)) if unit == "bytes" and number.isdecimal() else size
