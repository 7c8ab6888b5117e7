"""Symmetric memory of a group, which each rank can access on every other rank, with ordinary memory as a fallback."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import gather_objects
from shardwise.core.communication.context import context_of, device_of
from shardwise.core.processes import machine

T = TypeVar("T")

_WHAT = "how to make symmetric memory"
# Fits the activations of one tensor-parallel region of a large model: 8192 tokens of width 16384 in bf16.
_MEBIBYTES = 256
_TRIED_BYTES = 4096


@dataclass(frozen=True)
class OrdinaryMemory:
    """The handle of a block of ordinary memory, instead of PyTorch's symmetric-memory handle.

    Attributes:
        rank, world_size: this rank's index in the group, and the size of the group.
        why: why symmetric memory is unavailable.
        group: the ranks, which use collectives instead.
    """

    rank: int
    world_size: int
    why: str
    group: ProcessGroup


@dataclass(frozen=True, eq=False)
class StoredOutput:
    """The output that a row-parallel layer in fused mode leaves for the column-parallel layer after it.

    Attributes:
        normed: ``[s, b, h]``, the whole normed input, in the buffer; None if the buffer is too small.
        weight: weight of the norm.
    """

    normed: Tensor | None
    weight: Tensor


class GlobalSymmetricMemoryBuffer:
    """A reusable buffer that every rank of a group can access on every other rank.

    CUDA devices of one host that can access each other's memory use PyTorch's symmetric memory. On other devices,
    including CPUs, the buffer is local to this rank and the ranks use collectives instead. Construction is collective.

    Args:
        size_in_mb: size of the block in MiB.
        process_group: the ranks that share the buffer.
        device: device of the block; None means the device of the group's tensors.

    Attributes:
        buffer: the block, one dimension of bytes.
        handle: PyTorch's symmetric-memory handle of the block, or ``OrdinaryMemory``.
        fused: for each dtype and width of the block's content, True if all ranks agreed to exchange by one kernel.
    """

    def __init__(self, size_in_mb: int, process_group: ProcessGroup, device: torch.device | None = None) -> None:
        device = device_of(process_group) if device is None else device
        size = size_in_mb * 2**20
        made: str | tuple[Tensor, Any] = _symmetric(size, process_group, device)
        if isinstance(made, str):
            # Untouched pages take no memory. A tensor created in inference mode cannot be written to outside it.
            with torch.inference_mode(False):
                block = torch.empty(size, dtype=torch.uint8, device=device)
            made = block, OrdinaryMemory(process_group.rank(), process_group.size(), made, process_group)
        self.buffer = made[0]
        self.handle: Any = made[1]
        self.fused: dict[tuple[torch.dtype, int], bool] = {}
        self._stored: StoredOutput | None = None

    @property
    def is_symmetric(self) -> bool:
        """True if the ranks can access each other's blocks."""
        return not isinstance(self.handle, OrdinaryMemory)

    @functools.cached_property
    def addresses(self) -> Tensor:
        """Addresses of all ranks' blocks in this process, int64 ``[t]``, on the block's device (if symmetric)."""
        return torch.tensor(list(self.handle.buffer_ptrs), dtype=torch.int64, device=self.buffer.device)

    def maybe_get_tensor(self, tensor_shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
        """Return the start of the block as a tensor of the given shape and dtype.

        Returns:
            ``{"tensor": ..., "handle": ...}``; both are None if the tensor is larger than the block.
        """
        num_bytes = math.prod(tensor_shape) * dtype.itemsize
        if num_bytes > self.buffer.numel():
            return {"tensor": None, "handle": None}
        return {"tensor": self.buffer[:num_bytes].view(dtype).view(tuple(tensor_shape)), "handle": self.handle}

    def store(self, output: StoredOutput | None) -> None:
        """Record the block's content for the next layer; None while a layer overwrites it."""
        self._stored = output

    def take(self) -> StoredOutput | None:
        """Return the content recorded since the last call, if any, and clear it."""
        output, self._stored = self._stored, None
        return output


def symmetric_buffer_of(group: ProcessGroup, device: torch.device | None = None) -> GlobalSymmetricMemoryBuffer:
    """Return the group's 256 MiB buffer on a device, by default its tensors' device. The first call is collective."""
    buffers = context_of(group).symmetric_buffers
    device = device_of(group) if device is None else device
    if device not in buffers:
        buffers[device] = GlobalSymmetricMemoryBuffer(_MEBIBYTES, group, device)
    buffer: GlobalSymmetricMemoryBuffer = buffers[device]
    return buffer


def why_no_symmetric_memory() -> str | None:
    """Return why this machine's GPUs lack symmetric memory, as far as one process can tell; None if they have it."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number < 2:
        return f"it takes two GPUs of one machine, and PyTorch sees {number or 'none'}"
    if not torch.cuda.can_device_access_peer(0, 1):
        return "the first two GPUs do not reach each other's memory"
    return None


def why_not_symmetric(group: ProcessGroup, device: torch.device) -> str | None:
    """Return why symmetric memory is unavailable on a device; None if it is available. The first call is collective."""
    refusals = context_of(group).symmetric_refusals
    if device not in refusals:
        made = _symmetric(_TRIED_BYTES, group, device)
        refusals[device] = made if isinstance(made, str) else None
    return refusals[device]


def first_tried(operator: str, call: Callable[[], T], like: Tensor, *, group: ProcessGroup) -> T | None:
    """Run a fused operator in symmetric memory; return None if its first call failed on some rank.

    The first call of an operator with a dtype in a group is collective: the ranks exchange its outcome. If the call
    failed on any rank, ``why_not_symmetric`` returns the reason on all ranks from then on, and rank 0 warns. Later
    calls only run the operator.

    Args:
        call: the call, in which all ranks take part.
        like: a tensor with the device and dtype of the operator's inputs.
        group: the ranks that take part.

    Raises:
        DesyncError: a rank has exited, or does not arrive within the group's timeout.
    """
    context = context_of(group)
    if (operator, like.dtype) in context.tried_operators:
        return call()
    result: T | None = None
    refusal: str | None = None
    try:
        result = call()
    # PyTorch's operators are experimental. If one fails, collectives replace it.
    except Exception as error:
        reason = (str(error).strip() or "failed").splitlines()[0]
        refusal = f"{operator} failed on rank {group.rank()}: {type(error).__name__}: {reason}"
    refusals = [other for other in gather_objects(refusal, f"how {operator} went", group=group) if other is not None]
    if not refusals:
        context.tried_operators.add((operator, like.dtype))
        return result
    context.symmetric_refusals[like.device] = refusals[0]
    if group.rank() == 0:
        warnings.warn(f"symmetric memory: off on all ranks of the group, since {refusals[0]}", stacklevel=2)
    return None


def _symmetric(size: int, group: ProcessGroup, device: torch.device) -> tuple[Tensor, Any] | str:
    """Allocate symmetric memory and its handle, or return why that failed; all ranks decide alike."""
    if device.type != "cuda":
        return f"symmetric memory is memory of CUDA devices, and this is a {device.type}"
    if group.size() == 1:
        return "there is one rank"
    places = gather_objects((machine(), _gpu(device)), _WHAT, group=group)
    if len({host for host, _ in places}) > 1:
        return "the ranks are on several hosts"
    gpus = [gpu for _, gpu in places if gpu]
    if len(set(gpus)) < len(gpus):
        return "ranks share a GPU"
    memory: Tensor | None = None
    handle: Any = None
    refusal: str | None = None
    # The second step is collective, so every rank must complete the first step before any rank starts it.
    for step in ("allocation", "rendezvous"):
        try:
            from torch.distributed import _symmetric_memory

            if memory is None:
                memory = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
            else:
                handle = _symmetric_memory.rendezvous(memory, group)
        # PyTorch's module is experimental. If it fails, collectives replace it.
        except (ImportError, AttributeError, RuntimeError) as error:
            refusal = f"{step} of symmetric memory failed: {str(error).partition(chr(10))[0]}"
        refusals = [other for other in gather_objects(refusal, _WHAT, group=group) if other is not None]
        if refusals:
            return str(refusals[0])
    assert memory is not None
    return memory, handle


def _gpu(device: torch.device) -> str:
    """Return a unique identifier of this GPU; empty if PyTorch has none."""
    try:
        return str(torch.cuda.get_device_properties(device).uuid)
    except (AssertionError, AttributeError, RuntimeError):
        return ""
