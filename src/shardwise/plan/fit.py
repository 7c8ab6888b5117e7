"""Find the layouts that fit into the memory of a rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from os import PathLike
from typing import Annotated, Any, Literal

from shardwise.core.errors import ConfigError
from shardwise.core.processes import in_forks
from shardwise.core.slow_work import told_if_slow
from shardwise.models.recomputation import Recomputation
from shardwise.plan.machine import room_for_tensors
from shardwise.plan.plan import Plan, keyword_workload, make_plan
from shardwise.plan.rehearsal import Rehearsals
from shardwise.plan.report import aligned
from shardwise.plan.workload import Mesh, Workload
from shardwise.run.quantities import read_bytes, shown_bytes
from shardwise.training.bounds import DEFAULT_RANKS_PER_HOST, LOCAL_RANKS, RANKS, check_value, checks_arguments

# In increasing order of cost, up to a forward.
_RECOMPUTATIONS = (Recomputation(), Recomputation("selective", modules=("layernorm", "mlp_act")), Recomputation("full"))


@checks_arguments
def fit_run(
    memory: str,
    model_dir: str | PathLike[str] | None = None,
    *,
    command: Literal["train", "finetune", "dpo"] = "train",
    ranks: int | Sequence[int],
    ranks_per_host: Annotated[int, LOCAL_RANKS] = DEFAULT_RANKS_PER_HOST,
    **settings: Any,
) -> list[Choice]:
    """Return the layouts of a run that fit into memory, best first.

    Args:
        memory: memory of a rank, such as "80GiB" or "16GB".
        model_dir, command: see ``plan_run``.
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
    workload = keyword_workload(command, model_dir, settings)
    return choices_of(workload, memory, world_sizes, ranks_per_host=ranks_per_host)


def choices_of(workload: Workload, limit: str, world_sizes: Sequence[int], *, ranks_per_host: int) -> list[Choice]:
    """The layouts of ``world_sizes`` ranks that need at most ``limit`` of each, best first. Raises as ``fit_run``.

    Without a given micro-batch it is the largest of those that halve a data-parallel rank's samples (with pipeline
    stages: 1) that fits. ``ranks_per_host`` is the largest tp. Schedule, virtual stages, ``cp`` and, where there is
    one, recomputation are those of the settings.
    """
    memory, settings, parallel = read_bytes(limit), workload.settings, workload.settings.parallel
    room = room_for_tensors(memory, workload.device_type)
    like = Mesh(
        schedule=parallel.pipeline_schedule,
        virtual_stages=parallel.virtual_stages,
        recomputation=settings.recompute,
        cp=parallel.cp,
        dp=parallel.cp,
    )
    # Layouts of a group have most of their rehearsals in common.
    groups: defaultdict[object, list[Mesh]] = defaultdict(list)
    for mesh in layouts(workload, world_sizes, ranks_per_host, like):
        groups[mesh.tp, mesh.sequence_parallel, mesh.fsdp].append(mesh)
    rehearsals = Rehearsals(workload, limit=room, estimates=True)
    of_group = partial(_fitting_of, rehearsals, room, settings.training.micro_batch_size)
    largest_first = sorted(groups.values(), key=len, reverse=True)
    number = sum(map(len, largest_first))
    with told_if_slow(f"planning {workload.model.num_layers:,} layers at {number:,} layouts"):
        found = [choice for choices in in_forks(of_group, largest_first) for choice in choices]
    choices = sorted(found, key=lambda choice: choice.order)
    if not choices:
        ranks = ", ".join(map(str, world_sizes)) + (" rank" if list(world_sizes) == [1] else " ranks")
        tensors = f" ({shown_bytes(room)} of it for tensors)" if room < memory else ""
        raise ConfigError(
            f"no layout of {ranks} needs at most {shown_bytes(memory)} of each{tensors}; use more ranks, a "
            f"smaller batch (training.global-batch-size is {workload.global_batch_size}) or shorter samples"
        )
    return choices


@dataclass(frozen=True)
class Choice:
    """A layout that fits."""

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


