"""One rank of a run on fake tensors: its model, its optimizer and a step, with the memory of each part of the step.

The process group is PyTorch's ``fake`` one, so that this process is any rank of any number. The model, the trainer and
the pipeline are those of a run. Of layers that are alike, three of a run are computed and the middle one counts for the
rest; of micro-batches, as many as a schedule needs to repeat itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from types import FunctionType, NoneType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import stage_layers
from shardwise.core.sharding.balanced import is_sharded, local_rows
from shardwise.core.topology import Groups, Topology
from shardwise.kernels.planning import planning_for
from shardwise.models.description import ModelChunks
from shardwise.models.recomputation import Recomputation
from shardwise.models.transformer.block import only_layers, spans_of
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn.replicated import named_param_layouts
from shardwise.run.plan.machine import saved_bytes
from shardwise.run.plan.timeline import Label, Segment, Sent, Timeline, address, joined, read_at_once
from shardwise.run.plan.workload import Mesh, Workload
from shardwise.storage.adapters.model import trained_of
from shardwise.training.optimizer.optimizer import ShardedOptimizer
from shardwise.training.pipeline.schedules import Action, Kind, make_schedule
from shardwise.training.pipeline.stage import hidden_shape
from shardwise.training.trainer import Trainer

# Spans of layers that may alternate, as local and global attention do.
_LONGEST_PERIOD = 8


@dataclass(frozen=True)
class StateBytes:
    """The bytes that one rank holds from step to step.

    Attributes:
        weights: parameters; with zero in buffers.
        gradients: in their buffers, or as the backward makes them.
        masters: fp32 copies of parameters in 16 bits.
        optimizer: its state of each parameter.
        others: buffers of the model, original values of weights that are trained next to adapters, and a teacher.
        saved: of a host copy of what the rank writes into a checkpoint.
    """

    weights: int
    gradients: int
    masters: int
    optimizer: int
    others: int
    saved: int


@dataclass(frozen=True)
class _Whole:
    """What the layers of a rank have together, without their activations.

    Attributes:
        num_parameters: parameters of this rank, before FSDP splits them.
        state: bytes from step to step.
        makes_gradients: the backward of the first micro-batch allocates the gradients.
        owned: elements that each data-parallel rank updates, with ZeRO; else empty.
        ends: the sums of gradients and the update, at the end of a step.
    """

    num_parameters: int
    state: StateBytes
    makes_gradients: bool
    owned: tuple[int, ...]
    ends: tuple[Segment, ...]

    @property
    def held(self) -> int:
        """Bytes at the start of a step."""
        state = self.state
        gradients = 0 if self.makes_gradients else state.gradients
        return state.weights + gradients + state.masters + state.optimizer + state.others

    def towards(self, other: _Whole, times: int) -> _Whole:
        """Add ``times`` times the difference to another one."""

        def more(own: int, further: int) -> int:
            return own + times * (further - own)

        def longer(own: Segment, further: Segment) -> Segment:
            sent = Counter({key: more(own.sent[key], further.sent[key]) for key in own.sent if key in further.sent})
            # Larger buckets are as many collectives of more bytes.
            for axis, name in {(key.axis, key.name) for key in own.sent.keys() ^ further.sent.keys()}:
                totals = [
                    sum(key.num_bytes * count for key, count in each.sent.items() if key[:2] == (axis, name))
                    for each in (own, further)
                ]
                known = sum(key.num_bytes * count for key, count in sent.items() if key[:2] == (axis, name))
                sent[Sent(axis, name, max(0, more(*totals) - known))] += 1
            return dataclasses.replace(own, peak=more(own.peak, further.peak), sent=sent)

        state = {name: more(value, vars(other.state)[name]) for name, value in vars(self.state).items()}
        number = more(self.num_parameters, other.num_parameters)
        ends = tuple(map(longer, self.ends, other.ends))
        return dataclasses.replace(self, num_parameters=number, state=StateBytes(**state), ends=ends)


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

    def name(self, place: Label) -> str:
        """What the rank does at a place of its step, such as ``"backward of layer 37, micro-batch 2"``, from 0."""
        action, micro_batch, chunk, span = place
        if action not in (_FORWARD, _BACKWARD, _WEIGHTS):
            return action
        spans, goes_back = self.spans[chunk], action == _BACKWARD
        if span is None or action == _WEIGHTS:
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
        self._wholes: dict[Hashable, _Whole] = {}
        self._shapes: dict[Hashable, tuple[tuple[int, ...], Hashable]] = {}

    @cached_property
    def whole_model(self) -> tuple[int, list[int]]:
        """The number of parameters of the model, tied weights once, and a number for the kind of each layer."""
        mesh = Mesh()
        with pretended(self.workload.device_type, mesh, 0) as (groups, _):
            (model,) = _chunks_of(self.workload.at(mesh).build(groups))
        return sum(param.numel() for param in model.parameters()), kinds_of_layers(model)

    def shapes(self, mesh: Mesh, tp_rank: int) -> tuple[tuple[int, ...], Hashable]:
        """Shapes that may differ between tensor-parallel ranks: of the weights of a layer and of the hidden states."""
        key = mesh.tp, tp_rank, mesh.splits_sequence
        if key not in self._shapes:
            alone = Mesh(tp=mesh.tp, sequence_parallel=mesh.sequence_parallel, micro_batch_size=mesh.micro_batch_size)
            workload = self.workload.at(alone)
            with pretended(workload.device_type, alone, tp_rank) as (groups, _), only_layers((0,)):
                (model,) = _chunks_of(workload.build(groups))
                rows = hidden_shape(model.config, workload.settings.sequence_length, 1, tp_group=groups.tp)
            self._shapes[key] = rows, tuple(tuple(param.shape) for param in model.parameters())
        return self._shapes[key]

    def of(self, mesh: Mesh, rank: int) -> Rehearsed:
        """Rehearse a step of a rank of a mesh.

        Raises:
            ConfigError: as the run; or the rank's state alone is more than the limit.
        """
        workload = self.workload.at(mesh)
        few = _few_micro_batches(mesh, self.workload, 1 if self.estimates else 3)
        stage, tp_rank, dp_rank = rank // (mesh.tp * mesh.dp), rank % mesh.tp, rank // mesh.tp % mesh.dp
        _, kinds = self.whole_model
        parts = stage_layers(len(kinds), mesh.pp, num_chunks=mesh.virtual_stages)[stage]
        short = [_Short.of(part, kinds, mesh.recomputation) for part in parts]
        place = mesh.tp, self.shapes(mesh, tp_rank), mesh.splits_sequence, mesh.pp > 1, stage == 0, stage == mesh.pp - 1
        of_parts = tuple(tuple(kinds[index] for index in part) for part in parts)
        whole_key = *place, mesh.dp, dp_rank, mesh.zero, mesh.fsdp, of_parts
        dp = min(mesh.dp, 2) if self.estimates or not mesh.fsdp else mesh.dp
        alike = tuple(each.kinds for each in short)
        # A stage of an estimate is a part of the whole model.
        is_part = self.estimates and mesh.schedule in ("1f1b", "gpipe")
        step_mesh = dataclasses.replace(mesh, pp=1, dp=dp, schedule="1f1b") if is_part else mesh
        step_key = (
            *(place[:3] if is_part or mesh.pp == 1 else place),
            *(dp, mesh.fsdp, mesh.micro_batch_size, mesh.recomputation, step_mesh.schedule, few, alike),
        )
        if whole_key not in self._wholes:
            with pretended(workload.device_type, mesh, rank) as (groups, timeline):
                self._wholes[whole_key] = self._whole(workload, groups, timeline, short)
        whole = self._wholes[whole_key]
        if self._limit is not None and whole.held > self._limit:
            raise ConfigError(f"rank {rank} holds {whole.held} bytes from step to step, more than {self._limit}")
        if step_key not in self._steps:
            layers = {layer for each in short for layer in each.layers}
            workload = workload.at(step_mesh)
            with (
                pretended(workload.device_type, step_mesh, tp_rank if is_part else rank) as (groups, timeline),
                only_layers(layers),
            ):
                self._steps[step_key] = _step(workload, step_mesh, groups, timeline, few)
        steps = self._steps[step_key]
        if dp != mesh.dp and mesh.fsdp:
            # A rank gives its part of the weights that are gathered.
            steps = [segment.scaled("dp", "all_gather", dp / mesh.dp) for segment in steps]
        if is_part:
            rows, *_ = self.shapes(mesh, tp_rank)
            hidden = math.prod(rows) * mesh.micro_batch_size * workload.element_bytes
            steps = _as_stage(steps, hidden, is_first=stage == 0, is_last=stage == mesh.pp - 1)
        profiles = _profiles(steps, [each.groups for each in short])
        row, kept, in_flight = _walk(profiles, mesh, workload, few, stage)
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

    def _whole(self, workload: Workload, groups: Groups, timeline: Timeline, short: Sequence[_Short]) -> _Whole:
        times = {each.times for each in short}
        if not self.estimates or times == {0} or len(times) > 1:
            return _whole(workload, groups, timeline)
        found = []
        for number in (1, 2):
            with only_layers({layer for each in short for layers in each.alike[:number] for layer in layers}):
                found.append(_whole(workload, groups, timeline))
        return found[0].towards(found[1], times.pop() - 1)


@contextlib.contextmanager
def pretended(device_type: str, mesh: Mesh, rank: int) -> Iterator[tuple[Groups, Timeline]]:
    """Be one rank of a mesh, with fake tensors that stand for tensors of the device of the plan."""
    resize, collects = torch.UntypedStorage.resize_, gc.isenabled()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world_size)
    try:
        # A model of before must not be freed while a part of a step is measured.
        gc.disable()
        topology = Topology.create(tp=mesh.tp, pp=mesh.pp)
        # With two stages ``embd`` and ``pp`` are one group.
        axes = {
            str(topology.group(name).group_name): name
            for name in ("embd", "dp", "pp", "tp")
            if name in topology and topology.size(name) > 1
        }
        timeline = Timeline(axes)

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            timeline.count(storage)
            return result

        replaced: list[tuple[Any, str, Any]] = [
            (FakeTensor, "tolist", read_at_once),
            (FakeTensor, "data_ptr", address),
            (torch.UntypedStorage, "resize_", resized),
            # Its operator would be remembered with its storages, which would never be freed.
            (torch.UntypedStorage, "copy_", lambda storage, source, non_blocking=None: storage),
        ]
        if device_type == "cuda":
            from shardwise.kernels.planned import functions_on_cuda

            replaced += [(F, name, function) for name, function in functions_on_cuda(timeline.count_flops).items()]
        with contextlib.ExitStack() as stack:
            for owner, name, stand_in in replaced:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, stand_in)
            stack.enter_context(planning_for(device_type))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(timeline)
            yield Groups.of(topology), timeline
    finally:
        dist.destroy_process_group()
        if collects:
            gc.enable()


def _chunks_of(model: TransformerModel | ModelChunks) -> list[TransformerModel]:
    return list(model) if isinstance(model, ModelChunks) else [model]  # type: ignore[arg-type]


def _whole(workload: Workload, groups: Groups, timeline: Timeline) -> _Whole:
    """The state of a rank, and what it does after the last backward of a step."""
    model = workload.build(groups)
    number = sum(param.numel() for param in dict.fromkeys(model.parameters()))
    trainer = Trainer(workload.settings, model, groups, workload.objective(groups))
    made = _make_state(trainer.optimizer, model, groups.tp.size())
    seen: set[int] = set()

    def bytes_of(tensors: Iterable[Tensor | None]) -> int:
        total = 0
        for tensor in tensors:
            for part in () if tensor is None else _plain(tensor):
                storage = part.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    total += storage.nbytes()
        return total

    trained = [param for param in model.parameters() if param.requires_grad]
    weight_of: Callable[[Parameter], Tensor] = getattr(trainer.optimizer, "weight_of", lambda param: param)
    weights = bytes_of(model.parameters())
    gradients = bytes_of(getattr(param, "main_grad", None) for param in trained)
    makes_gradients = gradients == 0 and bool(trained)
    if makes_gradients:
        # Rows that data-parallel ranks share are filled up.
        gradients = sum(
            part.untyped_storage().nbytes() if is_sharded(param) else part.nbytes
            for param in trained
            for part in _plain(param)
        )
    masters = bytes_of(map(weight_of, trained))
    optimizer = bytes_of(made)
    teacher: nn.Module | None = getattr(trainer.objective, "teacher", None)
    others = [*model.buffers(), *(() if teacher is None else (*teacher.parameters(), *teacher.buffers()))]
    others += [each.original for each in trained_of(model).parameters]
    pinned = workload.device_type == "cuda"
    state = StateBytes(weights, gradients, masters, optimizer, bytes_of(others), saved_bytes(trainer, pinned=pinned))
    # A step without micro-batches has only what comes after them.
    finish, update = trainer.gradients.finish, trainer.optimizer.step

    def finished() -> None:
        if makes_gradients:
            for param in trained:
                param.grad = torch.zeros_like(param)
        timeline.mark(Label("sums of gradients"))
        finish()

    def updated() -> None:
        timeline.mark(Label("update"))
        update()

    begin = trainer.gradients.begin
    # Exact gradients are sums of at least one micro-batch.
    trainer.gradients.begin = lambda _: begin(1)  # type: ignore[method-assign,assignment]
    trainer._pipeline, place = None, len(timeline.segments)
    trainer.gradients.finish, trainer.optimizer.step = finished, updated  # type: ignore[method-assign]
    trainer.step(0, [])
    trainer.wait_for_weights()
    timeline.mark(None)
    ends = tuple(timeline.segments[place:])
    owned: tuple[int, ...] = ()
    if trainer.zero is not None:
        intervals = [share.intervals for share in trainer.zero.parameters.shares.values()]
        owned = tuple(sum(stop - start for start, stop in each) for each in zip(*intervals, strict=True))
    return _Whole(number, state, makes_gradients, owned, ends)


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that a tensor consists of: the rows of a sharded one, the codes of a quantised one."""
    tensor = local_rows(tensor)
    if type(tensor) not in (Tensor, Parameter, FakeTensor) and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _make_state(optimizer: ShardedOptimizer, model: nn.Module, tp: int) -> list[Tensor]:
    """The optimizer's tensors, which are made here, before its first step."""
    tensors: list[Tensor] = []
    for _, param, layout in named_param_layouts(model, tp):
        if param.requires_grad:
            tensors += [tensor for tensor, _ in optimizer.state_of(param, layout).values()]
    # The numbers of steps, which are no part of a checkpoint.
    inner: Any = optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    states = getattr(getattr(inner, "_adamw", inner), "state", {})
    tensors += [each for state in states.values() for each in state.values() if isinstance(each, Tensor)]
    return tensors


