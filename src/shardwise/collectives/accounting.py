"""Counts collectives and their bytes where they are launched, for tests, tables and the demo's report.

The counter watches PyTorch's dispatcher, below every library, so it sees what is really launched: ours, autograd's, a
third party's. It costs several microseconds per operator: count one step, do not time it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Which positional argument holds what a rank contributes, by operator.
_INPUT_ARGUMENT = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "reduce_": 0,
    "_allgather_base_": 1,
    "allgather_": 1,
    "allgather_coalesced_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "gather_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "scatter_": 1,
    "alltoall_base_": 1,
    "alltoall_": 1,
    "broadcast_": 0,
    "broadcast": 0,
    "all_reduce": 0,
    "all_reduce_": 0,
    "all_reduce_coalesced": 0,
    "all_reduce_coalesced_": 0,
    "all_gather_into_tensor": 0,
    "all_gather_into_tensor_coalesced": 0,
    "all_gather_into_tensor_out": 0,
    "reduce_scatter_tensor": 0,
    "reduce_scatter_tensor_coalesced": 0,
    "reduce_scatter_tensor_out": 0,
    "all_to_all_single": 0,
}


@dataclass(frozen=True)
class Launch:
    """One launched collective: the operator's name, and the bytes that this rank contributes to it."""

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            if name in _INPUT_ARGUMENT:
                tensors = _tensors(args[_INPUT_ARGUMENT[name]])
                self.launches.append(Launch(name, sum(t.numel() * t.element_size() for t in tensors)))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
