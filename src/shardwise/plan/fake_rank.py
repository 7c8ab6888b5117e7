"""One rank of a run on fake tensors: its model, its optimizer and a step, with the memory of each part of the step.

The process group is PyTorch's ``fake`` one, so that this process is any rank of any number. The model, the trainer and
the pipeline are those of a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.core.sharding.balanced import is_sharded, local_rows
from shardwise.core.sharding.param_layout import holders, segments
from shardwise.core.topology import Groups, Topology
from shardwise.kernels.fake_device import planning_for
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.description import ModelChunks
from shardwise.models.language_model import LanguageModel
from shardwise.models.transformer.block import spans_of
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn.recompute import in_backward
from shardwise.nn.replicated import named_param_layouts
from shardwise.plan.steps import ACTIONS, BACKWARD, FORWARD, START
from shardwise.plan.timeline import PhaseLabel, Segment, Timeline, Transfer, address, read_at_once
from shardwise.plan.workload import Mesh, Workload
from shardwise.run.checkpoints import state_of
from shardwise.storage.adapters.model import trained_of
from shardwise.training.hooks import StepHooks
from shardwise.training.optimizer.optimizer import ShardedOptimizer
from shardwise.training.pipeline.schedules import Action
from shardwise.training.trainer import Trainer


@dataclass(frozen=True)
class StateBytes:
    """The bytes that one rank holds from step to step.

    ``masters`` are fp32 copies of parameters in 16 bits; ``others`` buffers of the model, and original values of
    weights that are trained next to adapters; ``saved`` a host copy of what the rank writes into a checkpoint.
    """

    weights: int
    gradients: int
    masters: int
    optimizer: int
    others: int
    saved: int

    def held(self, makes_gradients: bool) -> int:
        """Bytes at the start of a step, whose first backward allocates the gradients if it ``makes_gradients``."""
        gradients = 0 if makes_gradients else self.gradients
        return self.weights + gradients + self.masters + self.optimizer + self.others


@dataclass(frozen=True)
class RankTotals:
    """Totals of the layers of a rank, without their activations.

    ``num_parameters`` are those of this rank, before FSDP splits them. ``makes_gradients``: the backward of the first
    micro-batch allocates the gradients. ``owned`` has the elements that each data-parallel rank updates, with ZeRO.
    ``ends`` are the sums of gradients and the update.
    """

    num_parameters: int
    state: StateBytes
    makes_gradients: bool
    owned: tuple[int, ...]
    ends: tuple[Segment, ...]
    num_sums: Callable[[int, int], int]

    def towards(self, other: RankTotals, times: int) -> RankTotals:
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
                sent[Transfer(axis, name, max(0, more(*totals) - known))] += 1
            return dataclasses.replace(own, peak=more(own.peak, further.peak), sent=sent)

        state = {name: more(value, vars(other.state)[name]) for name, value in vars(self.state).items()}
        number = more(self.num_parameters, other.num_parameters)
        ends = tuple(map(longer, self.ends, other.ends))
        return dataclasses.replace(self, num_parameters=number, state=StateBytes(**state), ends=ends)


@contextlib.contextmanager
def pretended(device_type: str, mesh: Mesh, rank: int) -> Iterator[tuple[Groups, Timeline]]:
    """Be one rank of a mesh, with fake tensors that stand for tensors of the device of the plan."""
    resize, collects, hook = torch.UntypedStorage.resize_, gc.isenabled(), sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world_size)
    try:
        # A model of before must not be freed while a part of a step is measured.
        gc.disable()
        topology = Topology.create(tp=mesh.tp, pp=mesh.pp, cp=mesh.cp, ep=mesh.ep, etp=mesh.expert_tp)
        groups = Groups.of(topology)
        # With two stages ``embd`` and ``pp`` are one group.
        names = {"expt_dp": "expert_dp", "embd": "embd", "dp_cp": "dp", "pp": "pp", "tp": "tp"}
        axes = {
            str(topology.group(name).group_name): axis
            for name, axis in names.items()
            if name in topology and topology.size(name) > 1
        }
        for field, axis in (("cp", "cp"), ("experts", "ep")):
            # Separate groups tell exchanges of keys and tokens from sums; in a run they may be the group of ``dp``.
            if len(ranks := mesh.group(rank, axis)) > 1:
                group = dist.new_group(ranks)
                groups, axes[str(group.group_name)] = dataclasses.replace(groups, **{field: group}), axis
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
            from shardwise.kernels.fake_kernels import functions_on_cuda

            replaced += [(F, name, function) for name, function in functions_on_cuda(timeline.count_flops).items()]
        with contextlib.ExitStack() as stack:
            for owner, name, stand_in in replaced:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, stand_in)
            stack.enter_context(planning_for(device_type))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(timeline)
            yield groups, timeline
    finally:
        dist.destroy_process_group()
        # PyTorch's own names a rank before each line, one more for each group.
        sys.excepthook = hook
        if collects:
            gc.enable()


def chunks_of_model(model: LanguageModel | ModelChunks) -> list[LanguageModel]:
    return list(model) if isinstance(model, ModelChunks) else [model]  # type: ignore[arg-type]


def totals_of(workload: Workload, groups: Groups, timeline: Timeline) -> RankTotals:
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
    # Sums by trees are copied to buckets at the end of a step.
    buckets = [bucket.data for bucket in getattr(trainer.gradients, "buckets", ())]
    gradients = bytes_of([*(getattr(param, "main_grad", None) for param in trained), *buckets])
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
    others = [*model.buffers()]
    others += [each.original for each in trained_of(model).parameters]
    pinned = workload.device_type == "cuda"
    state = StateBytes(weights, gradients, masters, optimizer, bytes_of(others), _saved_bytes(trainer, pinned=pinned))
    # A step without micro-batches has only what comes after them.
    finish, update = trainer.gradients.finish, trainer.optimizer.step

    def finished() -> None:
        if makes_gradients:
            for param in trained:
                param.grad = torch.zeros_like(param)
        if trainer.gradients.are_taken_in_backward:
            torch.stack([param.sum().float() for param in trained]).sum().backward()
        timeline.mark(PhaseLabel("sums of gradients"))
        finish()

    def updated() -> None:
        timeline.mark(PhaseLabel("update"))
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
        shares, dp = trainer.zero.parameters.shares.values(), trainer.dp_group.size()
        # Another number of ranks may share the parts of experts.
        owned = tuple(
            sum(stop - start for start, stop in (each.intervals[rank * len(each.intervals) // dp] for each in shares))
            for rank in range(dp)
        )
    return RankTotals(number, state, makes_gradients, owned, ends, trainer.gradients.num_sums)


def _saved_bytes(trainer: Trainer, *, pinned: bool) -> int:
    """Bytes of a host copy of what a rank writes into a checkpoint; ranks that hold the same share the writing.

    In pinned memory each tensor takes a power of two.
    """
    total = 0.0
    for shard in state_of(trainer).values():
        if shard.interval is not None or shard.is_copy:
            total += sum(_rounded(view, pinned) for _, view in shard.written_pieces())
            continue
        layout, dp = shard.layout, trainer.dp_group.size()
        if layout.dim is None:
            writers = float(layout.world_size)
        else:
            # The mean over the rows, which may have different numbers of holders.
            held = segments(layout, shard.rank)
            shares = sum(length / len(holders(layout)[start, start + length]) for start, length, _ in held)
            writers = shard.data.size(layout.dim) / shares if shares else 1.0
        total += _rounded(shard.data, pinned) / (dp * writers)
    return round(total)


def _rounded(tensor: Tensor, pinned: bool) -> int:
    return 1 << (tensor.nbytes - 1).bit_length() if pinned and tensor.nbytes else tensor.nbytes


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


def step_of(workload: Workload, mesh: Mesh, groups: Groups, timeline: Timeline, micro_batches: int) -> list[Segment]:
    """The parts of a step up to the last backward, without sums over data-parallel ranks but those of FSDP."""
    model = workload.build(groups)
    trainer = Trainer(workload.settings, model, groups, workload.objective(groups))
    _make_state(trainer.optimizer, model, groups.tp.size())
    batches = [workload.batch(mesh.micro_batch_size, trainer._needs_lengths) for _ in range(micro_batches)]
    place = len(timeline.segments)
    hooks = _watch(trainer, chunks_of_model(model), timeline)
    timeline.mark(START)
    with contextlib.suppress(_FinishedError):
        trainer.step(0, batches, hooks=hooks)
    return [segment if mesh.fsdp else segment.without("dp", "expert_dp") for segment in timeline.segments[place:]]


def _watch(trainer: Trainer, chunks: Sequence[LanguageModel], timeline: Timeline) -> StepHooks:
    """Mark each span of layers of a step, and return hooks that mark each action."""
    current = [START]

    def begin(label: PhaseLabel) -> None:
        current[0] = label
        timeline.mark(label)

    def before_action(action: Action) -> None:
        begin(PhaseLabel(ACTIONS[action.kind], action.micro_batch, action.chunk, 0))

    hooks = StepHooks()
    hooks.before_action = before_action  # type: ignore[method-assign]
    for number, chunk in enumerate(chunks):
        if isinstance(chunk, PlannedModel):
            _watch_layers(chunk, _Spans(number, chunk.config.num_layers, current, begin))
            continue
        assert isinstance(chunk, TransformerModel)
        last = sum(1 for _ in spans_of(list(chunk.block.layers), chunk.block._recompute))
        chunk.block.before_span = _Spans(number, last, current, begin)

    def finished() -> None:
        timeline.mark(None)
        raise _FinishedError

    trainer.gradients.finish = finished  # type: ignore[method-assign]
    return hooks


def _watch_layers(model: PlannedModel, spans: _Spans) -> None:
    """Mark each layer of a model of transformers."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        spans(args[0] if args else kwargs["hidden_states"])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        spans(output if isinstance(output, Tensor) else output[0])

    for layer in model.layers:
        layer.register_forward_pre_hook(before, with_kwargs=True)
    model.layers[-1].register_forward_hook(after)


class _FinishedError(Exception):
    """The last backward of a step is done; ``_whole`` has what follows."""


@dataclass
class _Spans:
    """Marks the spans of a chunk's layers, in the forward and in the backward."""

    chunk: int
    last: int
    current: list[PhaseLabel]
    begin: Callable[[PhaseLabel], None]

    def __post_init__(self) -> None:
        self._place = 0

    def __call__(self, hidden: Tensor) -> None:
        if in_backward() or not torch.is_grad_enabled():
            return
        place, self._place = self._place, (self._place + 1) % (self.last + 1)
        micro_batch = self.current[0].micro_batch
        self.begin(PhaseLabel(FORWARD, micro_batch, self.chunk, place + 1))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._after(gradient, micro_batch, place))

    def _after(self, gradient: Tensor, micro_batch: int, place: int) -> Tensor:
        self.begin(PhaseLabel(BACKWARD, micro_batch, self.chunk, self.last + 1 - place))
        return gradient
