"""The device of a plan, which fake CPU tensors stand for."""

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.nn import Parameter

_planned_device: str | None = None
_plain: tuple[type[Tensor], ...] = (Tensor, Parameter)


@contextlib.contextmanager
def planning_for(device_type: str) -> Iterator[None]:
    """In the block fake CPU tensors stand for tensors of a device, and every kernel for it is assumed to run.

    No kernel is launched: C functions return before their loops, ``kernels.planned`` allocates what Triton's kernels
    allocate, and loops over blocks of rows do the first two.
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


def plain_tensors() -> tuple[type[Tensor], ...]:
    """Classes of tensors that kernels take: inside ``planning_for`` fake tensors too."""
    return _plain


def device_type_of(tensor: Tensor) -> str:
    """The type of device that computes with ``tensor``: the planned one inside ``planning_for``."""
    return _planned_device or tensor.device.type
