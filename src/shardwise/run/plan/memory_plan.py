"""The bytes of every pipeline stage: of its rank that needs the most."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.run.plan import kept
from shardwise.run.plan.adapters import adapted, adapted_state, base_of, check_adaptation
from shardwise.run.plan.kept import Share
from shardwise.run.plan.parameters import Parameter, Part, parameters_of, parts_of
from shardwise.run.plan.state import gathered_bytes, state_bytes
from shardwise.run.plan.traffic import Traffic, traffic_of
from shardwise.run.plan.workload import Mesh, Workload
from shardwise.training.pipeline.actions import Kind
from shardwise.training.pipeline.schedules import make_schedule


@dataclass(frozen=True)
class RankPlan:
    """What one rank needs.

    Attributes:
        stage: of the pipeline.
        tp_rank: of the stage's ranks.
        num_parameters: that this rank holds; with fsdp, before they are split over data-parallel ranks.
        weights, gradients, masters, optimizer: bytes from step to step; see ``StateBytes``.
        activations: bytes that are kept for the backward, of all micro-batches in flight at one time.
        in_flight: micro-batches of which activations are held at one time, counted once per chunk.
        working: bytes of what is there only for a moment: a layer that is being recomputed with the gathered inputs of
            its linear layers; with fsdp the parameters that are gathered, and gradients that accumulate.
        traffic: what it sends in a step.
    """

    stage: int
    tp_rank: int
    num_parameters: int
    weights: int
    gradients: int
    masters: int
    optimizer: int
    activations: int
    in_flight: int
    working: int
    traffic: Traffic

    @property
    def state(self) -> int:
        """Bytes from step to step."""
        return self.weights + self.gradients + self.masters + self.optimizer

    @property
    def total(self) -> int:
        """All bytes."""
        return self.state + self.activations + self.working


@dataclass(frozen=True)
class Plan:
    """What a run needs at one layout.

    Attributes:
        workload, mesh: of which it is the plan.
        stages: of each pipeline stage the rank that needs the most.
    """

    workload: Workload
    mesh: Mesh
    stages: tuple[RankPlan, ...]

    @property
    def worst(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.stages, key=lambda rank: rank.total)

    @property
    def sent(self) -> int:
        """The most bytes that a rank sends in a step."""
        return max(rank.traffic.sent(self.mesh) for rank in self.stages)

    @property
    def repeated_work(self) -> float:
        """What recomputation adds to the work of a step, as a share of it; a forward is a third."""
        return repeated_work(self.workload, self.mesh)

    @property
    def idle_share(self) -> float:
        """What the pipeline's idle time adds to a step, as a share of the work."""
        return idle_share(self.workload, self.mesh)


def make_plan(workload: Workload, mesh: Mesh) -> Plan:
    """Plan a run.

    Raises:
        ConfigError: the model or the batch cannot be split so.
    """
    mesh.check(workload)
    if workload.adaptation is not None:
        check_adaptation(workload.model, workload.adaptation)
    stages = parts_of(workload.model, mesh.pp, mesh.virtual_stages)
    ranks = distinct_ranks(workload, mesh)
    return Plan(
        workload,
        mesh,
        tuple(
            max((plan_rank(workload, mesh, stage, parts, rank) for rank in ranks), key=lambda plan: plan.total)
            for stage, parts in enumerate(stages)
        ),
    )


def distinct_ranks(workload: Workload, mesh: Mesh) -> list[int]:
    """Tensor-parallel ranks of which no earlier one holds as much of everything."""
    shares = {_share(workload, mesh, rank): rank for rank in reversed(range(mesh.tp))}
    return sorted(shares.values())


def plan_rank(workload: Workload, mesh: Mesh, stage: int, parts: tuple[Part, ...], rank: int) -> RankPlan:
    """What tensor-parallel rank ``rank`` of a stage needs."""
    x = _share(workload, mesh, rank)
    adaptation, model = workload.adaptation, workload.model
    is_tied = model.share_embeddings_and_output_weights
    if adaptation is not None:
        model = base_of(model, adaptation)
        workload = replace(workload, model=model)
    by_part = [parameters_of(model, part, tp=mesh.tp, rank=rank) for part in parts]
    params = [param for own in by_part for param in own]
    of_chunks = [kept.part(x, workload, mesh.recomputation, part) for part in parts]
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
    working = kept.recomputed_at_a_time(x, workload, mesh.recomputation, max(len(part.layers) for part in parts))
    if mesh.shards_fully:
        working += gathered_bytes(workload, mesh, parts, by_part)
    return RankPlan(
        stage,
        rank,
        sum(param.numel for param in params),
        state.weights,
        state.gradients,
        state.masters,
        state.optimizer,
        activations,
        in_flight,
        working,
        traffic_of(workload, mesh, parts, x, learned),
    )


def _share(workload: Workload, mesh: Mesh, rank: int) -> Share:
    return Share.of(
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
    number = _enough_micro_batches(mesh, number)
    most = most_bytes = 0
    held, held_bytes = 0, 0
    for sign, chunk in _steps(mesh.schedule, mesh.pp, number, mesh.virtual_stages)[stage]:
        held, held_bytes = held + sign, held_bytes + sign * of_chunks[chunk]
        most, most_bytes = max(most, held), max(most_bytes, held_bytes)
    return most, most_bytes


def _enough_micro_batches(mesh: Mesh, number: int) -> int:
    """As few as hold as much as ``number`` do: schedules repeat themselves once all stages are at work."""
    return min(number, 4 * mesh.pp * mesh.virtual_stages)


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


def repeated_work(workload: Workload, mesh: Mesh) -> float:
    """See ``Plan.repeated_work``: of a recomputed layer a third, of a part of it a third of the part's work."""
    recomputation, model = mesh.recomputation, workload.model
    if recomputation.granularity is None:
        return 0.0
    if recomputation.granularity == "full":
        share = 1.0
        if recomputation.method == "block":
            parts = mesh.pp * mesh.virtual_stages
            share = min(1.0, recomputation.num_layers * parts / model.num_layers)
        return share / 3
    sections = 3 if model.gated_linear_unit else 2
    mlp = sections * model.hidden_size * model.ffn_hidden_size
    heads = 2 * (model.num_attention_heads + model.num_query_groups) * model.kv_channels * model.hidden_size
    core = model.num_attention_heads * model.kv_channels * workload.sequence_length
    again = (mlp if recomputation.recomputes("mlp") else 0) + (core if recomputation.recomputes("core_attn") else 0)
    return again / (mlp + heads + core) / 3


def idle_share(workload: Workload, mesh: Mesh) -> float:
    """See ``Plan.idle_share``: as the schedules' table says."""
    number = mesh.num_micro_batches(workload)
    idle = (mesh.pp - 1) / number
    return idle / 3 if mesh.schedule == "zero-bubble" else idle / mesh.virtual_stages
