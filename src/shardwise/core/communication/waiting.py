"""What the threads of this process wait for, for whoever watches them.

Each wait for another rank is announced where it begins; nothing else happens in the hot path. The layer in which a
thread waits is found on its stack, and only when somebody asks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.core.communication.context import context_of


class Wait:
    """A wait for other ranks, announced for the length of a ``with`` block.

    Args:
        operation: what is waited in, such as "all_reduce".
        ranks: global ranks of the group, or the group.
        tensor: shape and dtype of what this rank contributes; None if there is nothing to say of it.
        missing: gives the global ranks that have not come, where this process knows them.

    Attributes:
        since: when it began, by ``time.monotonic``.
        finding: who is waited for, once somebody found out: "waiting for rank 1 for 30 s, in ...".
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
        """Operation, layer and tensor: "all_reduce of layer decoder.layers.0.mlp ([8, 4] float32)".

        Args:
            thread: that waits; the calling one if None.
        """
        layer = layer_of(threading.get_ident() if thread is None else thread)
        text = f"{self.operation} of {layer}" if layer else self.operation
        if self._tensor is None:
            return text
        shape, dtype = self._tensor
        return f"{text} ({list(shape)} {str(dtype).removeprefix('torch.')})"


_waits: dict[int, Wait] = {}

_MODULE_CALL = nn.Module._call_impl.__code__


def waits() -> dict[int, Wait]:
    """What each thread of this process waits for now, by the thread's identifier."""
    return dict(_waits)


def num_collectives(group: ProcessGroup) -> int:
    """How many collectives this rank has started in ``group`` through its backend; not those in shared memory.

    Ranks that wait for each other in the same collective have the same number; one that has not come has a lower one.
    """
    # gloo numbers messages together with collectives, and ranks of a group may send different numbers of them. The
    # method is missing in PyTorch's stubs.
    number: int = cast(Any, group)._get_sequence_number_for_group()
    return number - context_of(group).num_messages


def layer_of(thread: int) -> str:
    """The layer that a thread is in, by its name in the model: "layer decoder.layers.0.mlp"; empty if in none.

    In the backward pass there is no layer on the stack: "the backward pass".
    """
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
    """Whether autograd called this frame; on a thread of its own nothing else is on the stack."""
    own: Any = frame.f_locals.get("self") if frame.f_code.co_name == "apply" else None
    return isinstance(own, torch._C._FunctionBase)
