"""Per-group state, such as buffers, and queries about the backends of a process group.

Only this file refers to PyTorch's backends by name. A group may have one backend for each device type
(``"cpu:gloo,cuda:nccl"``), or PyTorch's default. ``torch.distributed.get_backend`` returns a single name and
distinguishes neither case. ``numbers_without_sync`` copies host numbers to a device without synchronizing with it.
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
    """Named scratch buffers that are reused and grow to the largest request.

    A later request with the same name and dtype overwrites the tensor that ``get_tensor`` returned before.
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
        """Return a tensor with uninitialized values.

        Args:
            name: requests with the same name, dtype and device share memory.
            mem_alloc_context: returns a context manager for the allocation of new memory, such as a CUDA memory pool.
            device: device of the tensor; None means PyTorch's default device.
        """
        numel = math.prod(tensor_shape)
        where = torch.empty(0, device=device).device
        key = (name, dtype, where)
        held = self.buffer.get(key)
        if held is None or held.numel() < numel:
            # A tensor created in inference mode cannot be written to outside inference mode.
            with torch.inference_mode(False), (mem_alloc_context or contextlib.nullcontext)():
                held = self.buffer[key] = torch.empty(numel, dtype=dtype, device=where, requires_grad=False)
        return held[:numel].view(tuple(tensor_shape))


def gather_buffer(
    buffer: GlobalMemoryBuffer | Tensor | None, tensor: Tensor, dim: int, sizes: Sequence[int]
) -> Tensor | None:
    """Return the part of ``buffer`` that receives shards gathered along ``dim``; None without a buffer.

    The next gather into ``buffer`` overwrites it.
    """
    if buffer is None or isinstance(buffer, Tensor):
        return buffer
    shape = (*tensor.shape[:dim], sum(sizes), *tensor.shape[dim + 1 :])
    return buffer.get_tensor(shape, tensor.dtype, "all_gather", device=tensor.device)


@dataclass(eq=False)
class GroupContext:
    """State of one process group.

    Attributes:
        buffers: reusable buffers for gathered tensors.
        validates: True if the ranks compare every call before it is made.
        channel: the ranks' shared memory; None before set-up, or if the ranks do not share memory.
        has_tried_to_share: True once the set-up of shared memory was tried.
        time_limits: timeout of a wait for another rank, by device type; None if the stream waits instead of the host.
        symmetric_buffers: the ``GlobalSymmetricMemoryBuffer`` of each device.
        symmetric_refusals: for each device, why symmetric memory is unavailable; None if it is available.
        agreed_kernels: devices and dtypes for which the ranks have agreed on the kernels (``kernels.dispatch``).
        tried_operators: fused operators, with their dtypes, that have run on all ranks in symmetric memory.
        num_messages: number of point-to-point messages that this rank has sent and received.
        transports: names of transports that carry some of this group's calls (``transports.OF_SOME_GROUPS``).
        why_not_overlapped: why products and collectives of the group never overlap; None if they may.
        exact_parts: number of parts that reductions sum by a fixed tree, the same at every number of ranks
            (``trees``); None if the transport sums.
        arithmetic: the ``nn.arithmetic`` of layers on this group; None means plain arithmetic.
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
    transports: tuple[str, ...] = ()
    why_not_overlapped: str | None = None
    exact_parts: int | None = None
    arithmetic: object | None = None


_contexts: weakref.WeakKeyDictionary[ProcessGroup, GroupContext] = weakref.WeakKeyDictionary()


def context_of(group: ProcessGroup) -> GroupContext:
    """Return the group's context, which the first call creates."""
    context = _contexts.get(group)
    if context is None:
        context = _contexts[group] = GroupContext()
    return context


