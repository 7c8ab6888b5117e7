"""A pipeline stage, which runs a schedule's actions and messages on its chunks of the model."""

import contextlib
import functools
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import agree, check_same
from shardwise.core.communication.collectives import Transfer, all_reduce, exchange
from shardwise.core.communication.context import device_of_host_facts, is_rehearsal, sends_by_tag
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import SequenceView
from shardwise.training.hooks import NO_HOOKS, StepHooks
from shardwise.training.pipeline.schedules import (
    Action,
    Exchange,
    Kind,
    Message,
    Program,
    Schedule,
    made_by,
    needed_by,
    programs,
)
from shardwise.training.pipeline.shapes import Sizes, check_shape, make_header, read_header

T = TypeVar("T")

ForwardStep = Callable[[int, int], Tensor]
"""Function from micro-batch and chunk to the output of the chunk's forward."""

LossStep = Callable[[int, Tensor], tuple[Tensor | None, T]]
"""Function from micro-batch and model output to a scalar for the backward (None: no backward) and a result."""

_Key = tuple[int, int]

_program_of = functools.lru_cache(maxsize=16)(programs)


class Pipeline(Generic[T]):
    """Runs a schedule on a pipeline stage's chunks of a model.

    Args:
        chunks: this stage's parts of the model, in order. Each has ``set_input_tensor(tensor | None)``, which sets the
            hidden states for its next forward (None for the first part).
        group: the ranks that hold the stages, in order.

    Raises:
        ConfigError: there is no chunk, or a chunk has no ``set_input_tensor``.
    """

    def __init__(self, chunks: Sequence[nn.Module], *, group: ProcessGroup) -> None:
        if not chunks:
            raise ConfigError("a pipeline stage needs at least one chunk of the model; none was given")
        self.chunks = list(chunks)
        self.group = group
        self._setters = [_input_setter(chunk) for chunk in chunks]

    def run(
        self,
        schedule: Schedule,
        forward: ForwardStep,
        loss: LossStep[T],
        *,
        shape: Sequence[int | None],
        dtype: torch.dtype,
        device: torch.device,
        input_dtype: torch.dtype | None = None,
        forward_only: bool = False,
        no_sync: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        hooks: StepHooks = NO_HOOKS,
    ) -> list[T]:
        """Run the forward and the backward of every micro-batch. Collective over the stages.

        Gradients accumulate in the chunks' parameters, one micro-batch after the other.

        Args:
            schedule: the schedule, the same on every stage.
            forward: runs a chunk's forward, in the schedule's order; without gradients if ``forward_only``.
            loss: computes the loss from the last part's output.
            shape: shape of the hidden states between stages, ``[s, b, h]`` or this rank's shard of them; None for a
                size that may differ between micro-batches. The shape of each then travels ahead of it, in one more
                message of four integers.
            dtype: dtype of the hidden states when they are sent.
            device: device of the hidden states.
            input_dtype: dtype of the hidden states that chunks get; None for ``dtype``.
            forward_only: run no backward; ``schedule`` then has only forward steps.
            no_sync: context (as of a data-parallel wrapper) for each chunk's backward steps but the last, and for its
                steps that compute weight gradients but the last.
            hooks: their ``before_action`` is called before each action of the schedule.

        Returns:
            The results of ``loss`` in the order of its calls on the last stage; an empty list on the others.

        Raises:
            ShardwiseError: an error of any stage, raised on every stage. If the error is of another class, its stage
                raises it unchanged, and the others raise a DesyncError that names it. All messages were exchanged
                before.
            ConfigError: the schedule has other numbers of stages and chunks, or needs ``config.delay_wgrad_compute``;
                or a chunk's ``pre_process`` or ``post_process`` contradicts its position in the model.
            ShardingError: hidden states have a shape that ``shape`` does not allow.
            DesyncError: stages have different schedules or shapes; another stage ended.
        """
        if (schedule.num_stages, schedule.num_chunks) != (self.group.size(), len(self.chunks)):
            raise ConfigError(
                f"schedule {schedule.name!r} is made for {schedule.num_stages} stages of {schedule.num_chunks} chunks; "
                f"this pipeline has {self.group.size()} stages of {len(self.chunks)}"
            )
        facts = (schedule.name, schedule.num_micro_batches, schedule.num_chunks, tuple(shape), str(dtype))
        delays = self._check_agreed(facts, self._misplaced(schedule), device)
        splits = any(action.kind is Kind.WEIGHT_GRADIENT for row in schedule.actions for action in row)
        if splits and not forward_only and not delays:
            raise ConfigError(
                f"schedule {schedule.name!r} computes weight gradients in steps of their own, and no layer of any "
                "stage leaves them out of its backward pass; set config.delay_wgrad_compute=True"
            )
        step = _Step(self, schedule, forward, loss, tuple(shape), dtype, device, input_dtype or dtype, no_sync, hooks)
        with torch.set_grad_enabled(not forward_only):
            step.run(_program_of(schedule)[self.group.rank()])
        return step.results

    def _misplaced(self, schedule: Schedule) -> ConfigError | None:
        """Return the error of a chunk whose ``pre_process`` or ``post_process`` contradicts its position, or None."""
        for number, chunk in enumerate(self.chunks):
            part = schedule.part(self.group.rank(), number)
            places = {"pre_process": part == 0, "post_process": part == schedule.num_parts - 1}
            given = {name: getattr(wrapped(chunk, name), name, place) for name, place in places.items()}
            if any(bool(given[name]) != place for name, place in places.items()):
                was, must = (", ".join(f"{name}={value}" for name, value in each.items()) for each in (given, places))
                several = f" of chunk {number}" if len(self.chunks) > 1 else ""
                return ConfigError(
                    f"the model{several} on pipeline stage {self.group.rank()} of {self.group.size()} was made with "
                    f"{was}, and this part of the model needs {must}; pass pre_process= and post_process= to each "
                    "stage's model (parallel_state.is_pipeline_first_stage() and is_pipeline_last_stage() tell them)"
                )
        return None

    def _check_agreed(self, facts: tuple[object, ...], misplaced: ConfigError | None, device: torch.device) -> bool:
        """Check that all stages have the same facts, and raise an error of any stage on all stages."""
        delays = any(True for chunk in self.chunks for _ in _delayed(chunk))
        if self.group.size() == 1 or is_rehearsal(self.group):
            _raise(misplaced)
            return delays
        # The stages agree if the maximum equals the minimum: one small collective instead of gathering the facts.
        number, host = float(zlib.crc32(repr(facts).encode())), device_of_host_facts(self.group, device)
        largest = all_reduce(
            torch.tensor([number, -number, delays, misplaced is not None], dtype=torch.float64, device=host),
            group=self.group,
            op=dist.ReduceOp.MAX,
        ).tolist()
        if largest[3]:
            agree(functools.partial(_raise, misplaced), group=self.group)
        if largest[0] != -largest[1]:
            check_same(facts, "the pipeline's schedule, micro-batches, chunks, shape and dtype", group=self.group)
        return bool(largest[2])


