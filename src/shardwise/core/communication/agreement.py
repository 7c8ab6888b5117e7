"""Give every rank the same outcome: if one rank fails, all ranks fail, and no rank waits for one that gave up.

Each wait for another rank is registered when it begins, so that a watchdog of this process can report it. The hot path
does nothing else. The layer in which a thread waits is read from the thread's stack, and only on request.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication import accounting
from shardwise.core.communication.context import context_of, is_rehearsal
from shardwise.core.errors import DesyncError, ShardwiseError
from shardwise.core.validation import check_ids


class Wait:
    """A wait for other ranks, registered for the duration of a ``with`` block.

    Args:
        operation: name of the operation, such as "all_reduce".
        ranks: global ranks of the group, or the group.
        tensor: shape and dtype of this rank's contribution, if any.
        missing: returns the global ranks that have not arrived, if this process knows them.

    Attributes:
        since: start time of the wait, from ``time.monotonic``.
        finding: description of the missing ranks, set by a watchdog: "waiting for rank 1 for 30 s, in ...".
    """

    __slots__ = ("_group", "_ranks", "_tensor", "finding", "missing", "operation", "since")

    def __init__(
        self,
        operation: str,
        ranks: ProcessGroup | Sequence[int],
        tensor: tuple[torch.Size, torch.dtype] | None = None,
        missing: Callable[[], list[int]] | None = None,
    ) -> None:
        self.operation = operation
        self._group = ranks if isinstance(ranks, ProcessGroup) else None
        self._ranks = () if isinstance(ranks, ProcessGroup) else ranks
        self._tensor = tensor
        self.missing = missing
        self.finding = ""

    def __enter__(self) -> Wait:
        self.since = time.monotonic()
        _waits[threading.get_ident()] = self
        return self

    def __exit__(self, *exception: object) -> None:
        _waits.pop(threading.get_ident(), None)

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the group."""
        return list(self._ranks) if self._group is None else dist.get_process_group_ranks(self._group)

    @property
    def group_name(self) -> str:
        """Name of the process group, the same on all of its ranks; empty if there is no group."""
        return "" if self._group is None else str(self._group.group_name)

    def describe(self, thread: int | None = None) -> str:
        """Describe operation, layer and tensor: "all_reduce of layer decoder.layers.0.mlp ([8, 4] float32)".

        Args:
            thread: the thread that waits; None means the calling thread.
        """
        layer = layer_of(threading.get_ident() if thread is None else thread)
        text = f"{self.operation} of {layer}" if layer else self.operation
        if self._tensor is None:
            return text
        shape, dtype = self._tensor
        return f"{text} ({list(shape)} {str(dtype).removeprefix('torch.')})"


_waits: dict[int, Wait] = {}
_SECONDS_TO_END = 1.0

_ended_ranks: Callable[[], dict[int, int]] = dict


def set_ended_ranks(find: Callable[[], dict[int, int]]) -> None:
    """Set the function that finds the ranks whose process has ended, with the process ids; ``dict`` finds none."""
    global _ended_ranks
    _ended_ranks = find


def ended_ranks() -> str:
    """Name the ranks of the run whose process has ended, as far as a watchdog knows it: "rank 3 of 4 (process 17)"."""
    end = time.monotonic() + _SECONDS_TO_END
    # A connection is closed a moment before its process has ended.
    while not (ended := _ended_ranks()) and _ended_ranks is not dict and time.monotonic() < end:
        time.sleep(_SECONDS_TO_END / 20)
    world_size = dist.get_world_size()
    return " and ".join(f"rank {rank} of {world_size} (process {pid})" for rank, pid in sorted(ended.items()))


_MODULE_CALL = nn.Module._call_impl.__code__


def waits() -> dict[int, Wait]:
    """Return the current wait of each thread of this process, keyed by the thread's identifier."""
    return dict(_waits)


def num_collectives(group: ProcessGroup) -> int:
    """Number of collectives that this rank has started in ``group`` through its backend, without shared memory.

    Ranks that wait in the same collective have the same number. A rank that has not arrived has a lower number.
    """
    # gloo also numbers point-to-point messages, and the ranks of a group may send different numbers of messages.
    # PyTorch's stubs lack the method.
    number: int = cast(Any, group)._get_sequence_number_for_group()
    return number - context_of(group).num_messages


def layer_of(thread: int) -> str:
    """Name what a thread runs: "layer decoder.layers.0.mlp", "the backward pass", or an empty string if unknown."""
    frame: FrameType | None = sys._current_frames().get(thread)
    modules: list[nn.Module] = []
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_code is _MODULE_CALL:
            modules.append(frame.f_locals["self"])
        elif not modules and (name == "_engine_run_backward" or _is_backward(frame)):
            return "the backward pass"
        frame = frame.f_back
    if not modules:
        return ""
    layer, model = modules[0], modules[-1]
    name = next((name for name, module in model.named_modules() if module is layer), "")
    name = ".".join(part for part in name.split(".") if part != "_orig_mod")
    return f"layer {name}" if name else type(layer).__name__


def _is_backward(frame: FrameType) -> bool:
    """True if autograd called this frame. A stack of autograd's own thread shows it in no other way."""
    own: Any = frame.f_locals.get("self") if frame.f_code.co_name == "apply" else None
    return isinstance(own, torch._C._FunctionBase)


T = TypeVar("T")
R = TypeVar("R")


