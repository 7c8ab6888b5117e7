"""Counts collectives and their bytes where they are launched, for tests, tables and the demo's report.

The counter watches PyTorch's dispatcher, below every library, so it sees what is really launched: ours, autograd's, a
third party's; and it is told of what travels through shared memory, which the dispatcher does not see. It costs several
microseconds per operator: count one step, do not time it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# What each operator does, and which positional argument holds what a rank contributes.
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_coalesced": ("all_gather", 0),
    "all_gather_into_tensor_out": ("all_gather", 0),
    "gather_": ("gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "scatter_": ("scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
}

_local = threading.local()


@dataclass(frozen=True)
class Launch:
    """One launched collective: what it does, and the bytes that this rank contributes to it.

    Names: ``all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter``.
    """

    name: str
    num_bytes: int


class CollectiveCounter(TorchDispatchMode):
    """Records every collective launched by this thread inside the ``with`` block.

    >>> with CollectiveCounter() as counter:
    ...     pass
    >>> counter.num_bytes
    0
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank contributed to all collectives."""
        return sum(launch.num_bytes for launch in self.launches)

    def __enter__(self) -> CollectiveCounter:
        _active().append(self)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _active().remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not getattr(_local, "inside", False):
            name, argument = _OPERATORS.get(func._schema.name.split("::")[1], ("", 0))
            if name:
                self.launches.append(Launch(name, sum(map(_num_bytes, _tensors(args[argument])))))
        return func(*args, **(kwargs or {}))


def record(name: str, tensor: Tensor) -> None:
    """Tell the counters of a collective that the dispatcher does not see."""
    counters = getattr(_local, "counters", None)
    if counters:
        for counter in counters:
            counter.launches.append(Launch(name, _num_bytes(tensor)))


@contextlib.contextmanager
def as_one(name: str, tensor: Tensor) -> Iterator[None]:
    """Count what is launched inside as one collective ``name`` to which this rank contributes ``tensor``."""
    record(name, tensor)
    before = getattr(_local, "inside", False)
    _local.inside = True
    try:
        yield
    finally:
        _local.inside = before


def _active() -> list[CollectiveCounter]:
    if not hasattr(_local, "counters"):
        _local.counters = []
    counters: list[CollectiveCounter] = _local.counters
    return counters


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