# The compiler runs this function at trace time, because it cannot trace the creation of a context. This is what
# torch.compiler.assume_constant_result does after it has imported the compiler, which takes a second.
context_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def validate_calls(group: ProcessGroup) -> None:
    """Validate all later collectives of ``group``: the ranks compare operation, shape, dtype and sizes.

    If the ranks disagree, every rank raises a DesyncError that names each rank's call. Validation costs one exchange
    per call. The shared-memory transport always validates, at no cost. Without validation PyTorch's backends compare
    byte counts at best: gloo silently sums a tensor of shape [4, 4] with one of [2, 8].
    """
    context_of(group).validates = True


@contextlib.contextmanager
def validated_calls(groups: Iterable[ProcessGroup]) -> Iterator[None]:
    """Validate every collective of ``groups`` in the block, as ``validate_calls`` does."""
    contexts = [context for context in map(context_of, groups) if not context.validates]
    for context in contexts:
        context.validates = True
    try:
        yield
    finally:
        for context in contexts:
            context.validates = False


# These backends match messages by tag. NCCL and similar backends match them by the order of the calls.
_BY_TAG = ("gloo", "mpi", "ucc")


def backends_of(group: ProcessGroup) -> Mapping[str, str]:
    """Return the names of the group's backends, by device type."""
    return _by_device_type(dist.get_backend_config(group))


def backend_of(group: ProcessGroup, device: torch.device) -> str | None:
    """Return the name of the group's backend for tensors on ``device``; None if it has no such backend."""
    return backends_of(group).get(device.type)


@cache
def _by_device_type(config: str) -> dict[str, str]:
    pairs = (pair.partition(":") for pair in config.split(","))
    return {device_type: name for device_type, _, name in pairs}


def is_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """True if gloo is the backend, so that the host does the work and waits for it up to the group's timeout."""
    return backend_of(group, device) == "gloo"


def is_rehearsal(group: ProcessGroup) -> bool:
    """True if the group's backend is PyTorch's ``fake``: this process stands for all ranks, and nothing is sent."""
    return "fake" in backends_of(group).values()


def time_limit(group: ProcessGroup, device: torch.device) -> datetime.timedelta:
    """Return the timeout of the backend for tensors on ``device``."""
    backend: Any = group._get_backend(device)
    limit: datetime.timedelta = backend.options._timeout
    return limit


def sends_by_tag(group: ProcessGroup, device: torch.device) -> bool:
    """True if the backend matches point-to-point messages by tag, so that their order is free."""
    return backend_of(group, device) in _BY_TAG


def device_of(group: ProcessGroup) -> torch.device:
    """Return the device of the tensors that ``group`` was created for.

    This is the current accelerator if the group has a separate backend for it. Otherwise it is the CPU, also for a
    group that has only gloo, although gloo accepts tensors of the accelerator.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    own = backend_of(group, accelerator)
    if own is None or own == backend_of(group, torch.device("cpu")):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def device_of_host_facts(group: ProcessGroup, device: torch.device) -> torch.device:
    """Return the device for numbers that the hosts exchange and read: the CPU if the group has a backend for it.

    Reading a number from ``device``, the GPU that the rank computes on, would wait for all launched work.
    """
    cpu = torch.device("cpu")
    return device if backend_of(group, cpu) is None else cpu


def default_device(group: ProcessGroup | None) -> torch.device:
    """Return PyTorch's default device if the program set one, otherwise the group's device."""
    default = torch.get_default_device()
    return default if group is None or default != torch.device("cpu") else device_of(group)


def numbers_without_sync(values: Sequence[float], like: Tensor) -> Tensor:
    """Return a vector of ``values`` with the dtype and device of ``like``.

    On a GPU, one fill kernel writes each run of equal values. There is no copy from the host, so the host does not
    wait and a CUDA graph can capture the call.
    """
    if like.is_cpu or torch.compiler.is_compiling():
        return like.new_tensor(values)
    vector, start = like.new_empty(len(values)), 0
    for value, run in groupby(values):
        stop = start + len(list(run))
        vector[start:stop].fill_(value)
        start = stop
    return vector
