"""Which kernels and collectives of a step run at the same time on a GPU: a simulation of streams and hardware queues.

``Launches`` records on the pretended GPU what the host launches, in its order: kernels with their stream, collectives
with their communicator's stream, and the events for which a stream waits. ``Launches.run`` computes when each of them
would start, from stated rates, for a host that is always ahead. As on a GPU:

- a stream runs its launches one after the other;
- a launch begins when all events that its stream waits for have happened;
- launches of the streams that share a hardware queue begin in the order of their launch. One that waits holds up all
  launches behind it, until it begins.

NCCL has one stream for each communicator. A collective waits there for everything that the calling stream has
launched before. ``wait()`` makes the calling stream wait for its end. The messages of one ``batch_isend_irecv`` are one
launch. A peer is assumed to come in time.

Limits: kernels do not slow each other down, and no launch waits for room on the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed import ProcessGroup, Work

from harness.on_pretended_gpu import PACKAGE, StepRecorder, tensors_in
from harness.pretended_kernels import kind_of

# Of about one H100 with NVLink: multiplications and additions, bytes of memory, and bytes between GPUs, per second.
_OPERATIONS, _MEMORY, _LINK = 6e14, 3e12, 3e11
# Seconds that each kernel and each collective takes at least.
_KERNEL, _COLLECTIVE = 3e-6, 2e-5

# Methods of a process group. PyTorch 2.13 gave three of them new names; the old ones remain.
_COLLECTIVES = re.compile(
    r"(allreduce|allgather|reduce_scatter|broadcast|reduce|gather|scatter|alltoall|send|recv|recv_anysource"
    r"|(all_gather|reduce_scatter|all_to_all)_single|_allgather_base|_reduce_scatter_base|alltoall_base)(_coalesced)?"
)


@dataclass(eq=False)
class Launch:
    """Something launched on a stream.

    Attributes:
        name: operator, such as ``"aten.mm.default"``, or ``"nccl.allreduce"``.
        stream: number of the stream; 0 is the default stream.
        seconds: duration.
        place: innermost function of the package on the stack, such as ``"nn/norm.py:RMSNorm.forward"``, but for those
            that carry out what others decide (communication and kernels); or ``"autograd"``.
        shape: shape of the result of a kernel, or of the first tensor of a collective.
        in_backward: True if autograd's backward launched it.
        after: launches of other streams that must have ended.
        group: name of a collective's group.
        start, end: set by ``Launches.run``.
    """

    name: str
    stream: int
    seconds: float
    place: str
    shape: tuple[int, ...]
    in_backward: bool
    after: list[Launch] = field(default_factory=list)
    group: str = ""
    start: float = 0.0
    end: float = 0.0

    @property
    def is_collective(self) -> bool:
        return self.name.startswith("nccl.")

    @property
    def is_product(self) -> bool:
        return self.name.split(".")[1] in ("mm", "addmm", "bmm")

    def during(self, others: Sequence[Launch]) -> float:
        """Share of the duration in which one of ``others``, which are of one stream, runs."""
        common = sum(max(0.0, min(self.end, other.end) - max(self.start, other.start)) for other in others)
        return common / self.seconds


class Stream(torch.Stream):
    """A stream that records what it waits for; in the place of ``torch.Stream`` and ``torch.cuda.Stream``."""

    _numbers = itertools.count(1)

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        self: Stream = super().__new__(cls, device=torch.device("cuda", 0))
        self.number = next(Stream._numbers)
        return self

    def __enter__(self) -> Stream:  # type: ignore[override]
        self._outer = _current()
        _this_thread.stream = self
        return self

    def __exit__(self, *exception: object) -> None:
        _this_thread.stream = self._outer

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Any) -> None:
        _recording.wait(self.number, event.launches)

    def record_event(self, event: Any = None) -> Event:
        event = event or Event()
        event.record(self)
        return event  # type: ignore[no-any-return]

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is ever pending here."""


class Event:
    """An event of a stream; in the place of ``torch.Event`` and ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.launches: list[Launch] = []

    def record(self, stream: Any = None) -> None:
        self.launches = _recording.last(_current() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        (_current() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is ever pending here."""


class _Nothing:
    """In the place of ``Launches`` while nothing is recorded."""

    def wait(self, stream: int, launches: list[Launch]) -> None:
        """Nothing is recorded."""

    def last(self, stream: Any) -> list[Launch]:
        return []


_this_thread = threading.local()
_recording: Any = _Nothing()


def _current(device: Any = None) -> Stream:
    stream: Stream | None = getattr(_this_thread, "stream", None)
    return _default() if stream is None else stream


@functools.cache
def _default() -> Stream:
    stream = Stream()
    stream.number = 0
    return stream


@contextlib.contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    with contextlib.nullcontext() if stream is None else stream:
        yield


