"""State of a process group for as long as it lives, its buffers among it, and the backends that carry its tensors.

This is the one file that knows PyTorch's backends by name. A group may have a backend for each type of device
(``"cpu:gloo,cuda:nccl"``), or the one that PyTorch chose; ``torch.distributed.get_backend`` has one name for all of a
group and says neither. ``numbers_without_sync`` puts numbers that the host knows on a device without waiting for it.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from shardwise.core.communication.transports import SharedMemory


class GlobalMemoryBuffer:
    """Named scratch memory that grows to the largest request and is handed out again and again.

    The next request of the same name and dtype overwrites what ``get_tensor`` returned.
    """

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[Any]] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """A tensor with arbitrary values.

        Args:
            tensor_shape: its shape.
            dtype: its dtype.
            name: requests of one name, dtype and device share memory.
            mem_alloc_context: makes a context for the allocation of new memory, such as a CUDA memory pool's.
            device: PyTorch's default device if None.
        """
        numel = math.prod(tensor_shape)
        where = torch.empty(0, device=device).device
        key = (name, dtype, where)
        held = self.buffer.get(key)
        if held is None or held.numel() < numel:
            # Made in inference mode it could not be written to outside of it.
            with torch.inference_mode(False), (mem_alloc_context or contextlib.nullcontext)():
                held = self.buffer[key] = torch.empty(numel, dtype=dtype, device=where, requires_grad=False)
        return held[:numel].view(tuple(tensor_shape))


def gather_buffer(
    buffer: GlobalMemoryBuffer | Tensor | None, tensor: Tensor, dim: int, sizes: Sequence[int]
) -> Tensor | None:
    """Memory for shards gathered along ``dim``, until the next gather into ``buffer``; None without a buffer."""
    if buffer is None or isinstance(buffer, Tensor):
        return buffer
    shape = (*tensor.shape[:dim], sum(sizes), *tensor.shape[dim + 1 :])
    return buffer.get_tensor(shape, tensor.dtype, "all_gather", device=tensor.device)


@dataclass(eq=False)
class GroupContext:
    """State of one group.

    Attributes:
        buffers: memory that is used again and again for gathered tensors.
        validates: every call is compared between the ranks before it is made.
        channel: memory that the ranks share; None if they share none, or have not tried.
        has_tried_to_share: the ranks have tried to share memory.
        time_limits: by type of device, how long a rank waits for another; None where the stream waits.
        symmetric_buffers: by device, the ``GlobalSymmetricMemoryBuffer``.
        symmetric_refusals: by device, why the ranks do not reach each other's memory; None where they do.
        agreed_kernels: devices and dtypes whose kernels the ranks have agreed on (``kernels.dispatch``).
        tried_operators: fused operators that have run on all ranks in symmetric memory, and their dtypes.
        num_messages: number of messages between two ranks that this rank has sent and received.
        exact_parts: number of parts that sums go over, by a tree that is the same at every number of ranks (``trees``);
            None where the transport sums.
        arithmetic: the ``nn.arithmetic`` of layers on this group; the plain one if None.
    """

    buffers: GlobalMemoryBuffer = field(default_factory=GlobalMemoryBuffer)
    validates: bool = False
    channel: SharedMemory | None = None
    has_tried_to_share: bool = False
    time_limits: dict[str, datetime.timedelta | None] = field(default_factory=dict)
    symmetric_buffers: dict[torch.device, Any] = field(default_factory=dict)
    symmetric_refusals: dict[torch.device, str | None] = field(default_factory=dict)
    agreed_kernels: set[tuple[torch.device, torch.dtype]] = field(default_factory=set)
    tried_operators: set[tuple[str, torch.dtype]] = field(default_factory=set)
    num_messages: int = 0
    exact_parts: int | None = None
    arithmetic: object | None = None


_contexts: weakref.WeakKeyDictionary[ProcessGroup, GroupContext] = weakref.WeakKeyDictionary()


def context_of(group: ProcessGroup) -> GroupContext:
    """The group's context; the first call makes it."""
    context = _contexts.get(group)
    if context is None:
        context = _contexts[group] = GroupContext()
    return context


