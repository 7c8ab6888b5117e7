"""Count collectives and their bytes at launch, for tests, tables and the demo's report.

The counters hook the collectives in PyTorch's dispatcher. They therefore see the launches of every library and of every
thread, including autograd's thread for each GPU. The dispatcher does not see the shared-memory transport, which calls
``record``.

The hooks are installed when a process enters its first counter. They are never removed, because another thread may be
running one of them. A hook costs about ten microseconds for each collective that PyTorch launches, and nothing for any
other operator.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch._guards import TracingContext
from torch.distributed import ProcessGroup

# Longer names come before their prefixes.
_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "reduce", "gather", "scatter", "broadcast")

# The tuple is replaced and never modified, so that a launching thread can read it without a lock.
_active: tuple[CollectiveCounter, ...] = ()
_changing_active = threading.Lock()
_this_thread = threading.local()


@dataclass(frozen=True)
class Launch:
    """One launched collective, and the bytes that this rank contributes to it.

    Names: ``all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter``.

    Attributes:
        name: name of the collective.
        num_bytes: bytes of this rank's contribution.
        group: name of the process group; empty if it is unknown. It does not count in comparisons.
    """

    name: str
    num_bytes: int
    group: str = field(default="", compare=False)


class CollectiveCounter:
    """Records every collective that this process launches inside the ``with`` block, on any thread.

    Several counters may be active at once, in one thread or in several. Each of them records every launch.

    >>> with CollectiveCounter() as counter:
    ...     pass
    >>> counter.num_bytes
    0

    Attributes:
        launches: the collectives, in the order of their launch.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank contributed to all collectives."""
        return sum(launch.num_bytes for launch in self.launches)

    def __enter__(self) -> CollectiveCounter:
        global _active
        with _changing_active:
            _watch()
            _active = (*_active, self)
        return self

    def __exit__(self, *exception: object) -> None:
        global _active
        with _changing_active:
            place = _active.index(self)
            _active = _active[:place] + _active[place + 1 :]


@functools.cache
def _watch() -> list[torch.library.Library]:
    """Hook the dispatcher's collectives, on all threads and for all devices."""
    libraries = []
    for space in ("c10d", "_c10d_functional"):
        library = torch.library.Library(space, "IMPL")
        packets = getattr(torch.ops, space)
        for operator_name, collective in collective_operators(space).items():
            kernel = _counted(getattr(packets, operator_name).default, collective)
            # Every call passes this dispatch key before the device's kernel, and no library registers a kernel for it.
            library.impl(operator_name, kernel, "BackendSelect", with_keyset=True)
        libraries.append(library)
    return libraries


def collective_operators(space: str) -> dict[str, str]:
    """Map the collective operators of a namespace to the names of their collectives."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        of, _, operator = name.partition("::")
        if of != space:
            continue
        bare = operator.replace("_", "")
        collective = next((each for each in _COLLECTIVES if bare.startswith(each.replace("_", ""))), None)
        if collective is not None:
            found[operator] = collective
    return found


def _counted(operator: Any, collective: str) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    # A rank contributes the input, which follows the outputs. An in-place operator's input is its first argument.
    own = next((place for place, name in enumerate(names) if name.startswith("input")), 0)
    group = next((place for place, name in enumerate(names) if name in ("process_group", "group_name")), None)
    onwards = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    # torch.compile calls operators while tracing to infer shapes; such a call launches nothing.
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not _active or getattr(_this_thread, "is_uncounted", False) or TracingContext.try_get() is not None:
            return operator.redispatch(keyset & onwards, *args, **kwargs)
        given = args[group] if group is not None and group < len(args) else ""
        name = given if isinstance(given, str) else str(ProcessGroup.unbox(given).group_name)
        _record(Launch(collective, sum(map(_num_bytes, _tensors(args[own]))), name))
        # A functional collective launches another collective inside; count only the outer one.
        with uncounted():
            return operator.redispatch(keyset & onwards, *args, **kwargs)

    return kernel


def record(name: str, what: Tensor | int, group: ProcessGroup | None = None) -> None:
    """Record a collective that bypasses the dispatcher, with this rank's tensor or number of bytes."""
    if _active and not getattr(_this_thread, "is_uncounted", False):
        number = what if isinstance(what, int) else _num_bytes(what)
        _record(Launch(name, number, "" if group is None else str(group.group_name)))


@contextlib.contextmanager
def as_one(name: str, tensor: Tensor, group: ProcessGroup) -> Iterator[None]:
    """Count this thread's launches in the block as one collective ``name`` of this rank's ``tensor``."""
    record(name, tensor, group)
    with uncounted():
        yield


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Do not count this thread's dispatcher launches in the block."""
    before = getattr(_this_thread, "is_uncounted", False)
    _this_thread.is_uncounted = True
    try:
        yield
    finally:
        _this_thread.is_uncounted = before


def _record(launch: Launch) -> None:
    for counter in set(_active):
        counter.launches.append(launch)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