def decide(local: Callable[[], T], judge: Callable[[list[T]], R], *, group: ProcessGroup) -> R:
    """Run ``local`` on every rank and ``judge`` on rank 0, and return the result of ``judge`` on every rank.

    Collective, for set-up and I/O: one gather to rank 0 and one broadcast, of Python objects. If a call fails, every
    rank raises the same error.

    Args:
        local: computes this rank's contribution, without collectives.
        judge: computes the result from all contributions, in rank order.
        group: the ranks that take part.

    Raises:
        ShardwiseError: the first failing rank's error, with its class and message, or the error of ``judge`` if
            ``local`` succeeded on all ranks. If the error is of another class, the failing rank raises it unchanged
            and the other ranks raise a DesyncError that names it.
        DesyncError: a rank has exited, or does not arrive within the group's timeout.
    """
    if is_rehearsal(group):
        return judge([local()] * group.size())
    rank = group.rank()
    own: Exception | None = None
    value: T | None = None
    try:
        value = local()
    except Exception as error:
        own = error
    gathered: list[Any] | None = [None] * group.size() if rank == 0 else None
    verdict: list[Any] = [None]
    with _desync_error("what each contributes to a decision", group):
        dist.gather_object((value, _failure(own, rank)), gathered, group=group, group_dst=0)
    if gathered is not None:
        result, failure = None, next((failure for _, failure in gathered if failure is not None), None)
        if failure is None:
            try:
                result = judge([contribution for contribution, _ in gathered])
            except Exception as error:
                own, failure = error, _failure(error, rank)
        verdict = [(result, failure)]
    with _desync_error("a decision", group):
        dist.broadcast_object_list(verdict, group=group, group_src=0)
    result, failure = verdict[0]
    if failure is None:
        return cast(R, result)
    if own is not None and not isinstance(own, ShardwiseError):
        raise own
    raise failure from own


def agree(
    function: Callable[[], T], *, group: ProcessGroup | Sequence[ProcessGroup], only_validated: bool = False
) -> T:
    """Run ``function`` on every rank; if it raises on one rank, raise that error on all ranks, as ``decide`` does.

    Collective, for set-up and I/O.

    Args:
        function: this rank's work, without collectives.
        group: the ranks that must agree. Several groups agree one after the other, in the given order.
        only_validated: agree only in a group whose calls are validated, and only run the function in other groups. If
            one rank fails in such a group, the next collective of the other ranks fails when that rank has died, or at
            the group's timeout.

    Returns:
        The result of ``function`` on this rank.
    """
    groups = [group] if isinstance(group, ProcessGroup) else group
    if only_validated:
        if torch.compiler.is_compiling() or not any(context_of(each).validates for each in groups):
            return function()
        with accounting.uncounted():
            return agree(function, group=groups)
    *inner, outermost = groups
    results: list[T] = []
    decide(
        lambda: results.append(agree(function, group=inner) if inner else function()), lambda _: None, group=outermost
    )
    return results[0]


def check_ids_alike(
    ids: Tensor, vocab_size: int, *, what: str, group: ProcessGroup, ignore_index: int | None = None
) -> None:
    """Run ``check_ids`` on ids that are the same on all ranks.

    If the group's calls are validated, all ranks raise the same error, and the check synchronizes with the GPU unless
    it runs inside ``DeferredChecks``.
    """
    may_wait = context_of(group).validates
    check = partial(check_ids, ids, vocab_size, what=what, ignore_index=ignore_index, may_wait=may_wait)
    agree(check, group=group, only_validated=True)


def gather_objects(value: Any, what: str, *, group: ProcessGroup) -> list[Any]:
    """Gather every rank's ``value``, in rank order. Collective.

    Args:
        value: a small picklable object.
        what: name of the value, for the error message.
        group: the ranks that take part.

    Raises:
        DesyncError: a rank has exited, or does not arrive within the group's timeout.
    """
    if is_rehearsal(group):
        return [value] * group.size()
    values: list[Any] = [None] * group.size()
    with _desync_error(what, group):
        dist.all_gather_object(values, value, group=group)
    return values


def check_same(value: object, what: str, *, group: ProcessGroup) -> None:
    """Raise DesyncError on every rank unless ``value`` is equal on all of them.

    Args:
        value: a small picklable object.
        what: name of the value, for the message.
        group: the ranks that must agree.
    """
    values = gather_objects(value, what, group=group)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise DesyncError(f"ranks disagree on {what}: rank 0 has {values[0]!r}, rank {rank} has {other!r}")


def barrier(what: str, *, group: ProcessGroup) -> None:
    """Block until every rank of the group calls this function. Collective.

    Args:
        what: the work that precedes the barrier, for the error message.
        group: the ranks that wait for each other.

    Raises:
        DesyncError: a rank has exited, or does not arrive within the group's timeout.
    """
    if is_rehearsal(group):
        return
    with _desync_error(what, group):
        dist.barrier(group=group)


def _failure(error: Exception | None, rank: int) -> ShardwiseError | None:
    """Convert ``error`` for the other ranks, which may not be able to import its class."""
    if error is None or isinstance(error, ShardwiseError):
        return error
    return DesyncError(f"rank {rank} failed with {error!r}")


@contextmanager
def _desync_error(what: str, group: ProcessGroup) -> Iterator[None]:
    """Convert a failure to exchange ``what`` into a DesyncError."""
    with Wait(f"an exchange of {what}", group) as wait:
        try:
            yield
        except RuntimeError as error:
            found = f"{wait.finding}; " if wait.finding else ""
            raise DesyncError(
                f"{found}rank {group.rank()} of {group.size()} could not exchange {what} with the others; another rank "
                f"ended, or did not come: {error}"
            ) from error
