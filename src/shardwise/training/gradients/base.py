"""Gradients of a step: the protocol, its plain implementation, and the buckets of other implementations.

``GradientBuffers`` sums gradients over ranks in buckets, ``GradientTrees`` with the same bits at every number of ranks,
and ``FullyShardedModel`` with PyTorch's FSDP2. ``build_optimizer`` chooses one of them. A ``Bucket`` is a slice of a
flat buffer that one collective reduces; ``place`` computes where parameters lie and where the buffer is cut.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_reduce, reduce_numbers
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.sharding import Interval
from shardwise.kernels.fake_device import device_type_of


class Total:
    """Sums over a rank's micro-batches, in fp64."""

    def __init__(self, zeros: Tensor) -> None:
        self.tensor = zeros

    def add(self, values: Tensor) -> None:
        """Add ``[n]`` values of one micro-batch."""
        self.tensor += values

    def over(self, groups: Sequence[ProcessGroup]) -> Tensor:
        """Return the sums over the ranks of all groups, ``[n]``."""
        return reduce_numbers([(self.tensor, groups)], self.tensor[:0], groups=groups)[0][0]


class Gradients:
    """Gradients in ``param.grad``, for one data-parallel rank; base class of the other implementations.

    Attributes:
        total: makes a sum of losses over a step from zeros.
        seeds_micro_batches: True if dropout masks depend on a micro-batch's position in the global batch, not on its
            rank.
        are_taken_in_backward: True if the backward gives each gradient away as it makes it, so that ``param.grad`` does
            not hold it.
        are_clear: set by an optimizer that has cleared all gradients; ``zero_`` need not clear them again.
    """

    total: Callable[[Tensor], Total] = Total
    seeds_micro_batches = False
    are_taken_in_backward = False
    are_clear = False
    _trained: Sequence[Parameter] = ()

    def sum_of_losses(self, losses: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Sum the losses of one micro-batch in the given dtype."""
        return losses.sum(dtype=dtype)

    @staticmethod
    def of(params: Sequence[Parameter]) -> Gradients:
        """Make the plain implementation for these parameters."""
        gradients = Gradients()
        gradients._trained = params
        return gradients

    def begin(self, num_micro_batches: int) -> None:
        """Clear the previous step's gradients, and set the number of micro-batches, which is the same on every rank."""
        self.zero_()

    @staticmethod
    def num_sums(done: int, num_micro_batches: int) -> int:
        """Return how many sums of each gradient this rank holds after ``done`` of a step's micro-batches."""
        return min(done, 1)

    def zero_(self) -> None:
        """Clear all gradients."""
        for param in self._trained:
            param.grad = None

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication inside the context."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Complete the sums over the ranks; called once per step."""


# Parameters, and each rank's interval of a bucket, start at multiples of this many elements (64 bytes of fp32).
# Vectorised kernels then read aligned memory, and round an element the same way in any interval.
_ALIGNMENT = 16


class Placement(NamedTuple):
    """Positions of parameters in a flat buffer.

    Attributes:
        starts: index of each parameter's first element.
        buckets: indices of each bucket's parameters.
        bounds: index of each bucket's first element, then the buffer's end; each rank has a multiple of 16 elements in
            each bucket.
    """

    starts: tuple[int, ...]
    buckets: tuple[range, ...]
    bounds: tuple[int, ...]


def place(sizes: Sequence[int], *, bucket_size: int | None, world_size: int) -> Placement:
    """Place parameters one after the other in a buffer, and cut it into buckets between parameters.

    Args:
        sizes: number of elements of each parameter; at least one.
        bucket_size: maximum elements per bucket, including padding, unless one parameter has more; None for one bucket.
        world_size: number of ranks between which a bucket may be split.

    >>> place([5, 30, 40], bucket_size=64, world_size=3)
    Placement(starts=(0, 16, 48), buckets=(range(0, 2), range(2, 3)), bounds=(0, 48, 96))
    """
    step = _ALIGNMENT * world_size
    starts: list[int] = []
    firsts = [0]
    bounds = [0]
    end = 0
    for index, size in enumerate(sizes):
        start = _rounded_up(end, _ALIGNMENT)
        overflows = bucket_size is not None and _rounded_up(start + size, step) - bounds[-1] > bucket_size
        if index > firsts[-1] and overflows:
            start = _rounded_up(end, step)
            firsts.append(index)
            bounds.append(start)
        starts.append(start)
        end = start + size
    bounds.append(_rounded_up(end, step))
    buckets = tuple(range(first, stop) for first, stop in pairwise([*firsts, len(sizes)]))
    return Placement(tuple(starts), buckets, tuple(bounds))


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step


DEFAULT_BUCKET_SIZE = 1 << 23
"""Elements of a bucket on a CPU if no size is given: 32 MiB in fp32."""

BucketSize = int | Literal["auto"] | None
"""Maximum number of elements of a bucket; ``"auto"`` for ``default_bucket_size``, None for one bucket."""


def default_bucket_size(device_type: str, num_ranks: int) -> int:
    """Return the number of elements of a bucket if no size is given.

    On GPUs a bucket grows with the number of data-parallel ranks, so that each rank's part of it does not become too
    small for the links.

    Args:
        device_type: type of the parameters' device.
        num_ranks: number of data-parallel ranks.

    Source: ``DistributedDataParallelConfig.bucket_size`` of Megatron-LM.
    """
    return DEFAULT_BUCKET_SIZE if device_type == "cpu" else max(40_000_000, 1_000_000 * num_ranks)


@dataclass(eq=False)
class Bucket:
    """A slice of a buffer that one collective reduces.

    Attributes:
        data: ``[n]``, a view of the buffer; the number of ranks of ``group`` divides ``n``.
        params: parameters whose gradients lie in the bucket.
        starts: index in ``data`` of each parameter's first element.
        group: the ranks over which it is reduced.
        is_scattered: True for a reduce-scatter, False for an all-reduce.
        arrived: parameters whose gradients are complete.
        pending: the reduction in progress, if any.
    """

    data: Tensor
    params: tuple[Parameter, ...]
    starts: tuple[int, ...]
    group: ProcessGroup
    is_scattered: bool = False
    arrived: set[Parameter] = field(default_factory=set)
    pending: Pending | None = None

    def view(self, index: int) -> Tensor:
        """Return the gradient of ``params[index]``, in the parameter's shape."""
        param = self.params[index]
        return self.data.narrow(0, self.starts[index], param.numel()).view(param.shape)

    def own(self, flat: Tensor) -> Tensor:
        """Return this rank's interval of ``flat``, which has the layout of ``data``; all intervals have one length."""
        size = self.data.numel() // self.group.size()
        return flat.narrow(0, self.group.rank() * size, size)

    def intervals(self, index: int) -> tuple[Interval, ...]:
        """Return the interval of ``params[index]`` that each rank owns, in row-major order; often it is empty."""
        num_ranks = self.group.size()
        start, count = self.starts[index], self.params[index].numel()
        size = self.data.numel() // num_ranks
        edges = [min(max(rank * size - start, 0), count) for rank in range(num_ranks + 1)]
        return tuple(pairwise(edges))

    def wait(self) -> None:
        """Wait for the reduction in progress, if any, and clear ``arrived``."""
        if self.pending is not None:
            reduced, self.pending = self.pending.wait(), None
            target = self.own(self.data) if self.is_scattered else self.data
            if reduced.data_ptr() != target.data_ptr():
                target.copy_(reduced)
        self.arrived.clear()


def make_buckets(
    params: Iterable[Parameter],
    dtype: torch.dtype | None,
    bucket_size: BucketSize,
    *,
    group: ProcessGroup,
    is_scattered: bool,
) -> tuple[Tensor, list[Bucket]]:
    """Allocate a zeroed gradient buffer for parameters of one dtype and device, and its buckets (see ``place``)."""
    params = list(params)
    first, num_ranks = params[0], group.size()
    if bucket_size == "auto":
        bucket_size = default_bucket_size(device_type_of(first), num_ranks)
    placement = place([param.numel() for param in params], bucket_size=bucket_size, world_size=num_ranks)
    buffer = torch.zeros(placement.bounds[-1], dtype=dtype or first.dtype, device=first.device)
    buckets = [
        Bucket(
            buffer[start:stop],
            tuple(params[index] for index in indices),
            tuple(placement.starts[index] - start for index in indices),
            group,
            is_scattered,
        )
        for indices, (start, stop) in zip(placement.buckets, pairwise(placement.bounds), strict=True)
    ]
    return buffer, buckets


def trained_by_dtype(
    modules: Sequence[nn.Module], key: Callable[[Parameter], object]
) -> list[tuple[list[int], list[tuple[str, Parameter]]]]:
    """Group trained parameters by dtype, device and ``key``, last first, with their indices."""
    seen: dict[Parameter, str] = {}
    for number, module in enumerate(modules):
        for name, param in module.named_parameters():
            if param.requires_grad:
                seen.setdefault(param, f"chunk {number}: {name}" if len(modules) > 1 else name)
    groups: dict[object, tuple[list[int], list[tuple[str, Parameter]]]] = {}
    for number, (param, name) in enumerate(reversed(seen.items())):
        places, params = groups.setdefault((param.dtype, param.device, key(param)), ([], []))
        places.append(number)
        params.append((name, param))
    return list(groups.values())


def all_reduced(
    tensors: Iterable[Tensor], *, group: ProcessGroup, most_elements: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor with its sum over the ranks.

    Consecutive tensors of one dtype are reduced together, about ``most_elements`` at a time. This limits both the
    number of collectives and the size of the copy.
    """
    runs: list[list[Tensor]] = []
    elements = 0
    for tensor in tensors:
        if not runs or elements + tensor.numel() > most_elements or tensor.dtype != runs[-1][0].dtype:
            runs.append([])
            elements = 0
        runs[-1].append(tensor)
        elements += tensor.numel()
    for run in runs:
        flat = all_reduce(torch.cat([tensor.flatten() for tensor in run]), group=group, may_overwrite=True)
        for tensor, total in zip(run, flat.split([tensor.numel() for tensor in run]), strict=True):
            yield tensor, total.view(tensor.shape)


def weak_hook(method: Callable[..., None], *more: Any) -> Callable[..., None]:
    """Return a hook that calls a method with the hook's first argument, if any, and ``more``.

    The hook has only a weak reference to the method's object, which a model may outlive.
    """
    reference = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments[:1], *more)

    return hook
