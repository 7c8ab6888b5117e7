"""The bytes of every pipeline stage: of its rank that needs the most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.run.plan import kept
from shardwise.run.plan.adapters import adapted, adapted_state, base_of, check_adaptation
from shardwise.run.plan.kept import Share
from shardwise.run.plan.parameters import Parameter, Part, parameters_of, parts_of
from shardwise.run.plan.state import gathered_bytes, state_bytes
from shardwise.run.plan.traffic import Traffic, traffic_of
from shardwise.run.plan.workload import Layout, Workload
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
        workload, layout: of which it is the plan.
        stages: of each pipeline stage the rank that needs the most.
    """

    workload: Workload
    layout: Layout
    stages: tuple[RankPlan, ...]

    @property
    def worst(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.stages, key=lambda rank: rank.total)

    @property
    def sent(self) -> int:
        """The most bytes that a rank sends in a step."""
        return max(rank.traffic.sent(self.layout) for rank in self.stages)

    @property
    def repeated_work(self) -> float:
        """What recomputation adds to the work of a step, as a share of it; a forward is a third."""
        return repeated_work(self.workload, self.layout)

    @property
    def idle_share(self) -> float:
        """What the pipeline's idle time adds to a step, as a share of the work."""
        return idle_share(self.workload, self.layout)


def make_plan(workload: Workload, layout: Layout) -> Plan:
    """Plan a run.

    Raises:
        ConfigError: the model or the batch cannot be split so.
    """
    layout.check(workload)
    if workload.adaptation is not None:
        check_adaptation(workload.model, workload.adaptation)
    stages = parts_of(workload.model, layout.pp, layout.virtual_stages)
    ranks = distinct_ranks(workload, layout)
    return Plan(
        workload,
        layout,
        tuple(
            max((plan_rank(workload, layout, stage, parts, rank) for rank in ranks), key=lambda plan: plan.total)
            for stage, parts in enumerate(stages)
        ),
    )


def distinct_ranks(workload: Workload, layout: Layout) -> list[int]:
    """Tensor-parallel ranks of which no earlier one holds as much of everything."""
    shares = {_share(workload, layout, rank): rank for rank in reversed(range(layout.tp))}
    return sorted(shares.values())


def plan_rank(workload: Workload, layout: Layout, stage: int, parts: tuple[Part, ...], rank: int) -> RankPlan:
    """What tensor-parallel rank ``rank`` of a stage needs."""
    x = _share(workload, layout, rank)
    adaptation, model = workload.adaptation, workload.model
    is_tied = model.share_embeddings_and_output_weights
    if adaptation is not None:
        model = base_of(model, adaptation)
        workload = replace(workload, model=model)
    by_part = [parameters_of(model, part, tp=layout.tp, rank=rank) for part in parts]
    params = [param for own in by_part for param in own]
    of_chunks = [kept.part(x, workload, layout.recomputation, part) for part in parts]
    learned: list[Sequence[Parameter]] = list(by_part)
    if adaptation is None:
        state = state_bytes(workload, layout, params)
    else:
        found = [
            adapted(model, adaptation, part, own, is_tied=is_tied, tp=layout.tp, rank=rank)
            for part, own in zip(parts, by_part, strict=True)
        ]
        state = adapted_state(workload, layout, found, rank)
        learned = [each.learned for each in found]
        params += [param for each in found for param in each.adapters]
        of_chunks = [bytes_ + x.e * x.s * x.b * each.ranks for bytes_, each in zip(of_chunks, found, strict=True)]
    in_flight, activations = _in_flight(workload, layout, stage, of_chunks)
    working = kept.recomputed_at_a_time(x, workload, layout.recomputation, max(len(part.layers) for part in parts))
    if layout.shards_fully:
        working += gathered_bytes(workload, layout, parts, by_part)
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
        traffic_of(workload, layout, parts, x, learned),
    )


def _share(workload: Workload, layout: Layout, rank: int) -> Share:
    return Share.of(
        workload.model,
        s=workload.sequence_length,
        b=layout.micro_batch_size,
        e=workload.element_bytes,
        tp=layout.tp,
        rank=rank,
        splits_sequence=layout.splits_sequence,
    )


def _in_flight(workload: Workload, layout: Layout, stage: int, of_chunks: list[int]) -> tuple[int, int]:
    """The most micro-batches that a stage holds, and the most bytes of them."""
    if layout.pp == 1:
        return 1, sum(of_chunks)
    number = layout.num_micro_batches(workload)
    if layout.schedule == "gpipe":
        return number, number * sum(of_chunks)
    number = _enough_micro_batches(layout, number)
    most = most_bytes = 0
    held, held_bytes = 0, 0
    for sign, chunk in _steps(layout.schedule, layout.pp, number, layout.virtual_stages)[stage]:
        held, held_bytes = held + sign, held_bytes + sign * of_chunks[chunk]
        most, most_bytes = max(most, held), max(most_bytes, held_bytes)
    return most, most_bytes


def _enough_micro_batches(layout: Layout, number: int) -> int:
    """As few as hold as much as ``number`` do: schedules repeat themselves once all stages are at work."""
    return min(number, 4 * layout.pp * layout.virtual_stages)


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


def repeated_work(workload: Workload, layout: Layout) -> float:
    """See ``Plan.repeated_work``: of a recomputed layer a third, of a part of it a third of the part's work."""
    recomputation, model = layout.recomputation, workload.model
    if recomputation.granularity is None:
        return 0.0
    if recomputation.granularity == "full":
        share = 1.0
        if recomputation.method == "block":
            parts = layout.pp * layout.virtual_stages
            share = min(1.0, recomputation.num_layers * parts / model.num_layers)
        return share / 3
    sections = 3 if model.gated_linear_unit else 2
    mlp = sections * model.hidden_size * model.ffn_hidden_size
    heads = 2 * (model.num_attention_heads + model.num_query_groups) * model.kv_channels * model.hidden_size
    core = model.num_attention_heads * model.kv_channels * workload.sequence_length
    again = (mlp if recomputation.recomputes("mlp") else 0) + (core if recomputation.recomputes("core_attn") else 0)
    return again / (mlp + heads + core) / 3


def idle_share(workload: Workload, layout: Layout) -> float:
    """See ``Plan.idle_share``: as the schedules' table says."""
    number = layout.num_micro_batches(workload)
    idle = (layout.pp - 1) / number
    return idle / 3 if layout.schedule == "zero-bubble" else idle / layout.virtual_stages
