"""Rehearsals of ranks: what each holds, keeps and does in a step.

Of layers that are alike, three of a run are computed and the middle one counts for the rest; of micro-batches, as many
as a schedule needs to repeat itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import FunctionType, NoneType

import torch
from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import stage_layers
from shardwise.core.topology import Groups
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.language_model import LanguageModel
from shardwise.models.recomputation import Recomputation
from shardwise.models.transformer.block import only_layers, spans_of
from shardwise.models.transformer_model import TransformerModel
from shardwise.plan.fake_rank import RankTotals, StateBytes, chunks_of_model, pretended, step_of, totals_of
from shardwise.plan.steps import BACKWARD, FORWARD, WEIGHTS, as_stage, few_micro_batches, profiles_of, walk
from shardwise.plan.timeline import PhaseLabel, Segment, Timeline
from shardwise.plan.workload import Mesh, Workload

# Spans of layers that may alternate, as local and global attention do.
_LONGEST_PERIOD = 8


@dataclass(frozen=True)
class Rehearsed(StateBytes):
    """A rank's step.

    Attributes:
        num_parameters: parameters of this rank, before FSDP splits them.
        parts: layers of each chunk, counted from 0.
        spans: of each chunk: layers of each of ``spans_of``, and whether they are recomputed.
        is_first, is_last: the stage has the first, the last layer of the model.
        makes_gradients: the backward of the first micro-batch allocates the gradients.
        owned: elements that each data-parallel rank updates, with ZeRO; else empty.
        segments: the step in order: what the rank does, each with its peak.
        kept: the most bytes that the forwards of a step keep for backwards at one time.
        in_flight: the most micro-batches whose activations are held at one time, counted once per chunk.
    """

    num_parameters: int
    parts: tuple[range, ...]
    spans: tuple[tuple[tuple[list[int], bool], ...], ...]
    is_first: bool
    is_last: bool
    makes_gradients: bool
    owned: tuple[int, ...]
    segments: tuple[Segment, ...]
    kept: int
    in_flight: int

    def name(self, place: PhaseLabel) -> str:
        """Describe the work at a place of the rank's step, such as ``"backward of layer 37, micro-batch 2"``."""
        action, micro_batch, chunk, span = place
        if action not in (FORWARD, BACKWARD, WEIGHTS):
            return action
        spans, goes_back = self.spans[chunk], action == BACKWARD
        if span is None or action == WEIGHTS:
            what = f" of chunk {chunk}" if len(self.spans) > 1 else ""
        elif 1 <= span <= len(spans):
            layers, again = spans[len(spans) - span if goes_back else span - 1]
            more = f"s {layers[0]} to {layers[-1]}" if len(layers) > 1 else f" {layers[0]}"
            what = f" of{' recomputed' * (again and goes_back)} layer{more}"
        else:
            is_start = (span == 0) != goes_back
            is_end_of_model = (
                self.is_first and chunk == 0 if is_start else self.is_last and chunk == len(self.spans) - 1
            )
            what = f" of the {'embedding' if is_start else 'loss'}" if is_end_of_model else ""
            what = (
                what or f", {'before layer' if is_start else 'after layer'} {self.parts[chunk][0 if is_start else -1]}"
            )
        return f"{action}{what}, micro-batch {micro_batch}"


