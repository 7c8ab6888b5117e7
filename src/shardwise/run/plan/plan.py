"""The plan of a run: the bytes of every pipeline stage, of its rank that needs the most, by arithmetic alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from os import PathLike
from typing import Annotated, Any

from shardwise.run.plan import step
from shardwise.run.plan.adapters import adapted, adapted_state, base_of, check_adaptation
from shardwise.run.plan.parameters import (
    Parameter,
    StageChunk,
    StateBytes,
    gathered_bytes,
    parameters_of,
    stage_chunks,
    state_bytes,
)
from shardwise.run.plan.workload import Mesh, Workload, mesh_of, planned_workload
from shardwise.run.settings import PlanSettings
from shardwise.training.bounds import RANKS, checks_arguments, from_keywords
from shardwise.training.pipeline.schedules import Kind, make_schedule


@checks_arguments
def plan_run(
    model_dir: str | PathLike[str] | None = None, *, ranks: Annotated[int | None, RANKS] = None, **settings: Any
) -> "Plan":
    """Plan what each rank of a run needs: bytes of weights, gradients, optimizer state and activations, and bytes sent.

    Args:
        model_dir: Hugging Face folder with the config.json of the model; that of the settings if None.
        ranks: number of ranks; tp x pp if None.
        settings: those of ``train``, and of adapters those of ``finetune``.

    Returns:
        The plan; ``plan_as_table`` in ``shardwise.run.plan.report`` writes it for people.

    Raises:
        ConfigError: the model is not to be had, or cannot be split so; a setting without effect.
        CheckpointError: there is no ``config.json``, or it cannot be read.
    """
    made = from_keywords(PlanSettings, settings)
    return plan_of(made, model_dir, ranks or made.parallel.tp * made.parallel.pp)


def plan_of(settings: PlanSettings, folder: str | PathLike[str] | None, world_size: int) -> "Plan":
    """Plan a run of ``settings`` on ``world_size`` ranks. Raises as ``plan_run``."""
    settings, workload = planned_workload(settings, folder)
    return make_plan(workload, mesh_of(settings, world_size))


@dataclass(frozen=True)
class RankPlan(StateBytes):
    """The needs of one rank: the bytes from step to step of ``StateBytes``, and those of a step.

    Attributes:
        stage: of the pipeline.
        tp_rank: of the stage's ranks.
        num_parameters: that this rank holds; with fsdp, before they are split over data-parallel ranks.
        activations: bytes that are kept for the backward, of all micro-batches in flight at one time.
        in_flight: micro-batches whose activations are held at one time, counted once per chunk.
        working: bytes of what is there only for a moment: a layer that is being recomputed with the gathered inputs of
            its linear layers; with fsdp the parameters that are gathered, and gradients that accumulate.
        traffic: what it sends in a step.
    """

    stage: int
    tp_rank: int
    num_parameters: int
    activations: int
    in_flight: int
    working: int
    traffic: step.Traffic

    @cached_property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.gradients + self.masters + self.optimizer + self.activations + self.working


@dataclass(frozen=True)
class Plan:
    """The needs of a run at one layout.

    Attributes:
        workload, mesh: of the run.
        parts: ``[stage][chunk]``, the parts of the model.
        stages: of each pipeline stage the rank that needs the most.
    """

    workload: Workload
    mesh: Mesh
    parts: tuple[tuple[StageChunk, ...], ...]
    stages: tuple[RankPlan, ...]

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied weights once."""
        ((whole,),) = stage_chunks(self.workload.model, 1)
        return sum(param.numel for param in parameters_of(self.workload.model, whole, tp=1, rank=0))

    @cached_property
    def worst(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.stages, key=lambda rank: rank.total)

    @property
    def sent(self) -> int:
        """The most bytes that a rank sends in a step."""
        return max(rank.traffic.sent(self.mesh) for rank in self.stages)

    @property
    def repeated_work(self) -> float:
        """The share of a step's work that recomputation adds to it.

        A recomputed layer adds a third, as a forward is a third of the work, and a part of it a third of its own work.
        """
        recomputation, model, mesh = self.mesh.recomputation, self.workload.model, self.mesh
        if recomputation.granularity == "none":
            return 0.0
        if recomputation.granularity == "full":
            every = recomputation.num_layers * mesh.pp * mesh.virtual_stages / model.num_layers
            return (min(1.0, every) if recomputation.method == "block" else 1.0) / 3
        mlp = (3 if model.gated_linear_unit else 2) * model.hidden_size * model.ffn_hidden_size
        heads = 2 * (model.num_attention_heads + model.num_query_groups) * model.kv_channels * model.hidden_size
        core = model.num_attention_heads * model.kv_channels * self.workload.sequence_length
        again = (mlp if recomputation.recomputes("mlp") else 0) + (core if recomputation.recomputes("core_attn") else 0)
        return again / (mlp + heads + core) / 3

    @property
    def idle_share(self) -> float:
        """The share of a step's work that the pipeline's idle time adds to it, by the schedules' table."""
        idle = (self.mesh.pp - 1) / self.mesh.num_micro_batches(self.workload)
        return idle / 3 if self.mesh.schedule == "zero-bubble" else idle / self.mesh.virtual_stages


