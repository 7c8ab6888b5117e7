"""The device of a plan, which fake CPU tensors stand for."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from shardwise.core.sharding.balanced import balanced_sizes

_planned_device: str | None = None
_plain: tuple[type[Tensor], ...] = (Tensor, Parameter)


@contextlib.contextmanager
def planning_for(device_type: str) -> Iterator[None]:
    """In the block fake CPU tensors stand for tensors of a device, and every kernel for it is assumed to run.

    No kernel is launched: C functions return before their loops, ``kernels.fake_kernels`` allocates what Triton's
    kernels allocate, and loops over blocks of rows do the first two.
    """
    global _planned_device, _plain
    # Its import takes time, which a run does not need.
    from torch._subclasses.fake_tensor import FakeTensor

    before = _planned_device, _plain
    _planned_device, _plain = device_type, (Tensor, Parameter, FakeTensor)
    try:
        yield
    finally:
        _planned_device, _plain = before


def planned_device() -> str | None:
    """The type of device of the plan; None outside of ``planning_for``."""
    return _planned_device


def outside_of_plans() -> AbstractContextManager[Any]:
    """Return a context in which new tensors are not fake, also in a plan."""
    if _planned_device is None:
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def plain_tensors() -> tuple[type[Tensor], ...]:
    """Classes of tensors that kernels take: inside ``planning_for`` fake tensors too."""
    return _plain


def counts_on_host(counts: Tensor, *totals: int) -> list[Any]:
    """Read numbers of rows, ``[n]`` or ``[rows, n]``, on the host.

    In a plan, whose tensors have no values, each row has even parts of its total; a single total is that of all rows.
    """
    if _planned_device is None:
        numbers: list[Any] = counts.tolist()
        return numbers
    even = [list(balanced_sizes(total, counts.size(-1))) for total in totals]
    return even[0] if counts.dim() == 1 else even * (counts.size(0) // len(even))


def device_type_of(tensor: Tensor) -> str:
    """The type of device that computes with ``tensor``: the planned one inside ``planning_for``."""
    return _planned_device or tensor.device.type