def kinds_of_layers(model: TransformerModel) -> list[int]:
    """A number for each layer, equal for layers that compute alike."""
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
    plain = (int, float, bool, str, Enum, torch.dtype, type, FunctionType, NoneType, frozenset)
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

    Attributes:
        layers: layers that are left, counted from 0.
        alike: where the chunk is one group of spans ``times`` times, the layers of the first two; else empty.
        times: number of these groups, or 0.
        kinds: kinds of the layers of each span that is left, and whether it is recomputed.
        groups: as ``_shortened``.
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


def _step(
    workload: Workload,
    mesh: Mesh,
    groups: Groups,
    timeline: Timeline,
    micro_batches: int,
) -> list[Segment]:
    """The parts of a step up to the last backward, without sums over data-parallel ranks but those of FSDP."""
    model = workload.build(groups)
    trainer = Trainer(workload.settings, model, groups, workload.objective(groups))
    _make_state(trainer.optimizer, model, groups.tp.size())
    batches = [workload.batch(mesh.micro_batch_size, trainer._needs_lengths) for _ in range(micro_batches)]
    place = len(timeline.segments)
    _watch(trainer, _chunks_of(model), timeline)
    timeline.mark(_START)
    with contextlib.suppress(_FinishedError):
        trainer.step(0, batches)
    return [segment if mesh.fsdp else segment.without("dp") for segment in timeline.segments[place:]]