class Rehearsals:
    """Rehearses ranks of a workload, and remembers what ranks and layouts have in common.

    Args:
        workload: the model and its training.
        limit: the most bytes of a rank; a layout that holds more from step to step is refused.
        estimates: count the state of layers that are alike as that of one of them times their number, which is wrong by
            the padding between parameters of a buffer; False builds all layers of a rank.
    """

    def __init__(self, workload: Workload, *, limit: int | None = None, estimates: bool = False) -> None:
        self.workload = workload
        self.estimates = estimates
        self._limit = limit
        self._steps: dict[Hashable, list[Segment]] = {}
        self._wholes: dict[Hashable, RankTotals] = {}
        self._shapes: dict[Hashable, tuple[tuple[int, ...], Hashable]] = {}

    @cached_property
    def whole_model(self) -> tuple[int, list[int]]:
        """The number of parameters of the model, tied weights once, and a number for the kind of each layer."""
        mesh = Mesh()
        with pretended(self.workload.device_type, mesh, 0) as (groups, _):
            (model,) = chunks_of_model(self.workload.at(mesh).build(groups))
        return sum(param.numel() for param in model.parameters()), kinds_of_layers(model)

    def shapes(self, mesh: Mesh, tp_rank: int) -> tuple[tuple[int, ...], Hashable]:
        """Shapes that may differ between tensor-parallel ranks: of the weights of a layer and of the hidden states."""
        key = mesh.tp, tp_rank, mesh.splits_sequence, mesh.cp, mesh.etp == 1
        if key not in self._shapes:
            alone = Mesh(
                tp=mesh.tp,
                dp=mesh.cp,
                cp=mesh.cp,
                sequence_parallel=mesh.sequence_parallel,
                micro_batch_size=mesh.micro_batch_size,
                # Experts are whole in an exact run.
                etp=1 if mesh.etp == 1 else None,
            )
            workload = self.workload.at(alone)
            with pretended(workload.device_type, alone, tp_rank) as (groups, _), only_layers((0,)):
                (model,) = chunks_of_model(workload.build(groups))
                rows = model.view_of(workload.settings.sequence_length).size, 1, model.config.hidden_size
            self._shapes[key] = rows, tuple(tuple(param.shape) for param in model.parameters())
        return self._shapes[key]

    def of(self, mesh: Mesh, rank: int) -> Rehearsed:
        """Rehearse a step of a rank of a mesh.

        Raises:
            ConfigError: as the run; or the rank's state alone is more than the limit.
        """
        workload = self.workload.at(mesh)
        few = few_micro_batches(mesh, self.workload, 1 if self.estimates else 3)
        stage, tp_rank, dp_rank = rank // (mesh.tp * mesh.dp), rank % mesh.tp, rank // mesh.tp % mesh.dp
        _, kinds = self.whole_model
        parts = stage_layers(len(kinds), mesh.pp, num_chunks=mesh.virtual_stages)[stage]
        short = [_Short.of(part, kinds, mesh.recomputation) for part in parts]
        place = mesh.tp, self.shapes(mesh, tp_rank), mesh.splits_sequence, mesh.pp > 1, stage == 0, stage == mesh.pp - 1
        of_parts = tuple(tuple(kinds[index] for index in part) for part in parts)
        of_experts = mesh.ep, mesh.expert_tp, rank % mesh.expert_tp
        whole_key = *place, mesh.dp, dp_rank, mesh.zero, mesh.fsdp, of_parts, of_experts
        # The ranks that hold all experts stay together.
        fewest = max(2, math.lcm(mesh.tp * mesh.cp, mesh.ep * mesh.expert_tp) // mesh.tp)
        dp = min(mesh.dp, fewest) if self.estimates or not mesh.fsdp else mesh.dp
        alike = tuple(each.kinds for each in short)
        # A stage of an estimate is a part of the whole model.
        is_part = self.estimates and mesh.schedule in ("1f1b", "gpipe")
        step_mesh = dataclasses.replace(mesh, pp=1, dp=dp, schedule="1f1b") if is_part else mesh
        step_key = (
            *(place[:3] if is_part or mesh.pp == 1 else place),
            *(dp, mesh.fsdp, mesh.micro_batch_size, mesh.recomputation, step_mesh.schedule, few, alike, of_experts),
            *(mesh.cp, dp_rank % mesh.cp),
        )
        if whole_key not in self._wholes:
            with pretended(workload.device_type, mesh, rank) as (groups, timeline):
                self._wholes[whole_key] = self._whole(workload, groups, timeline, short)
        whole = self._wholes[whole_key]
        held = whole.state.held(whole.makes_gradients)
        if self._limit is not None and held > self._limit:
            raise ConfigError(f"rank {rank} holds {held} bytes from step to step, more than {self._limit}")
        if step_key not in self._steps:
            layers = {layer for each in short for layer in each.layers}
            workload = workload.at(step_mesh)
            with (
                pretended(workload.device_type, step_mesh, tp_rank if is_part else rank) as (groups, timeline),
                only_layers(layers),
            ):
                self._steps[step_key] = step_of(workload, step_mesh, groups, timeline, few)
        steps = self._steps[step_key]
        if dp != mesh.dp and mesh.fsdp:
            # A rank gives its part of the weights that are gathered.
            steps = [segment.scaled("dp", "all_gather", dp / mesh.dp) for segment in steps]
        if is_part:
            rows, *_ = self.shapes(mesh, tp_rank)
            hidden = math.prod(rows) * mesh.micro_batch_size * workload.element_bytes
            steps = as_stage(steps, hidden, is_first=stage == 0, is_last=stage == mesh.pp - 1)
        profiles = profiles_of(steps, [each.groups for each in short])
        row, kept, in_flight = walk(profiles, mesh, workload, few, stage, whole.num_sums)
        return Rehearsed(
            **vars(whole.state),
            num_parameters=whole.num_parameters,
            parts=tuple(parts),
            spans=tuple(tuple(spans_of(part, mesh.recomputation)) for part in parts),
            is_first=stage == 0,
            is_last=stage == mesh.pp - 1,
            makes_gradients=whole.makes_gradients,
            owned=whole.owned,
            segments=(*row, *whole.ends),
            kept=kept,
            in_flight=in_flight,
        )

    def _whole(self, workload: Workload, groups: Groups, timeline: Timeline, short: Sequence[_Short]) -> RankTotals:
        times = {each.times for each in short}
        if not self.estimates or times == {0} or len(times) > 1:
            return totals_of(workload, groups, timeline)
        found = []
        for number in (1, 2):
            with only_layers({layer for each in short for layers in each.alike[:number] for layer in layers}):
                found.append(totals_of(workload, groups, timeline))
        return found[0].towards(found[1], times.pop() - 1)


def kinds_of_layers(model: LanguageModel) -> list[int]:
    """A number for each layer, equal for layers that compute alike."""
    if isinstance(model, PlannedModel):
        # All layers are rehearsed, because transformers builds all of them.
        return list(range(model.config.num_layers))
    assert isinstance(model, TransformerModel)
    kinds: dict[Hashable, int] = {}
    return [kinds.setdefault(_kind(layer), len(kinds)) for layer in model.block.layers]


def _kind(module: nn.Module) -> Hashable:
    """Equal for layers that compute alike: by the classes, the parameters and the plain attributes of their parts."""
    parts: list[Hashable] = []
    for name, each in module.named_modules():
        values = tuple((key, _value(value)) for key, value in sorted(vars(each).items()) if key != "layer_number")
        tensors = tuple(
            (key, param.shape, param.dtype, param.requires_grad) for key, param in each.named_parameters(recurse=False)
        )
        parts.append((name, type(each), values, tensors))
    return tuple(parts)


def _value(value: object) -> Hashable:
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_value, value))
    if isinstance(value, dict):
        return tuple((key, _value(each)) for key, each in value.items())
    if isinstance(value, FunctionType):
        # Each layer may have a function that a call made for it.
        return value.__code__, tuple(_value(cell.cell_contents) for cell in value.__closure__ or ())
    plain = (int, float, bool, str, Enum, torch.dtype, type, NoneType, frozenset)
    return value if isinstance(value, plain) else type(value)


