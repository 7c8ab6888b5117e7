"""The plan of a run: what each rank holds, keeps, sends and computes, from a rehearsal of its step on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Annotated, Any, Literal

import torch.distributed as dist

from shardwise.core.errors import ConfigError
from shardwise.core.processes import call_in_fresh_process
from shardwise.core.slow_work import told_if_slow
from shardwise.plan.rehearsal import Rehearsals, Rehearsed
from shardwise.plan.timeline import PhaseLabel, Segment, Transfer, joined
from shardwise.plan.workload import Mesh, Workload, mesh_of, planned_workload
from shardwise.run.settings import PLANNED
from shardwise.training.bounds import RANKS, checks_arguments, from_keywords


@checks_arguments
def plan_run(
    model_dir: str | PathLike[str] | None = None,
    *,
    command: Literal["train", "finetune", "dpo"] = "train",
    ranks: Annotated[int | None, RANKS] = None,
    rank: int | None = None,
    **settings: Any,
) -> Plan:
    """Plan what each rank of a run needs: bytes of weights, gradients, optimizer state and activations, and bytes sent.

    Args:
        model_dir: Hugging Face folder with the config.json of the model; for ``train`` None for that of the settings.
        command: the command of the run.
        ranks: number of ranks; if None, the fewest that tp, cp, pp, ep and etp allow.
        rank: plan this rank only; if None, of each pipeline stage the rank that needs the most.
        settings: those of the command; for ``train`` also those of adapters on the model of a folder.

    Returns:
        The plan; ``plan_as_table`` in ``shardwise.plan.report`` formats it.

    Raises:
        ConfigError: the model cannot be read, or cannot be split so; there is no such rank; a setting without effect.
        CheckpointError: there is no ``config.json``, or it cannot be read.
    """
    workload = keyword_workload(command, model_dir, settings)
    return plan_of(workload, ranks or workload.settings.parallel.fewest_ranks, rank)


def keyword_workload(command: str, model_dir: str | PathLike[str] | None, settings: dict[str, Any]) -> Workload:
    """The workload of a command with keyword arguments. Raises as ``plan_run``."""
    base = {} if command == "train" or model_dir is None else {"base": model_dir}
    return planned_workload(from_keywords(PLANNED[command], settings | base), model_dir)


def plan_of(workload: Workload, world_size: int, rank: int | None = None) -> Plan:
    """Plan a workload on ``world_size`` ranks, or one rank of it. Raises as ``plan_run``."""
    parallel = workload.settings.parallel
    parallel.check_ep(workload.model.num_experts or parallel.ep)
    mesh = mesh_of(workload.settings, world_size)
    with told_if_slow(f"planning {workload.model.num_layers:,} layers at {mesh}"):
        return make_plan(workload, mesh, rank=rank)


@dataclass(frozen=True)
class RankPlan:
    """The needs of one rank."""

    rank: int
    mesh: Mesh
    step: Rehearsed

    @property
    def stage(self) -> int:
        """The pipeline stage."""
        return self.rank // (self.mesh.tp * self.mesh.dp)

    @property
    def tp_rank(self) -> int:
        """The place among the tensor-parallel ranks."""
        return self.rank % self.mesh.tp

    @property
    def dp_rank(self) -> int:
        """The place among the data-parallel ranks."""
        return self.rank // self.mesh.tp % self.mesh.dp

    @cached_property
    def held(self) -> int:
        """Bytes at the start of a step."""
        return self.step.held(self.step.makes_gradients)

    @cached_property
    def total(self) -> int:
        """The most bytes at one time in a step."""
        return self.held + self._whole.peak

    @property
    def peak_at(self) -> str:
        """The part of the step in which the most bytes are held."""
        assert self._whole.at is not None
        return self.step.name(self._whole.at)

    @cached_property
    def _whole(self) -> Segment:
        return joined(self.step.segments, PhaseLabel("step"))

    @property
    def working(self) -> int:
        """Bytes at the peak beyond the state and the activations that are kept for backwards."""
        return max(0, self.total - self.step.held(makes_gradients=False) - self.step.kept)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations in a step: matrix products and attention."""
        return sum(segment.flops for segment in self.step.segments)

    @cached_property
    def calls(self) -> Counter[Transfer]:
        """The number of calls of each collective in a step."""
        return sum((segment.sent for segment in self.step.segments), Counter())

    def group(self, call: Transfer) -> tuple[int, ...]:
        """The ranks that take part in a collective; of a message those that this rank sends to; empty if unknown."""
        if call.name == "send":
            return tuple(self._receivers)
        return self.mesh.group(self.rank, call.axis) if call.axis else ()

    @cached_property
    def _receivers(self) -> dict[int, int]:
        """The ranks that get messages of this one, and the number of messages for each micro-batch."""
        mesh, width = self.mesh, self.mesh.tp * self.mesh.dp
        chunks = {1: mesh.virtual_stages, -1: mesh.virtual_stages}
        # Nothing follows the last chunk of the last stage, and nothing precedes the first one of the first.
        chunks[1] -= self.stage == mesh.pp - 1
        chunks[-1] -= self.stage == 0
        found: Counter[int] = Counter()
        for way, number in chunks.items():
            found[(self.rank + way * width) % mesh.world_size] += number
        return +found

    def volume(self, call: Transfer) -> int:
        """Bytes that the rank sends for a call if collectives are rings."""
        ranks = len(self.group(call))
        if call.name == "send" or ranks == 0:
            return call.num_bytes
        if call.name == "all_gather":
            return (ranks - 1) * call.num_bytes
        once = (ranks - 1) * call.num_bytes // ranks
        return 2 * once if call.name == "all_reduce" else once

    def leaving(self, call: Transfer, ranks_per_host: int) -> float:
        """The share of these bytes that goes to another host: to the ring's next rank, or the receivers of messages."""
        host, group = self.rank // ranks_per_host, self.group(call)
        if call.name == "send":
            away = sum(count for rank, count in self._receivers.items() if rank // ranks_per_host != host)
            return away / max(1, sum(self._receivers.values()))
        if not group:
            return 0.0
        if call.name == "all_to_all":
            return sum(rank // ranks_per_host != host for rank in group) / max(1, len(group) - 1)
        return float(group[(group.index(self.rank) + 1) % len(group)] // ranks_per_host != host)

    def sent(self, axis: str | None = None, *, between_hosts: int | None = None) -> int:
        """Bytes that the rank sends in a step if collectives are rings.

        Args:
            axis: ``"tp"``, ``"pp"``, ``"cp"``, ``"dp"`` or ``"ep"``; all of them if None.
            between_hosts: ranks on a host; count only what leaves this rank's host. All bytes if None.
        """
        total = 0
        for call, number in self.calls.items():
            if axis is None or axis == {"embd": "pp", "expert_dp": "dp"}.get(call.axis, call.axis):
                share = 1.0 if between_hosts is None else self.leaving(call, between_hosts)
                total += round(share * number * self.volume(call))
        return total


@dataclass(frozen=True)
class Plan:
    """The needs of a run at one layout.

    ``num_parameters`` are those of the whole model, tied weights counted once. ``stages`` has the rank of each
    pipeline stage that needs the most memory, or the one rank that was asked for. ``repeated_work`` is the share of a
    step's work that recomputation adds to it, on the rank that computes the most.
    """

    workload: Workload
    mesh: Mesh
    num_parameters: int
    stages: tuple[RankPlan, ...]
    repeated_work: float

    @cached_property
    def worst(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.stages, key=lambda rank: rank.total)

    @cached_property
    def sent(self) -> int:
        """The most bytes that a rank sends in a step."""
        return max(rank.sent() for rank in self.stages)

    @property
    def idle_share(self) -> float:
        """The share of a step's work that the pipeline's idle time adds to it, by the schedules' table."""
        idle = (self.mesh.pp - 1) / self.mesh.num_micro_batches(self.workload)
        return idle / 3 if self.mesh.schedule == "zero-bubble" else idle / self.mesh.virtual_stages


def make_plan(workload: Workload, mesh: Mesh, rank: int | None = None, *, rehearsals: Rehearsals | None = None) -> Plan:
    """Plan a workload on a mesh: one ``rank``, or of each stage the rank that needs the most.

    ``rehearsals`` are those of the workload on other meshes, which have ranks like those of this one; with
    ``estimates`` of the first stage and the last, which need more than those between. ConfigError if the model or the
    batch cannot be split so.
    """
    if dist.is_initialized():
        # This process is a rank of something else.
        plan: Plan = call_in_fresh_process("shardwise.plan.plan:make_plan", workload, mesh, rank)
        return plan
    mesh.check(workload)
    if rank is not None and not 0 <= rank < mesh.world_size:
        raise ConfigError(f"rank {rank} is not one of the {mesh.world_size} ranks, 0 to {mesh.world_size - 1}")
    rehearsals = rehearsals or Rehearsals(workload)
    if rank is not None:
        stages: Sequence[RankPlan] = [RankPlan(rank, mesh, rehearsals.of(mesh, rank))]
    else:
        # One tensor-parallel rank of those with equal shares of everything.
        of_shapes = {rehearsals.shapes(mesh, tp_rank): tp_rank for tp_rank in reversed(_different(rehearsals, mesh))}
        stages = [
            max(
                (_worst_of_dp(rehearsals, mesh, stage, tp_rank) for tp_rank in sorted(of_shapes.values())),
                key=lambda plan: plan.total,
            )
            for stage in (sorted({0, mesh.pp - 1}) if rehearsals.estimates else range(mesh.pp))
        ]
    repeated = 0.0
    if mesh.recomputation.granularity != "none":
        most = max(stages, key=lambda each: each.flops)
        plain = rehearsals.of(mesh.without_recomputation, most.rank)
        repeated = most.flops / sum(segment.flops for segment in plain.segments) - 1
    return Plan(workload, mesh, rehearsals.whole_model[0], tuple(stages), repeated)


def _different(rehearsals: Rehearsals, mesh: Mesh) -> range:
    """Tensor-parallel ranks whose shares may differ: the first alone if it has as much as the last."""
    alike = rehearsals.shapes(mesh, 0) == rehearsals.shapes(mesh, mesh.tp - 1)
    return range(1 if alike else mesh.tp)


def _worst_of_dp(rehearsals: Rehearsals, mesh: Mesh, stage: int, tp_rank: int) -> RankPlan:
    """The data-parallel rank that needs the most: with ZeRO not always the first."""
    first = stage * mesh.tp * mesh.dp + tp_rank
    step = rehearsals.of(mesh, first)
    owned = () if rehearsals.estimates else step.owned
    most = max(range(len(owned)), key=owned.__getitem__, default=0)
    rank = first + most * mesh.tp
    return RankPlan(rank, mesh, step if most == 0 else rehearsals.of(mesh, rank))