def _few_micro_batches(mesh: Mesh, workload: Workload, wanted: int) -> int:
    """The first, a middle and the last, or more where a schedule takes them in groups."""
    number = mesh.num_micro_batches(workload)
    if mesh.pp > 1 and mesh.schedule == "interleaved":
        return min(number, mesh.pp * math.ceil(wanted / mesh.pp))
    return min(number, wanted)


_FORWARD, _BACKWARD, _WEIGHTS = "forward", "backward", "weight gradients"
_NAMES = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.INPUT_GRADIENT: _BACKWARD,
    Kind.WEIGHT_GRADIENT: _WEIGHTS,
}
_START = Label("start")


def _watch(trainer: Trainer, chunks: Sequence[TransformerModel], timeline: Timeline) -> None:
    """Mark each action of a step, and in it each span of layers."""
    current = [_START]

    def begin(label: Label) -> None:
        current[0] = label
        timeline.mark(label)

    def before_action(action: Action) -> None:
        begin(Label(_NAMES[action.kind], action.micro_batch, action.chunk, 0))

    trainer.before_action = before_action
    for number, chunk in enumerate(chunks):
        last = sum(1 for _ in spans_of(list(chunk.block.layers), chunk.block._recompute))
        chunk.block.before_span = _Spans(number, last, current, begin)

    def finished() -> None:
        timeline.mark(None)
        raise _FinishedError

    trainer.gradients.finish = finished  # type: ignore[method-assign]