def make_plan(workload: Workload, mesh: Mesh) -> Plan:
    """Plan a workload on a mesh.

    Raises:
        ConfigError: the model or the batch cannot be split so.
    """
    mesh.check(workload)
    if workload.adaptation is not None:
        check_adaptation(workload.model, workload.adaptation)
    stages = stage_chunks(workload.model, mesh.pp, mesh.virtual_stages)
    # One tensor-parallel rank, the first, of those with equal shares of everything.
    ranks = sorted({_local_sizes(workload, mesh, rank): rank for rank in reversed(range(mesh.tp))}.values())
    worst = (
        max((plan_rank(workload, mesh, stage, parts, rank) for rank in ranks), key=lambda plan: plan.total)
        for stage, parts in enumerate(stages)
    )
    return Plan(workload, mesh, stages, tuple(worst))


def plan_rank(workload: Workload, mesh: Mesh, stage: int, parts: tuple[StageChunk, ...], rank: int) -> RankPlan:
    """Plan tensor-parallel rank ``rank`` of a stage."""
    x = _local_sizes(workload, mesh, rank)
    adaptation, model = workload.adaptation, workload.model
    is_tied = model.share_embeddings_and_output_weights
    if adaptation is not None:
        model = base_of(model, adaptation)
        workload = replace(workload, model=model)
    by_part = [parameters_of(model, part, tp=mesh.tp, rank=rank) for part in parts]
    params = [param for own in by_part for param in own]
    of_chunks = [step.part(x, workload, mesh.recomputation, part) for part in parts]
    learned: list[Sequence[Parameter]] = list(by_part)
    if adaptation is None:
        state = state_bytes(workload, mesh, params)
    else:
        found = [
            adapted(model, adaptation, part, own, is_tied=is_tied, tp=mesh.tp, rank=rank)
            for part, own in zip(parts, by_part, strict=True)
        ]
        state = adapted_state(workload, mesh, found, rank)
        learned = [each.learned for each in found]
        params += [param for each in found for param in each.adapters]
        of_chunks = [bytes_ + x.e * x.s * x.b * each.ranks for bytes_, each in zip(of_chunks, found, strict=True)]
    in_flight, activations = _in_flight(workload, mesh, stage, of_chunks)
    working = step.recomputed_at_a_time(x, workload, mesh.recomputation, max(len(part.layers) for part in parts))
    if mesh.shards_fully:
        working += gathered_bytes(workload, mesh, parts, by_part)
    return RankPlan(
        **vars(state),
        stage=stage,
        tp_rank=rank,
        num_parameters=sum(param.numel for param in params),
        activations=activations,
        in_flight=in_flight,
        working=working,
        traffic=step.traffic_of(workload, mesh, parts, x, learned),
    )


def _local_sizes(workload: Workload, mesh: Mesh, rank: int) -> step.LocalSizes:
    return step.LocalSizes.of(
        workload.model,
        s=workload.sequence_length,
        b=mesh.micro_batch_size,
        e=workload.element_bytes,
        tp=mesh.tp,
        rank=rank,
        splits_sequence=mesh.splits_sequence,
    )


def _in_flight(workload: Workload, mesh: Mesh, stage: int, of_chunks: list[int]) -> tuple[int, int]:
    """The most micro-batches that a stage holds, and the most bytes of them."""
    if mesh.pp == 1:
        return 1, sum(of_chunks)
    number = mesh.num_micro_batches(workload)
    if mesh.schedule == "gpipe":
        return number, number * sum(of_chunks)
    # Schedules repeat themselves once all stages are at work, so that a few micro-batches hold as much as all do.
    number = min(number, 4 * mesh.pp * mesh.virtual_stages)
    most = most_bytes = 0
    held, held_bytes = 0, 0
    for sign, chunk in _steps(mesh.schedule, mesh.pp, number, mesh.virtual_stages)[stage]:
        held, held_bytes = held + sign, held_bytes + sign * of_chunks[chunk]
        most, most_bytes = max(most, held), max(most_bytes, held_bytes)
    return most, most_bytes


@lru_cache(maxsize=64)
def _steps(name: str, pp: int, number: int, chunks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """``[stage]``, one after the other: 1 where activations of a chunk are kept from then on, -1 where they go."""
    rows = []
    for actions in make_schedule(name, pp, number, chunks).actions:
        splits = any(action.kind is Kind.WEIGHT_GRADIENT for action in actions)
        last = Kind.WEIGHT_GRADIENT if splits else Kind.BACKWARD
        kept_or_freed = (
            (int(action.kind is Kind.FORWARD) - int(action.kind is last), action.chunk) for action in actions
        )
        rows.append(tuple(step for step in kept_or_freed if step[0]))
    return tuple(rows)