class Launches(StepRecorder):
    """Records the launches inside its ``with`` block, also those of backward passes.

    ``with_streams`` must have been called before the model is made, since a model may keep streams.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Launch] = []
        self._last: dict[int, Launch] = {}
        self._awaited: dict[int, list[Launch]] = {}
        self._streams: dict[str, int] = {}
        self._works: dict[int, tuple[Work, Launch]] = {}
        self._batch: Launch | None = None
        self._in_batch = False

    def __enter__(self) -> Launches:
        global _recording
        _recording = self
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        global _recording
        _recording = _Nothing()
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given = list(tensors_in((args, kwargs)))
        if any(tensor.device.type == "cuda" for tensor in (*given, *tensors_in(result))) and kind_of(str(func)):
            made = list(tensors_in(result))
            shape = tuple((made or given)[0].shape)
            self.add(str(func), _current().number, _seconds(str(func), given, made), shape)
        return result

    def add(self, name: str, stream: int, seconds: float, shape: tuple[int, ...], group: str = "") -> Launch:
        in_backward = torch._C._current_graph_task_id() != -1
        launch = Launch(name, stream, seconds, _place(), shape, in_backward, self._awaited.pop(stream, []), group)
        self.all.append(launch)
        self._last[stream] = launch
        return launch

    def wait(self, stream: int, launches: list[Launch]) -> None:
        # Streams may wait for each other many times before the next launch.
        self._awaited[stream] = list(dict.fromkeys([*self._awaited.get(stream, []), *launches]))

    def last(self, stream: Any) -> list[Launch]:
        """Return the launches that an event of the stream, recorded now, waits for."""
        number = stream.number
        return [*self._awaited.get(number, []), *([self._last[number]] if number in self._last else [])]

    def collective(self, name: str, group: ProcessGroup, given: Sequence[Tensor], work: Any) -> None:
        number = self._streams.setdefault(str(group.group_name), 1000 + len(self._streams))
        seconds = _seconds_between(name, given, group.size())
        if self._in_batch and self._batch is not None:
            self._batch.seconds = max(self._batch.seconds, seconds)
        else:
            # The communicator's stream waits for all that the caller's stream has launched.
            self.wait(number, self.last(_current()))
            self._batch = self.add(f"nccl.{name}", number, seconds, tuple(given[0].shape), str(group.group_name))
        if work is not None:
            self._works[id(work)] = work, self._batch

    def waited(self, work: Any) -> None:
        _, launch = self._works.get(id(work), (None, None))
        if launch is not None:
            self.wait(_current().number, [launch])

    @contextlib.contextmanager
    def one_batch(self) -> Iterator[None]:
        self._in_batch, self._batch = True, None
        yield
        self._in_batch = False

    def run(self, num_queues: int) -> list[Launch]:
        """Compute the start and the end of each launch on a GPU with so many hardware queues; return the launches."""
        ends: dict[int, float] = {}
        starts: dict[int, float] = {}
        queues: dict[int, int] = {}
        for launch in self.all:
            # Streams take the queues in turns.
            queue = queues.setdefault(launch.stream, len(queues) % num_queues)
            before = [ends.get(launch.stream, 0.0), starts.get(queue, 0.0), *(other.end for other in launch.after)]
            launch.start = starts[queue] = max(before)
            launch.end = ends[launch.stream] = launch.start + launch.seconds
        return self.all


def with_streams() -> None:
    """Give this process streams, events and collectives that ``Launches`` records, from now on."""
    named: Any = torch
    named.Stream = named.cuda.Stream = Stream
    named.Event = named.cuda.Event = Event
    named.cuda.current_stream = named.accelerator.current_stream = _current
    named.cuda.stream = _on_stream
    for name in filter(_COLLECTIVES.fullmatch, list(vars(ProcessGroup))):
        setattr(ProcessGroup, name, _recorded(name, getattr(ProcessGroup, name)))
    own_batch = dist.batch_isend_irecv

    def wait(work: Any, *args: Any) -> bool:
        if isinstance(_recording, Launches):
            _recording.waited(work)
        return True

    def batch(operations: Any) -> Any:
        with _recording.one_batch() if isinstance(_recording, Launches) else contextlib.nullcontext():
            return own_batch(operations)

    Work.wait = FakeWork.wait = wait  # type: ignore[assignment, method-assign]
    dist.batch_isend_irecv = batch


def _recorded(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(group: ProcessGroup, *args: Any, **options: Any) -> Any:
        work = own(group, *args, **options)
        on_gpu = [tensor for tensor in tensors_in((args, options)) if tensor.device.type == "cuda"]
        if on_gpu and isinstance(_recording, Launches):
            _recording.collective(name, group, on_gpu, work)
        return work

    return call


def _place() -> str:
    frame: Any = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename.removeprefix(PACKAGE)
        if file != frame.f_code.co_filename and not file.startswith(("core/communication/", "kernels/")):
            return f"{file}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "autograd"


def _seconds(name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> float:
    base = name.split(".")[1]
    operations = 0.0
    if base in ("mm", "addmm", "bmm"):
        left, right = given[-2:] if len(given) < 4 else given[1:3]
        operations = 2.0 * left.numel() * right.shape[-1]
    elif "attention" in base:
        query, key = given[-3:-1]
        operations = 4.0 * query.numel() * key.shape[-2] * (2.5 if "gradient" in base else 1)
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in (*given, *made))
    return max(_KERNEL, operations / _OPERATIONS, num_bytes / _MEMORY)


def _seconds_between(name: str, given: Sequence[Tensor], num_ranks: int) -> float:
    """Duration of a collective; the largest of its tensors has the bytes of all ranks, or of one if all hold them."""
    num_bytes = max(tensor.numel() * tensor.itemsize for tensor in given)
    rounds = 1.0 if name in ("send", "recv") else (num_ranks - 1) / num_ranks * (1 + name.startswith("allreduce"))
    return _COLLECTIVE + math.ceil(num_bytes) * rounds / _LINK