def _fitting_of(rehearsals: Rehearsals, limit: int, micro_batch_size: int | None, meshes: list[Mesh]) -> list[Choice]:
    """The layouts of ``meshes`` that fit, each with its largest micro-batch."""
    choices = []
    for mesh in meshes:
        *larger, least = micro_batch_sizes(rehearsals.workload, mesh, micro_batch_size)
        choice = fitted(rehearsals, replace(mesh, micro_batch_size=least), limit)
        if choice is None:
            continue
        # Activations grow with the samples, so that larger micro-batches than these do not fit.
        worst = choice.plan.worst
        most = least * (limit - worst.held) // max(worst.step.kept, 1)
        for samples in larger:
            if samples <= most and (other := fitted(rehearsals, replace(mesh, micro_batch_size=samples), limit)):
                choice = other
                break
        choices.append(choice)
    return choices


def fitted(rehearsals: Rehearsals, mesh: Mesh, limit: int) -> Choice | None:
    """The layout as a choice, or None if it cannot be or needs more than ``limit`` bytes of a rank."""
    try:
        rehearsals.workload.at(mesh).settings.check_world(mesh.world_size)
        plan = make_plan(rehearsals.workload, mesh, rehearsals=rehearsals)
    except ConfigError:
        return None
    return Choice(plan) if plan.worst.total <= limit else None


def layouts(workload: Workload, world_sizes: Sequence[int], ranks_per_host: int, like: Mesh) -> Iterator[Mesh]:
    """Yield the layouts to choose from."""
    model = workload.model
    again = (like.recomputation,) if like.recomputation.granularity != "none" else _RECOMPUTATIONS
    for world_size in world_sizes:
        for tp in _divisors(world_size, min(ranks_per_host, model.num_attention_heads)):
            for pp in _divisors(world_size // tp, model.num_layers):
                dp = world_size // (tp * pp)
                if dp % like.cp:
                    continue
                shared = replace(like, tp=tp, pp=pp, dp=dp)
                if pp == 1:
                    shared = replace(shared, virtual_stages=1, schedule="1f1b")
                choices = product(
                    (False, True)[: 1 + (tp > 1)],
                    _sharded(like, dp, pp),
                    again,
                    _of_experts(model.num_experts, tp, dp, ranks_per_host),
                )
                for splits, (zero, fsdp), recomputation, (ep, etp) in choices:
                    options: dict[str, Any] = {"zero": zero, "fsdp": fsdp, "ep": ep, "etp": etp}
                    yield replace(shared, sequence_parallel=splits, recomputation=recomputation, **options)


def _sharded(like: Mesh, dp: int, pp: int) -> Iterator[tuple[int, bool]]:
    yield 0, False
    if dp > 1:
        yield 1, False
    # fully_shard sums a layer's gradients when its backward ends.
    if dp > 1 and not (pp > 1 and like.schedule == "zero-bubble"):
        yield 0, True


def _of_experts(num_experts: int, tp: int, dp: int, ranks_per_host: int) -> list[tuple[int, int | None]]:
    """``ep`` and ``etp`` to choose from: no ``ep``, with experts whole or split, and the most in a host, and in all."""
    if not num_experts:
        return [(1, None)]
    *_, most = divisors = _divisors(math.gcd(num_experts, tp * dp), num_experts)
    within_host = max(ep for ep in divisors if ep <= ranks_per_host)
    return sorted({(1, tp), (1, 1), (within_host, 1), (most, 1)})


def _divisors(number: int, largest: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, largest) + 1) if number % divisor == 0]


def micro_batch_sizes(workload: Workload, mesh: Mesh, given: int | None) -> Iterator[int]:
    """Yield the micro-batch sizes to try, the largest first."""
    if given is not None or mesh.pp > 1:
        yield given or 1
        return
    samples = max(1, workload.global_batch_size // mesh.num_sample_ranks)
    while samples:
        yield samples
        samples = samples // 2 if samples % 2 == 0 else int(samples > 1)


def fitting_as_table(choices: Sequence[Choice]) -> str:
    has_experts = any(choice.plan.workload.model.num_experts for choice in choices)
    shares = any(choice.plan.mesh.cp > 1 for choice in choices)
    axes = ["tp", "pp", *["cp"] * shares, "dp", *["ep", "etp"] * has_experts]
    header = ["ranks", *axes, "sp", "sharded", "recompute", "micro-batch"]
    rows = [[*header, "a rank", "extra work", "sent"]]
    for choice in choices:
        plan, mesh = choice.plan, choice.plan.mesh
        sizes = {"tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp, "dp": mesh.num_sample_ranks, "ep": mesh.ep}
        sizes["etp"] = mesh.expert_tp
        numbers = (mesh.world_size, *(sizes[axis] for axis in axes))
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