class _FinishedError(Exception):
    """The last backward of a step is done; ``_whole`` has what follows."""


@dataclass
class _Spans:
    """Marks the spans of a chunk's layers, in the forward and in the backward.

    Attributes:
        chunk: number of the chunk.
        last: number of its spans.
        current: label of the current segment.
        begin: begins a segment.
    """

    chunk: int
    last: int
    current: list[Label]
    begin: Callable[[Label], None]

    def __post_init__(self) -> None:
        self._place = 0

    def __call__(self, hidden: Tensor) -> None:
        if _in_backward() or not torch.is_grad_enabled():
            return
        place, self._place = self._place, (self._place + 1) % (self.last + 1)
        micro_batch = self.current[0].micro_batch
        self.begin(Label(_FORWARD, micro_batch, self.chunk, place + 1))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._after(gradient, micro_batch, place))

    def _after(self, gradient: Tensor, micro_batch: int, place: int) -> Tensor:
        self.begin(Label(_BACKWARD, micro_batch, self.chunk, self.last + 1 - place))
        return gradient


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _as_stage(segments: Sequence[Segment], hidden: int, *, is_first: bool, is_last: bool) -> list[Segment]:
    """A step of a whole model as one of a pipeline stage: messages of ``hidden`` bytes instead of what it lacks."""
    last = max(segment.place.span or 0 for segment in segments)
    message = Counter({Sent("pp", "send", hidden): 1})
    stands_for: dict[tuple[str, int], tuple[int, int, Counter[Sent]]] = {}
    if not is_first:
        stands_for |= {(_FORWARD, 0): (hidden, hidden, Counter()), (_BACKWARD, last): (0, -hidden, message)}
    if not is_last:
        stands_for |= {(_FORWARD, last): (0, 0, message), (_BACKWARD, 0): (hidden, 0, Counter())}
    row = []
    for segment in segments:
        found = stands_for.get((segment.place.action, segment.place.span or 0))
        row.append(segment if found is None else Segment(segment.place, found[0], found[1], sent=found[2]))
    return row


