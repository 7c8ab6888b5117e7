"""Counts collectives and their bytes where they are launched, for tests, tables and the demo's report.

The counters see the collectives of PyTorch's dispatcher, below every library and on every thread, such as autograd's
for each GPU. Shared memory, which the dispatcher does not see, is recorded by ``record``.

Nothing is watched before the first counter of a process is entered. From then on a function in Python stands in front
of each of the dispatcher's collectives for good, since removing it while another thread is in it would not be safe: it
costs about ten microseconds for a collective that PyTorch launches, and nothing for any other operator.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch._guards import TracingContext

# Longer names come before their prefixes.
_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "reduce", "gather", "scatter", "broadcast")

# Replaced as a whole, so that a thread that launches something needs no lock to read it.
_active: tuple[CollectiveCounter, ...] = ()
_changing_active = threading.Lock()
_this_thread = threading.local()


@dataclass(frozen=True)
class Launch:
    """One launched collective, and the bytes that this rank contributes to it.

    Names: ``all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter``.
    """

    name: str
    num_bytes: int


class CollectiveCounter:
    """Records every collective that this process launches inside the ``with`` block, on any thread.

    Several may be active at once, in one thread or in several: each records all.

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
    """Stand in front of the dispatcher's collectives, on all threads and for all devices."""
    libraries = []
    for space in ("c10d", "_c10d_functional"):
        library = torch.library.Library(space, "IMPL")
        packets = getattr(torch.ops, space)
        for operator_name, collective in collective_operators(space).items():
            kernel = _counted(getattr(packets, operator_name).default, collective)
            # No library has a kernel at this key, which every call passes on its way to the device's.
            library.impl(operator_name, kernel, "BackendSelect", with_keyset=True)
        libraries.append(library)
    return libraries


def collective_operators(space: str) -> dict[str, str]:
    """The operators of a namespace that are collectives, each with its collective's name."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        of, _, operator = name.partition("::")
        bare = operator.replace("_", "")
        collective = next((each for each in _COLLECTIVES if bare.startswith(each.replace("_", ""))), None)
        if of == space and collective is not None:
            found[operator] = collective
    return found


def _counted(operator: Any, collective: str) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    # A rank's contribution is the input, behind the outputs; or the first argument, where that is overwritten.
    own = next((place for place, name in enumerate(names) if name.startswith("input")), 0)
    onwards = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    # While torch.compile traces, an operator is called to learn its result's shape, and launches nothing.
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not _active or getattr(_this_thread, "is_uncounted", False) or TracingContext.try_get() is not None:
            return operator.redispatch(keyset & onwards, *args, **kwargs)
        _record(Launch(collective, sum(map(_num_bytes, _tensors(args[own])))))
        # A functional collective launches another.
        with uncounted():
            return operator.redispatch(keyset & onwards, *args, **kwargs)

    return kernel


def record(name: str, what: Tensor | int) -> None:
    """Count a collective that the dispatcher does not see, with this rank's tensor or number of bytes."""
    if _active and not getattr(_this_thread, "is_uncounted", False):
        _record(Launch(name, what if isinstance(what, int) else _num_bytes(what)))


@contextlib.contextmanager
def as_one(name: str, tensor: Tensor) -> Iterator[None]:
    """Count this thread's launches inside as one collective ``name`` to which this rank contributes ``tensor``."""
    record(name, tensor)
    with uncounted():
        yield


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Do not count this thread's launches by the dispatcher inside."""
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
