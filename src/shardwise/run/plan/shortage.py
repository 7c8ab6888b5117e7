"""Out of memory in a run: what it needs by the plan, and the smallest change of its settings that fits."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardwise.core.errors import OutOfMemoryError, ShardwiseError
from shardwise.run.plan.fit import Choice, fitting
from shardwise.run.plan.from_settings import mesh_of, workload_of
from shardwise.run.plan.memory_plan import Plan, make_plan
from shardwise.run.plan.report import plan_as_table, shown_bytes
from shardwise.run.plan.workload import Mesh
from shardwise.run.processes.ranks import Ranks
from shardwise.storage.huggingface.description import ModelDescription
from shardwise.training.bounds import launcher_number
from shardwise.training.settings import RunSettings

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
