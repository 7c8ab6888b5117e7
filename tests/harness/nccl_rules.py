"""NCCL's rules on CPU ranks: inside ``nccl_rules()`` a call that breaks them raises a ``BreachError``.

The package takes the groups for NCCL's, and calls what it would call on GPUs. gloo carries the data. As with NCCL:

- A communicator carries out its calls one after the other, in the order of their launch. The host does not wait for
  them. All ranks must launch the same calls, with the same sizes, in the same order.
- A message is matched by its order among the messages between two ranks, not by its tag, and is sent once the other
  rank receives it. The messages of one ``batch_isend_irecv`` travel together, in the order of the group's collectives.
  Other messages between two ranks have a communicator of their own.
- Tensors are dense and have a dtype that NCCL knows. An output overlaps with no input, unless it is the rank's own part
  in a gather or a reduce-scatter in place.
- Ranks that share several groups launch the calls of these groups in the same order. This is compared at the end.

NCCL itself would hang or exchange the wrong data. A collective is carried out a little after its launch, so a result
that is read without ``wait()``, or an input that is overwritten before, gives wrong numbers.

Limits: a tensor of the host is no different from one of the device. ``harness.on_pretended_gpu`` refuses it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import queue
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ProcessGroup, ReduceOp

from harness.on_pretended_gpu import tensors_in
from shardwise.core.communication import context

_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
_REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
_COLLECTIVES = re.compile(
    "allreduce|allgather|reduce_scatter|broadcast|reduce|gather|scatter|alltoall|barrier"
    "|all_gather_single|reduce_scatter_single|all_to_all_single"
)
_OTHERS = re.compile(r"send|recv|recv_anysource|monitored_barrier|.*_coalesced|_allgather_base|.*_base")
_TEXT_BYTES = 512
_DELAY = 5e-4


class BreachError(AssertionError):
    """A call breaks a rule: NCCL would fail, hang or mix up data."""


class _Work:
    """A launched call; ``wait()`` raises its error."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self, timeout: object = None) -> bool:
        self.done.wait()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class _Communicator:
    """Carries out calls one after the other, in a thread. After an error it refuses all later calls."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Callable[[], None], _Work] | None] = queue.SimpleQueue()
        self.number = 0
        threading.Thread(target=self._run, name="NCCL's stream", daemon=True).start()

    def launch(self, call: Callable[[], None]) -> _Work:
        work = _Work()
        self.calls.put((call, work))
        return work

    @torch.inference_mode()
    def _run(self) -> None:
        error: BaseException | None = None
        while (item := self.calls.get()) is not None:
            call, work = item
            if error is None:
                try:
                    time.sleep(_DELAY)
                    call()
                except BaseException as raised:
                    error = raised
            work.error = error
            work.done.set()


class _Rules:
    """State of one process: its communicators, and the order of its calls."""

    def __init__(self, timeout: float) -> None:
        self.timeout = datetime.timedelta(seconds=timeout)
        self.own = {name: value for name, value in vars(ProcessGroup).items() if _COLLECTIVES.fullmatch(name)}
        self.own |= {name: value for name, value in vars(ProcessGroup).items() if _OTHERS.fullmatch(name)}
        self.order: list[tuple[str, tuple[int, ...]]] = []
        self.num_calls: Counter[str] = Counter()
        self.communicators: defaultdict[tuple[str, int | None], _Communicator] = defaultdict(_Communicator)
        self.num_messages: Counter[tuple[str, int | None, int, str]] = Counter()

    def collective(self, name: str, group: ProcessGroup, *args: Any) -> _Work:
        self.num_calls[name] += 1
        tensors = list(tensors_in(args))
        _check_tensors(name, tensors)
        text = _description(name, args)
        communicator = self.communicators[str(group.group_name), None]
        communicator.number += 1
        number = communicator.number
        self.order.append((str(group.group_name), tuple(dist.get_process_group_ranks(group))))

        def call() -> None:
            self._compare(f"call {number} of group {group.group_name}", text, group)
            self._carry_out(name, group, args)

        return communicator.launch(call)

    def _compare(self, where: str, text: str, group: ProcessGroup) -> None:
        own, texts = _packed(text), [torch.empty(_TEXT_BYTES, dtype=torch.uint8) for _ in range(group.size())]
        try:
            self.own["allgather"](group, [texts], [own], AllgatherOptions()).wait(self.timeout)
        except RuntimeError as error:
            raise BreachError(f"{where} is {text}, and another rank does not make it; NCCL would hang") from error
        calls = [_unpacked(each) for each in texts]
        if len({each.partition("; ")[0] for each in calls}) > 1:
            made = "; ".join(f"rank {rank} calls {each}" for rank, each in enumerate(calls))
            raise BreachError(f"{where} differs between the ranks, and NCCL would hang or mix up data: {made}")
        sizes = [[eval(part) for part in each.partition("; ")[2].split(" to ")] for each in calls if "; " in each]
        for (a, (sent, _)), (b, (_, expected)) in [(x, y) for x in enumerate(sizes) for y in enumerate(sizes)]:
            if sent[b] != expected[a]:
                raise BreachError(
                    f"{where}: rank {a} sends {sent[b]} elements to rank {b}, which expects {expected[a]}"
                )

    def _carry_out(self, name: str, group: ProcessGroup, args: Any) -> None:
        own = self.own[name]
        if not name.endswith("_single"):
            own(group, *args).wait(self.timeout)
            return
        # gloo may not work in place.
        output, *rest = args
        result = torch.empty_like(output)
        own(group, result, rest[0].clone(), *rest[1:]).wait(self.timeout)
        output.copy_(result)

    def messages(
        self, operations: Sequence[tuple[str, Tensor, int, int]], group: ProcessGroup, pair: int | None
    ) -> _Work:
        """Launch messages that travel together: ``"send"`` or ``"recv"``, tensor, peer in the group, and tag."""
        _check_tensors("a message", [tensor for _, tensor, _, _ in operations])
        name = str(group.group_name)
        numbered = []
        for way, tensor, peer, tag in operations:
            self.num_calls[way] += 1
            self.num_messages[name, pair, peer, way] += 1
            numbered.append((way, tensor, peer, tag, self.num_messages[name, pair, peer, way]))

        def call() -> None:
            self._exchange(numbered, group, pair)

        return self.communicators[name, pair].launch(call)

    def _exchange(
        self, numbered: Sequence[tuple[str, Tensor, int, int, int]], group: ProcessGroup, pair: int | None
    ) -> None:
        base = 0 if pair is None else 1 << 29
        works, texts = [], []
        # Both sides say what they send or expect.
        for way, tensor, peer, tag, number in numbered:
            place = base + 4 * number + (way == "recv")
            theirs = torch.empty(_TEXT_BYTES, dtype=torch.uint8)
            text = f"{tensor.dtype} {tensor.numel()} with tag {tag}"
            works.append(self.own["send"](group, [_packed(text)], peer, place))
            works.append(self.own["recv"](group, [theirs], peer, place ^ 1))
            texts.append((text, theirs))
        own = group.rank()
        for (way, _, peer, _, number), (text, theirs), *both in zip(
            numbered, texts, works[::2], works[1::2], strict=True
        ):
            what = f"rank {own} {'sends' if way == 'send' else 'receives'} {text} as message {number}"
            try:
                for work in both:
                    work.wait(self.timeout)
            except RuntimeError as error:
                raise BreachError(f"{what}, and rank {peer} has no call for it; NCCL would hang") from error
            if _unpacked(theirs) != text:
                raise BreachError(
                    f"{what}, and rank {peer} has {_unpacked(theirs)}; NCCL matches messages by their order"
                )
        works = [
            self.own[way](group, [tensor], peer, base + 4 * number + 2) for way, tensor, peer, _, number in numbered
        ]
        for work in works:
            work.wait(self.timeout)

    def end(self) -> None:
        for communicator in self.communicators.values():
            communicator.calls.put(None)


def _packed(text: str) -> Tensor:
    encoded = text.encode()
    assert len(encoded) <= _TEXT_BYTES, text
    return torch.tensor(list(encoded.ljust(_TEXT_BYTES)), dtype=torch.uint8)


def _unpacked(text: Tensor) -> str:
    return bytes(text.tolist()).decode().rstrip()


def _check_tensors(name: str, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise BreachError(f"NCCL has no {tensor.dtype} ({name})")
        if not torch._C._is_alias_of(tensor, tensor) or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            raise BreachError(
                f"NCCL needs contiguous tensors; {name} has shape {list(tensor.shape)} with strides {tensor.stride()}"
            )


def _description(name: str, args: Any) -> str:
    """Describe what all ranks must agree on; after a semicolon, the elements that this rank sends and expects."""
    options = args[-1]
    text = name
    if reduction := getattr(options, "reduceOp", None):
        names = [each for each in ReduceOp.RedOpType.__members__ if reduction == getattr(ReduceOp, each)]
        if not set(names) & set(_REDUCTIONS):
            raise BreachError(f"NCCL has no {' '.join(names)} ({name})")
        text += f" {names[0]}"
    if hasattr(options, "rootRank"):
        text += f" of rank {options.rootRank}"
    if name == "all_to_all_single":
        output, input_, expected, sent, _ = args
        _check_apart(name, output, input_)
        row = input_[0].numel() if len(input_) else output[0].numel() if len(output) else 0
        return f"{text} {input_.dtype}; {[row * each for each in sent]} to {[row * each for each in expected]}"
    if name in ("all_gather_single", "reduce_scatter_single"):
        output, input_ = args[:2]
        small, large = sorted((output, input_), key=torch.numel)
        if _overlap(small, large):
            offset = (small.data_ptr() - large.data_ptr()) // small.element_size()
            if small.numel() and offset % small.numel():
                raise BreachError(f"{name}: input and output overlap, and are not the rank's own part in place")
    own = list(tensors_in(args))[-1 if name in ("allgather", "gather") else 0 :]
    return " ".join([text, *(f"{each.dtype} {list(each.shape)}" for each in own[:1])])


def _check_apart(name: str, output: Tensor, input_: Tensor) -> None:
    if _overlap(output, input_):
        raise BreachError(f"{name}: input and output overlap")


def _overlap(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def check_order(orders: Sequence[Sequence[tuple[str, tuple[int, ...]]]]) -> None:
    """Check that any two ranks made the calls of the groups that both are in, in the same order."""
    for a, b in combinations(range(len(orders)), 2):
        common = [[name for name, ranks in orders[rank] if a in ranks and b in ranks] for rank in (a, b)]
        for place, (mine, theirs) in enumerate(zip(*common, strict=False)):
            if mine != theirs:
                raise BreachError(
                    f"of the groups that ranks {a} and {b} share, call {place + 1} is of group {mine} on rank {a} and "
                    f"of group {theirs} on rank {b}; NCCL may hang if communicators are used in different orders"
                )


@contextlib.contextmanager
def nccl_rules(timeout: float = 60.0) -> Iterator[Counter[str]]:
    """Put all groups that are created in the block under the rules; all ranks enter and leave together.

    Yields the number of this rank's calls, by name.
    """
    rules = _Rules(timeout)
    by_device_type, batch = context._by_device_type, dist.batch_isend_irecv
    context._by_device_type = lambda config: {"cpu": "nccl"}  # type: ignore[assignment]
    for name in rules.own:
        setattr(ProcessGroup, name, _ruled(rules, name))
    dist.batch_isend_irecv = functools.partial(_batch, rules)
    try:
        yield rules.num_calls
    finally:
        rules.end()
        for name, own in rules.own.items():
            setattr(ProcessGroup, name, own)
        context._by_device_type, dist.batch_isend_irecv = by_device_type, batch
    orders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(orders, rules.order)
    check_order(orders)


def _ruled(rules: _Rules, name: str) -> Callable[..., Any]:
    def call(group: ProcessGroup, *args: Any, **options: Any) -> _Work:
        args = (*args, *options.values())
        if _COLLECTIVES.fullmatch(name):
            return rules.collective(name, group, *args)
        if name in ("send", "recv"):
            (tensor,), peer, tag = args
            pair = min(group.rank(), peer) * group.size() + max(group.rank(), peer)
            return rules.messages([(name, tensor, peer, tag)], group, pair)
        raise BreachError(f"NCCL has no {name}, or the rules do not know it")

    return call


def _batch(rules: _Rules, operations: Sequence[dist.P2POp]) -> list[_Work]:
    group = operations[0].group or dist.group.WORLD
    assert group is not None
    names = {dist.isend: "send", dist.irecv: "recv"}
    launched = [(names[each.op], each.tensor, each.group_peer, each.tag) for each in operations]
    return [rules.messages(launched, group, None)]