@dataclass
class _Step(Generic[T]):
    """One run of a program, and its state between actions."""

    pipeline: Pipeline[T]
    schedule: Schedule
    forward: ForwardStep
    loss: LossStep[T]
    shape: Sizes
    dtype: torch.dtype
    device: torch.device
    input_dtype: torch.dtype
    no_sync: Callable[[], AbstractContextManager[Any]]
    hooks: StepHooks

    def __post_init__(self) -> None:
        self.results: list[T] = []
        self._stage = self.pipeline.group.rank()
        self._failure: Exception | None = None
        # True once this stage failed, or heard that an earlier one did.
        self._has_stopped = False
        # By micro-batch and chunk: the part's input, the root of its backward, and its delayed weight gradients.
        self._inputs: dict[_Key, Tensor] = {}
        self._roots: dict[_Key, GradientEdge | None] = {}
        self._waiting: dict[_Key, list[Callable[[], None]]] = {}
        self._made: dict[Message, Tensor] = {}
        # In the order of the program; None while only the message's header is awaited.
        self._coming: dict[Message, Pending | None] = {}
        self._headers: dict[Message, Pending] = {}
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._varies = None in self.shape
        group = self.pipeline.group
        self._host = device_of_host_facts(group, self.device)
        self._orders_freely = sends_by_tag(group, self.device) and sends_by_tag(group, self._host)
        self._sent: deque[Pending] = deque()
        self._backwards_left = [self.schedule.num_micro_batches] * self.schedule.num_chunks
        self._weight_gradients_left = [self.schedule.num_micro_batches] * self.schedule.num_chunks

    def run(self, program: Program) -> None:
        try:
            for step in program:
                if isinstance(step, Exchange):
                    self._exchange(step)
                else:
                    self._act(step)
            while self._sent:
                self._sent.popleft().wait()
        except Exception as error:
            # The first error of this stage is more useful than a neighbour's timeout.
            if self._failure is not None:
                raise self._failure from error
            raise
        for chunk in range(len(self.pipeline.chunks)):
            self._set_input(chunk, None)
        self._end_alike()

    def _set_input(self, chunk: int, hidden: Tensor | None) -> None:
        self.pipeline._setters[chunk](None if hidden is None else hidden.to(self.input_dtype))

    def _end_alike(self) -> None:
        group = self.pipeline.group
        if is_rehearsal(group):
            _raise(self._failure)
            return
        failed = torch.tensor(float(self._failure is not None), device=self._host)
        if not all_reduce(failed, group=group, op=dist.ReduceOp.MAX):
            return
        # Discard deferred gradients on every stage, so that the next step does not add them.
        for chunk in self.pipeline.chunks:
            for layer in _delayed(chunk):
                layer.take_weight_gradients()
            for buffer in deferred_buffers(chunk) or ():
                buffer.clear()
        agree(functools.partial(_raise, self._failure), group=group)

    def _exchange(self, step: Exchange) -> None:
        if self._varies:
            self._exchange_headers(step)
        # Where the order of messages is free, receive those of unknown shape when they are needed. Elsewhere wait for
        # their headers, since the other stages have these messages in the same place.
        later = [message for message in step.receives if message in self._headers and self._orders_freely]
        sends = [Transfer(self._made.pop(message), message.target, self._tag(message)) for message in step.sends]
        now = [message for message in step.receives if message not in later]
        sent, coming = exchange(sends, [self._buffer(message) for message in now], group=self.pipeline.group)
        self._coming.update(zip(now, coming, strict=True))
        self._coming.update(dict.fromkeys(later))
        self._sent.extend(sent)
        # Keep each tensor until it has arrived. Waiting for the oldest is safe, because messages are received in order.
        while len(self._sent) > self.schedule.num_stages * (1 + self._varies):
            self._receive_until(None)
            self._sent.popleft().wait()

    def _exchange_headers(self, step: Exchange) -> None:
        sends, receives = ([each for each in both if not each.is_gradient] for both in (step.sends, step.receives))
        first = 2 * self.schedule.num_parts * self.schedule.num_micro_batches
        sent, coming = exchange(
            [
                Transfer(
                    make_header(self._made[message].shape, self._host, has_failed=self._has_stopped),
                    message.target,
                    first + self._tag(message),
                )
                for message in sends
            ],
            [
                Transfer(make_header([0] * len(self.shape), self._host), message.source, first + self._tag(message))
                for message in receives
            ],
            group=self.pipeline.group,
        )
        self._headers.update(zip(receives, coming, strict=True))
        self._sent.extend(sent)

    def _buffer(self, message: Message) -> Transfer:
        tensor = torch.empty(self._shape_of(message), dtype=self.dtype, device=self.device)
        return Transfer(tensor, message.source, self._tag(message))

    def _shape_of(self, message: Message) -> tuple[int, ...]:
        """Return the shape of a message: the agreed one, that of its header, or for a gradient that of the forward."""
        key = message.micro_batch, message.part - message.is_gradient
        header = self._headers.pop(message, None)
        if header is not None:
            whose = f"micro-batch {message.micro_batch}: hidden states from stage {message.source}"
            self._shapes[key], has_failed = read_header(header.wait(), self.shape, self.dtype, whose=whose)
            if has_failed:
                self._stop()
        return self._shapes.get(key) or tuple(1 if size is None else size for size in self.shape)

    def _receive_until(self, last: Message | None) -> None:
        """Start to receive the messages that wait for their headers, in order, up to ``last`` or all.

        This precedes every wait, so that no stage waits for one that has not begun to receive an earlier message.
        """
        for message, pending in list(self._coming.items()) if self._headers else ():
            if pending is None:
                _, (self._coming[message],) = exchange([], [self._buffer(message)], group=self.pipeline.group)
            if message == last:
                return

    def _received(self, message: Message) -> Tensor:
        self._receive_until(message)
        pending = self._coming.pop(message)
        assert pending is not None
        return pending.wait()

    def _tag(self, message: Message) -> int:
        return 2 * (message.part * self.schedule.num_micro_batches + message.micro_batch) + message.is_gradient

    def _act(self, action: Action) -> None:
        """Run an action. After a failure, only send its messages, so that no stage waits for them in vain."""
        self.hooks.before_action(action)
        part = self.schedule.part(self._stage, action.chunk)
        needed = needed_by(self.schedule, self._stage, action)
        received = None if needed is None else self._received(needed)
        made: Tensor | None = None
        if not self._has_stopped:
            try:
                made = self._computed(action, part, received)
            except Exception as error:
                self._failure = error
                self._stop()
        message = made_by(self.schedule, self._stage, action)
        if message is not None:
            # Send zeros if there is no gradient, for example if no output depends on the input.
            if made is None:
                made = torch.zeros(self._shape_of(message), dtype=self.dtype, device=self.device)
            if self._varies and not message.is_gradient:
                self._shapes[message.micro_batch, message.part] = tuple(made.shape)
            self._made[message] = made

    def _stop(self) -> None:
        self._has_stopped = True
        for kept in (self._inputs, self._roots, self._waiting):
            kept.clear()

    def _computed(self, action: Action, part: int, received: Tensor | None) -> Tensor | None:
        key = (action.micro_batch, action.chunk)
        if action.kind is Kind.FORWARD:
            return self._forward(key, part, received)
        if action.kind is Kind.WEIGHT_GRADIENT:
            self._compute_weight_gradients(key)
            return None
        gradient = self._backward(key, received)
        self._waiting[key] = [layer.take_weight_gradients() for layer in _delayed(self.pipeline.chunks[action.chunk])]
        if action.kind is Kind.BACKWARD:
            self._compute_weight_gradients(key)
        return gradient

    def _compute_weight_gradients(self, key: _Key) -> None:
        self._weight_gradients_left[key[1]] -= 1
        computations = self._waiting.pop(key)
        if computations:
            with self.no_sync() if self._weight_gradients_left[key[1]] else contextlib.nullcontext():
                for compute in computations:
                    compute()

    def _forward(self, key: _Key, part: int, received: Tensor | None) -> Tensor | None:
        micro_batch, chunk = key
        keeps = torch.is_grad_enabled()
        if received is not None and keeps:
            self._inputs[key] = received.requires_grad_()
        self._set_input(chunk, received)
        output = self.forward(micro_batch, chunk)
        if part == self.schedule.num_parts - 1:
            scalar, result = self.loss(micro_batch, output)
            self.results.append(result)
            if keeps:
                self._roots[key] = None if scalar is None or not scalar.requires_grad else get_gradient_edge(scalar)
            return None
        whose = f"micro-batch {micro_batch}: stage {self._stage} made hidden states of shape"
        check_shape(output.shape, self.shape, self.dtype, whose)
        output = output.to(self.dtype)
        if keeps:
            # Keep only the graph; the output is needed only until it is sent.
            self._roots[key] = get_gradient_edge(output) if output.requires_grad else None
        return output.detach().contiguous()

    def _backward(self, key: _Key, received: Tensor | None) -> Tensor | None:
        root, input_ = self._roots.pop(key), self._inputs.pop(key, None)
        chunk = key[1]
        # A recomputed chunk reads its input again, but the input of a later micro-batch may have been set since.
        self._set_input(chunk, input_)
        self._backwards_left[chunk] -= 1
        with self.no_sync() if self._backwards_left[chunk] else contextlib.nullcontext():
            if root is not None:
                torch.autograd.backward((root,), None if received is None else (received,))
        self._set_input(chunk, None)
        return None if input_ is None or input_.grad is None else input_.grad.contiguous()


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _delayed(chunk: nn.Module) -> Iterator[Any]:
    for module in chunk.modules():
        if getattr(module, "delays_weight_gradients", False):
            yield module


