"""Find the layouts that fit into the memory of a rank, and advise a run that is out of memory."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import torch

from shardwise.core.errors import ConfigError, OutOfMemoryError, ShardwiseError
from shardwise.models.description import ModelDescription
from shardwise.models.recomputation import Recomputation
from shardwise.run.plan.plan import Plan, make_plan
from shardwise.run.plan.report import aligned, plan_as_table, read_bytes, shown_bytes
from shardwise.run.plan.workload import Mesh, Workload, mesh_of, planned_workload, workload_of
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import PlanSettings, RunSettings
from shardwise.training.bounds import (
    DEFAULT_RANKS_PER_HOST,
    LOCAL_RANKS,
    RANKS,
    check_value,
    checks_arguments,
    from_keywords,
    launcher_number,
)

# In increasing order of cost, up to a forward.
_RECOMPUTATIONS = (
    Recomputation(),
    Recomputation("selective", modules=("layernorm", "mlp_act")),
    Recomputation("full"),
)
_SIGNS = ("DefaultCPUAllocator", "out of memory", "bad_alloc", "ALLOC_FAILED")
# Reserve the rest for memory outside of the plan and for fragmentation.
_USABLE = 0.9


@checks_arguments
def fit_run(
    memory: str,
    model_dir: str | PathLike[str] | None = None,
    *,
    ranks: int | Sequence[int],
    ranks_per_host: Annotated[int, LOCAL_RANKS] = DEFAULT_RANKS_PER_HOST,
    **settings: Any,
) -> list[Choice]:
    """Return the layouts of a run that fit into memory, best first.

    Args:
        memory: memory of a rank, such as "80GiB" or "16GB".
        model_dir: see ``plan_run``.
        ranks: number of ranks, or several numbers to choose from.
        ranks_per_host: the largest tp, since ranks that split layers exchange the most.
        settings: see ``plan_run``.

    Returns:
        The layouts with their plans.

    Raises:
        ConfigError: no layout fits; or as for ``plan_run``.
        CheckpointError: see ``plan_run``.
    """
    world_sizes = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    for number in world_sizes:
        check_value("ranks", number, int, RANKS)
    made = from_keywords(PlanSettings, settings)
    return choices_of(made, model_dir, memory, world_sizes, ranks_per_host=ranks_per_host)


def choices_of(
    settings: PlanSettings,
    folder: str | PathLike[str] | None,
    limit: str,
    world_sizes: Sequence[int],
    *,
    ranks_per_host: int,
) -> list[Choice]:
    """The layouts of ``world_sizes`` ranks that need at most ``limit`` of each, best first. Raises as ``fit_run``."""
    memory = read_bytes(limit)
    settings, workload = planned_workload(settings, folder)
    parallel = settings.parallel
    choices = fitting(
        workload,
        memory,
        world_sizes=world_sizes,
        micro_batch_size=settings.training.micro_batch_size,
        ranks_per_host=ranks_per_host,
        like=Mesh(
            schedule=parallel.pipeline_schedule,
            virtual_stages=parallel.virtual_stages,
            recomputation=settings.recompute,
        ),
    )
    if not choices:
        ranks = ", ".join(map(str, world_sizes))
        raise ConfigError(
            f"no layout of {ranks} ranks needs at most {shown_bytes(memory)} of each; use more ranks, a smaller batch "
            f"(training.global-batch-size is {workload.global_batch_size}) or shorter samples"
        )
    return choices


@dataclass(frozen=True)
class Choice:
    """A layout that fits.

    Attributes:
        plan: plan of the layout.
    """

    plan: Plan

    @property
    def extra_work(self) -> float:
        """The share of a step's work that recomputation and the pipeline's idle time add to it."""
        return self.plan.repeated_work + self.plan.idle_share

    @property
    def order(self) -> tuple[float, int, bool, int]:
        """Least first: extra work to a thousandth, bytes that a rank sends in a step, whether anything at all is
        recomputed, and bytes of the worst rank.
        """
        recomputes = self.plan.mesh.recomputation.granularity != "none"
        return round(self.extra_work, 3), self.plan.sent, recomputes, self.plan.worst.total


def fitting(
    workload: Workload,
    limit: int,
    *,
    world_sizes: Sequence[int],
    micro_batch_size: int | None = None,
    ranks_per_host: int = 8,
    like: Mesh | None = None,
) -> list[Choice]:
    """Return the layouts whose worst rank needs at most ``limit`` bytes, best first.

    Args:
        workload: model and training.
        limit: maximum bytes per rank.
        world_sizes: numbers of ranks to try.
        micro_batch_size: as given; if None the largest of those that halve a data-parallel rank's samples (with
            pipeline stages: 1) that fits.
        ranks_per_host: the largest tp, whose ranks exchange the most.
        like: whose pipeline schedule and virtual stages are taken, and its recomputation where there is one.

    Returns:
        In the order of ``Choice.order``.
    """
    like = like or Mesh()
    choices = []
    for mesh in _layouts(workload, world_sizes, ranks_per_host, like):
        for samples in _micro_batch_sizes(workload, mesh, micro_batch_size):
            try:
                plan = make_plan(workload, replace(mesh, micro_batch_size=samples))
            except ConfigError:
                continue
            if plan.worst.total <= limit:
                choices.append(Choice(plan))
                break
    return sorted(choices, key=lambda choice: choice.order)


def _layouts(workload: Workload, world_sizes: Sequence[int], ranks_per_host: int, like: Mesh) -> Iterator[Mesh]:
    model = workload.model
    again = (like.recomputation,) if like.recomputation.granularity != "none" else _RECOMPUTATIONS
    for world_size in world_sizes:
        for tp in _divisors(world_size, min(ranks_per_host, model.num_attention_heads)):
            for pp in _divisors(world_size // tp, model.num_layers):
                dp = world_size // (tp * pp)
                for sequence_parallel in (False, True)[: 1 + (tp > 1)]:
                    for zero, fsdp in _sharded(workload, like, dp, pp):
                        for recomputation in again:
                            yield replace(
                                like,
                                tp=tp,
                                pp=pp,
                                dp=dp,
                                sequence_parallel=sequence_parallel,
                                virtual_stages=like.virtual_stages if pp > 1 else 1,
                                schedule=like.schedule if pp > 1 else "1f1b",
                                zero=zero,
                                fsdp=fsdp,
                                recomputation=recomputation,
                            )


def _sharded(workload: Workload, like: Mesh, dp: int, pp: int) -> Iterator[tuple[int, bool]]:
    yield 0, False
    if dp > 1:
        yield 1, False
    # fully_shard sums a layer's gradients when its backward ends.
    if dp > 1 and not (pp > 1 and like.schedule == "zero-bubble"):
        yield 0, True


def _divisors(number: int, largest: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, largest) + 1) if number % divisor == 0]


def _micro_batch_sizes(workload: Workload, mesh: Mesh, given: int | None) -> Iterator[int]:
    if given is not None or mesh.pp > 1:
        yield given or 1
        return
    samples = workload.global_batch_size // mesh.dp
    while samples:
        yield samples
        samples = samples // 2 if samples % 2 == 0 else int(samples > 1)


def fitting_as_table(choices: Sequence[Choice]) -> str:
    header = ["ranks", "tp", "pp", "dp", "sp", "sharded", "recompute", "micro-batch", "a rank", "extra work", "sent"]
    rows = [header]
    for choice in choices:
        plan, mesh = choice.plan, choice.plan.mesh
        numbers = (mesh.world_size, mesh.tp, mesh.pp, mesh.dp)
        sharded = "zero 1" if mesh.zero else "fsdp" if mesh.fsdp else "-"
        recompute = mesh.recomputation
        again = {"selective": str(recompute), "full": "full", "none": "-"}[recompute.granularity]
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


def is_out_of_memory(error: BaseException) -> bool:
    """True for an error of PyTorch, Python or the system for lack of memory."""
    if isinstance(error, ShardwiseError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@dataclass(frozen=True)
class Shortage:
    """The message of a rank that runs out of memory.

    Attributes:
        settings, model: settings and model of the run.
        is_planned: True if ``shardwise plan`` covers this kind of run.
        ranks: this process's place among the ranks.
        available: bytes that the run may use on this rank, measured before the model was built; 0 if unknown.
    """

    settings: RunSettings
    model: ModelDescription
    is_planned: bool
    ranks: Ranks
    available: int

    @classmethod
    def of(cls, settings: RunSettings, model: ModelDescription, ranks: Ranks, *, is_planned: bool) -> Shortage:
        """Measure this rank's memory before its model is built."""
        return cls(settings, model, is_planned, ranks, available_memory(ranks.device))

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Convert an out-of-memory error in the block to an OutOfMemoryError with the run's requirements."""
        try:
            yield
        except (MemoryError, RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            # Clear the failed frames, which still hold tensors, to free memory for the plan.
            traceback.clear_frames(error.__traceback__)
            raise OutOfMemoryError(self._message(error), self._details()) from error

    def _message(self, error: BaseException) -> str:
        asked = re.search(r"tried to allocate ([\d.]+ ?\w+)", str(error), re.IGNORECASE)
        more = f", which asked for {_readable(asked[1])} more" if asked else ""
        there = f"; the run has about {shown_bytes(self.available)} here" if self.available else ""
        return f"out of memory on a rank{more}{there}"

    def _details(self) -> str:
        """The plan, and the remedy."""
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
    """The flags that turn one mesh into the other."""
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
    # Compare as text: the settings and the layouts of plans have different classes.
    if str(before.recomputation) != str(recomputation):
        is_selective = recomputation.granularity == "selective"
        modules = f" --recompute.modules {' '.join(recomputation.modules)}" if is_selective else ""
        flags.append(f"--recompute.granularity {recomputation.granularity}{modules}")
    if before.micro_batch_size != after.micro_batch_size:
        flags.append(f"--training.micro-batch-size {after.micro_batch_size}")
    return flags


def available_memory(device: torch.device) -> int:
    """Return the number of bytes that this rank may use from now on.

    On a GPU, its whole memory. On a CPU, the rest of the limit of the process (``ulimit -v``), or its share of the
    machine's memory.
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
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _readable(size: str) -> str:
    number, _, unit = size.partition(" ")
    return shown_bytes(int(number)) if unit == "bytes" and number.isdecimal() else size
