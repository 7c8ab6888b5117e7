"""Which implementation of a kernel runs: the one place that chooses, from plain values, and the one that reports it.

Every fast path is a ``FastPath`` here: what it takes and what this machine must have for it. The kernel itself lies in
another file beside its definition in PyTorch, which runs where a path does not: small tensors, other dtypes, devices
and layouts, tensor subclasses, and all that ``torch.compile`` traces, for which the compiler makes its own kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwise.kernels import loss_reference


class Call(NamedTuple):
    """What a choice depends on.

    Attributes:
        device_type: such as ``"cuda"``.
        dtype: of what the kernel reads.
        size: of the work, in the path's unit; None stands for enough.
        device_index: of several devices of a type.
        fits: the layout in memory and the options are such as the kernel takes.
        is_autocast: autocast is on for the type of device.
    """

    device_type: str
    dtype: torch.dtype
    size: int | None = None
    device_index: int = 0
    fits: bool = True
    is_autocast: bool = False


@dataclass(eq=False)
class FastPath:
    """An optional implementation of something that PyTorch's single operations compute too.

    Attributes:
        name: what it is, for people.
        where: what it is used for, likewise.
        devices: types of device that it is for; all if empty.
        dtypes: those that it is for; all if empty.
        min_size: less work than this is not worth it. The choice depends on nothing but the call, so that a run that is
            resumed computes the same bits.
        unit: of sizes.
        in_autocast: whether it is used under autocast.
        missing: why this machine cannot do it, None if it can; asked last, since it may compile.
    """

    name: str
    where: str
    devices: Collection[str]
    dtypes: Collection[torch.dtype]
    min_size: int = 0
    unit: str = "elements"
    in_autocast: bool = False
    missing: Callable[[Call], str | None] = lambda call: None

    def why_not(self, call: Call) -> str | None:
        """Why this path does not run for ``call``; None if it does."""
        if self.devices and call.device_type not in self.devices:
            return f"it is for {' and '.join(self.devices)}, not for {call.device_type}"
        if self.dtypes and call.dtype not in self.dtypes:
            return f"there is no kernel for {call.dtype}"
        if call.size is not None and call.size < self.min_size:
            return f"{call.size:,} {self.unit} are fewer than {self.min_size:,}"
        if not call.fits:
            return "it does not take this layout, or these options"
        if call.is_autocast and not self.in_autocast:
            return "it is not used under autocast"
        return self.missing(call)

    def runs(self, *tensors: Tensor, size: int | None = None, fits: bool = True) -> bool:
        """Whether this path computes with ``tensors``, which must be of one dtype.

        Args:
            tensors: of which the first tells device and, if ``size`` is None, the number of elements.
            size: of the work.
            fits: see ``Call``.
        """
        # A subclass (fake, functional, distributed) has no memory of its own.
        if torch.compiler.is_compiling() or any(type(tensor) not in (Tensor, Parameter) for tensor in tensors):
            return False
        first = tensors[0]
        device_type, dtype = first.device.type, first.dtype
        call = Call(
            device_type,
            dtype,
            first.numel() if size is None else size,
            first.device.index or 0,
            fits and all(tensor.dtype == dtype for tensor in tensors),
            torch.is_autocast_enabled(device_type),
        )
        return self.why_not(call) is None