# The compiler calls it while it traces: it cannot trace how a context is made.
torch.compiler.assume_constant_result(context_of)


def validate_calls(group: ProcessGroup) -> None:
    """From now on compare every collective of ``group`` (operation, shape, dtype, sizes) between its ranks.

    A disagreement is a DesyncError on every rank that names each rank's call. Costs an exchange per call; in shared
    memory calls are always compared, at no cost. Otherwise PyTorch's backends compare bytes at best: gloo silently sums
    a tensor of shape [4, 4] with one of [2, 8].
    """
    context_of(group).validates = True


@contextlib.contextmanager
def validated_calls(groups: Iterable[ProcessGroup]) -> Iterator[None]:
    """Within the block compare every collective of ``groups``, as ``validate_calls`` does."""
    contexts = [context for context in map(context_of, groups) if not context.validates]
    for context in contexts:
        context.validates = True
    try:
        yield
    finally:
        for context in contexts:
            context.validates = False


# They find a message's receiver by its tag; NCCL and its likes by the order of the calls.
_BY_TAG = ("gloo", "mpi", "ucc")


def backends_of(group: ProcessGroup) -> Mapping[str, str]:
    """The name of the backend that carries tensors between the ranks of ``group``, by type of device."""
    return _by_device_type(dist.get_backend_config(group))


def backend_of(group: ProcessGroup, device: torch.device) -> str | None:
    """The name of the backend that carries tensors on ``device``; None if none does."""
    return backends_of(group).get(device.type)


@cache
def _by_device_type(config: str) -> dict[str, str]:
    pairs = (pair.partition(":") for pair in config.split(","))
    return {device_type: name for device_type, _, name in pairs}


def is_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """True if gloo carries the tensors: the host does the work, and waits for it up to the group's time limit."""
    return backend_of(group, device) == "gloo"


def time_limit(group: ProcessGroup, device: torch.device) -> datetime.timedelta:
    """Time limit of a wait for another rank, of the backend that carries tensors on ``device``."""
    backend: Any = group._get_backend(device)
    limit: datetime.timedelta = backend.options._timeout
    return limit


def sends_by_tag(group: ProcessGroup, device: torch.device) -> bool:
    """True if messages between two ranks may be exchanged in any order, each found by its tag."""
    return backend_of(group, device) in _BY_TAG


def device_of(group: ProcessGroup) -> torch.device:
    """The device of the tensors that ``group`` was made for: the current accelerator, if it has another backend than
    the CPU; else the CPU, also for a group of gloo alone, which could carry the accelerator's tensors.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    own = backend_of(group, accelerator)
    if own is None or own == backend_of(group, torch.device("cpu")):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def device_of_host_facts(group: ProcessGroup, device: torch.device) -> torch.device:
    """The device for numbers that the hosts exchange and read at once: the CPU if the group carries tensors there.

    On ``device``, a GPU that the ranks compute on, the host would wait for everything that it has launched.
    """
    cpu = torch.device("cpu")
    return device if backend_of(group, cpu) is None else cpu


def default_device(group: ProcessGroup | None) -> torch.device:
    """The device for tensors of a group's ranks: PyTorch's default device if one was chosen, else the group's."""
    default = torch.get_default_device()
    return default if group is None or default != torch.device("cpu") else device_of(group)


def numbers_without_sync(values: Sequence[float], like: Tensor) -> Tensor:
    """A vector of ``values``, of the dtype and on the device of ``like``.

    On a GPU a kernel writes each run of equal values; without a copy the host does not wait, and a CUDA graph can be
    captured.
    """
    if like.is_cpu or torch.compiler.is_compiling():
        return like.new_tensor(values)
    vector, start = like.new_empty(len(values)), 0
    for value, run in groupby(values):
        stop = start + len(list(run))
        vector[start:stop].fill_(value)
        start = stop
    return vector