# Each action as one segment.
Profiles = dict[Label, Segment]


def _profiles(segments: Sequence[Segment], repeats: Sequence[Sequence[tuple[int, int]]]) -> Profiles:
    """Each action as one segment, with every layer that was left out."""
    by_action: dict[Label, dict[int, list[Segment]]] = {}
    for segment in segments:
        spans = by_action.setdefault(segment.place._replace(span=None), {})
        spans.setdefault(segment.place.span or 0, []).append(segment)
    profiles: Profiles = {}
    for action, spans in by_action.items():
        groups = list(repeats[action.chunk])
        if action.action == _BACKWARD:
            groups.reverse()
        # What comes before the first span, the spans, and what comes after the last.
        order, last = [0], max(spans)
        for length, times in groups if last else ():
            order += [*range(order[-1] + 1, order[-1] + 1 + length)] * times
        order += range(order[-1] + 1, last + 1)
        row = []
        for number, place in enumerate(order):
            label = action._replace(span=number)
            row.append(dataclasses.replace(joined(spans.get(place, []), label), at=label))
        profiles[action] = dataclasses.replace(joined(row, action), parts=tuple(row))
    return profiles


_schedule = lru_cache(maxsize=64)(make_schedule)


def _walk(profiles: Profiles, mesh: Mesh, workload: Workload, few: int, stage: int) -> tuple[list[Segment], int, int]:
    """All segments of a step of all micro-batches; the most bytes that forwards keep, and micro-batches in flight."""
    number = mesh.num_micro_batches(workload)

    def profile(name: str, micro_batch: int, chunk: int) -> Segment:
        # The first, the last, or one between them.
        like = 0 if micro_batch == 0 else max(1, few - 1) if micro_batch == number - 1 else 1
        found, place = profiles.get(Label(name, like, chunk)), Label(name, micro_batch, chunk)
        if found is None or found.at is None:
            return Segment(place)
        return dataclasses.replace(found, place=place, at=found.at._replace(micro_batch=micro_batch))

    if few == 1:
        profiles = profiles | {place._replace(micro_batch=1): each for place, each in profiles.items()}
    # A middle micro-batch leaves nothing: gradients are the first one's, and messages that are still on their way are
    # those of a few micro-batches.
    for chunk in range(mesh.virtual_stages):
        names = [name for name in (_FORWARD, _BACKWARD, _WEIGHTS) if Label(name, 1, chunk) in profiles]
        left = sum(profiles[Label(name, 1, chunk)].net for name in names)
        if names:
            place = Label(names[-1], 1, chunk)
            last = profiles[place]
            profiles = profiles | {place: dataclasses.replace(last, net=last.net - left)}
    row = [profiles.get(_START, Segment(_START))]
    held = most = flight = most_in_flight = 0
    # Schedules repeat themselves once all stages are at work.
    shown = min(number, 4 * mesh.pp * mesh.virtual_stages) if mesh.pp > 1 else few
    if mesh.pp == 1:
        actions = [Action(kind, each) for each in range(shown) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    else:
        actions = list(_schedule(mesh.schedule, mesh.pp, shown, mesh.virtual_stages).actions[stage])
    splits = any(action.kind is Kind.WEIGHT_GRADIENT for action in actions)
    for action in actions:
        micro_batch = number - 1 if action.micro_batch == shown - 1 else action.micro_batch
        segment = profile(_NAMES[action.kind], micro_batch, action.chunk)
        row.append(segment)
        if action.kind is Kind.FORWARD:
            held, flight = held + segment.net, flight + 1
        elif action.kind is Kind.WEIGHT_GRADIENT or (action.kind is Kind.BACKWARD and not splits):
            held, flight = held - profile(_FORWARD, micro_batch, action.chunk).net, flight - 1
        most, most_in_flight = max(most, held), max(most_in_flight, flight)
    if left := number - shown:
        between = [
            profile(name, 1, chunk) for chunk in range(mesh.virtual_stages) for name in (_FORWARD, _BACKWARD, _WEIGHTS)
        ]
        if mesh.pp > 1 and mesh.schedule == "gpipe":
            # All forwards come before the first backward.
            row[shown:shown] = [profile(_FORWARD, 1, 0).times(left)]
            row += [profile(_BACKWARD, 1, 0).times(left)]
            most, most_in_flight = most + left * profile(_FORWARD, 1, 0).net, most_in_flight + left
        else:
            row.append(joined(between, Label("micro-batches")).times(left))
    return row, most, most_in_flight