def deferred_buffers(chunk: nn.Module) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return the inputs and output gradients that ``config.defer_embedding_wgrad_compute`` keeps, or None."""
    engine = wrapped(chunk, "output_queue")
    if engine is not None and engine.output_queue is not None:
        return engine.output_queue.inputs, engine.output_queue.grad_outputs
    # A user's model may store them under Megatron's names.
    model = wrapped(chunk, "grad_output_buffer")
    if model is None or model.grad_output_buffer is None:
        return None
    return model.embedding_activation_buffer, model.grad_output_buffer


def wrapped(module: nn.Module, attribute: str) -> Any:
    """Return ``module``, or the first module inside its wrappers (``.module``), that has ``attribute``; or None."""
    inner: Any = module
    while inner is not None and not hasattr(inner, attribute):
        inner = getattr(inner, "module", None)
    return inner


def _input_setter(chunk: nn.Module) -> Callable[[Tensor | None], None]:
    model = wrapped(chunk, "set_input_tensor")
    if model is None:
        raise ConfigError(
            f"a pipeline stage's chunk of type {type(chunk).__name__} has no set_input_tensor(tensor), through "
            "which it would get its input"
        )
    setter: Callable[[Tensor | None], None] = model.set_input_tensor
    return setter


def hidden_shape(
    config: Any, seq_length: int, micro_batch_size: int, *, tp_group: ProcessGroup | None
) -> tuple[int, int, int]:
    """Return the shape ``[s, b, h]`` of this rank's hidden states of ``seq_length`` positions between stages."""
    sequence = SequenceView(seq_length, tp_group if config.sequence_parallel else None)
    return sequence.size, micro_batch_size, config.hidden_size