def _shortened(kinds: Sequence[Hashable]) -> tuple[list[int], list[tuple[int, int]]]:
    """The places to keep of a row of kinds, and ``(length, repeats)`` of the groups that these places make.

    >>> _shortened("aaaaab")
    ([0, 1, 4, 5], [(1, 1), (1, 3), (1, 1), (1, 1)])
    >>> _shortened("lglglglgl")
    ([0, 1, 2, 3, 6, 7, 8], [(2, 1), (2, 2), (2, 1), (1, 1)])
    """
    kept: list[int] = []
    groups: list[tuple[int, int]] = []
    place = 0
    while place < len(kinds):
        best, times = 1, 1
        for period in range(1, _LONGEST_PERIOD + 1):
            pattern, number = kinds[place : place + period], 1
            while kinds[place + number * period : place + (number + 1) * period] == pattern:
                number += 1
            if number > 3 and number * period - 3 * period > times * best - 3 * best * (times > 3):
                best, times = period, number
        if times > 3:
            last = place + (times - 1) * best
            kept += [*range(place, place + 2 * best), *range(last, last + best)]
            groups += [(best, 1), (best, times - 2), (best, 1)]
        else:
            kept.append(place)
            groups.append((1, 1))
        place += best * times
    return kept, groups


@dataclass(frozen=True)
class _Short:
    """A chunk in which only some of the layers that are alike are left.

    Where the chunk is one group of spans ``times`` times, ``alike`` has the layers of the first two. ``kinds`` are
    those of the layers of each span that is left, and whether it is recomputed; ``groups`` as ``_shortened``.
    """

    layers: list[int]
    alike: list[list[int]]
    times: int
    kinds: Hashable
    groups: list[tuple[int, int]]

    @classmethod
    def of(cls, part: range, kinds: Sequence[int], recomputation: Recomputation) -> _Short:
        """Shorten a chunk of the layers ``part``."""
        spans = list(spans_of(part, recomputation))
        of_spans = [(tuple(kinds[layer] for layer in layers), again) for layers, again in spans]
        places, groups = _shortened(of_spans)
        left = [layer for place in places for layer in spans[place][0]]
        alike: list[list[int]] = []
        length, times = groups[0][0], sum(number for _, number in groups)
        if len(groups) == 3 and groups[1][1] > 1:
            alike = [[layer for layers, _ in spans[n * length : (n + 1) * length] for layer in layers] for n in (0, 1)]
        return cls(left, alike, times if alike else 0, tuple(of_spans[place] for place in places), groups)
