"""A run of a buffer of gradients that is reduced by one collective, and what of it each rank owns.

Where parameters lie in a flat buffer, and where the buffer is cut into buckets.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.transports.transport import Pending
from shardwise.core.sharding import Interval

# Parameters and each rank's interval of a bucket start at multiples of this many elements, 64 bytes of fp32: vectorised
# kernels find them aligned, and round each element alike whichever interval it lies in.
_ALIGNMENT = 16


class Placement(NamedTuple):
    """Parameters in a flat buffer, in the order in which they were given.

    Attributes:
        starts: where each parameter starts.
        buckets: for each bucket the indices of its parameters.
        bounds: where each bucket starts, and last where the buffer ends; every bucket is a multiple of 16 elements for
            each rank.
    """

    starts: tuple[int, ...]
    buckets: tuple[range, ...]
    bounds: tuple[int, ...]


def place(sizes: Sequence[int], *, bucket_size: int | None, world_size: int) -> Placement:
    """Put parameters one after the other, and cut between them.

    Args:
        sizes: numbers of elements, of at least one parameter.
        bucket_size: the most elements of a bucket, padding included, unless one parameter has more; None for one
            bucket.
        world_size: ranks between which a bucket may be split.

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
        if (
            index > firsts[-1]
            and bucket_size is not None
            and _rounded_up(start + size, step) - bounds[-1] > bucket_size
        ):
            start = _rounded_up(end, step)
            firsts.append(index)
            bounds.append(start)
        starts.append(start)
        end = start + size
    bounds.append(_rounded_up(end, step))
    stops = [*firsts[1:], len(sizes)]
    return Placement(
        tuple(starts), tuple(range(first, stop) for first, stop in zip(firsts, stops, strict=True)), tuple(bounds)
    )


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step


DEFAULT_BUCKET_SIZE = 1 << 23
"""Elements of a bucket: 32 MiB of fp32."""


@dataclass(eq=False)
class Bucket:
    """A run of a buffer that is reduced by one collective.

    Attributes:
        data: ``[n]``, a view of the buffer; the number of data-parallel ranks divides ``n``.
        params: whose gradients lie in it.
        starts: where in ``data`` each of them starts.
        is_scattered: the sum goes to each element's owner only; otherwise to every rank.
        arrived: those of ``params`` whose gradients are there.
        pending: the reduction, while it is under way.
    """

    data: Tensor
    params: tuple[Parameter, ...]
    starts: tuple[int, ...]
    is_scattered: bool = False
    arrived: set[Parameter] = field(default_factory=set)
    pending: Pending | None = None

    def view(self, index: int) -> Tensor:
        """Where the gradient of ``params[index]`` lies, of its shape."""
        param = self.params[index]
        return self.data.narrow(0, self.starts[index], param.numel()).view(param.shape)

    def own(self, flat: Tensor, group: ProcessGroup) -> Tensor:
        """What this rank owns of a tensor that is laid out as ``data``: as many elements as each other rank."""
        size = self.data.numel() // group.size()
        return flat.narrow(0, group.rank() * size, size)

    def intervals(self, index: int, num_ranks: int) -> tuple[Interval, ...]:
        """Which elements of the parameter ``params[index]`` each rank owns, in row-major order; often none."""
        start, count = self.starts[index], self.params[index].numel()
        size = self.data.numel() // num_ranks
        edges = [min(max(rank * size - start, 0), count) for rank in range(num_ranks + 1)]
        return tuple(pairwise(edges))

    def wait(self, group: ProcessGroup) -> None:
        """Wait for the reduction, if it is under way; then begin anew."""
        if self.pending is not None:
            reduced, self.pending = self.pending.wait(), None
            target = self.own(self.data, group) if self.is_scattered else self.data
            if reduced.data_ptr() != target.data_ptr():
                target.copy_(reduced)
        self.arrived.clear()


def make_buckets(
    params: Sequence[Parameter],
    *,
    dtype: torch.dtype | None,
    bucket_size: int | None,
    num_ranks: int,
    is_scattered: bool,
) -> tuple[Tensor, list[Bucket]]:
    """A buffer of zeros for the gradients of parameters of one dtype and device, and its buckets.

    Args:
        params: in the order in which their gradients lie.
        dtype: of the buffer; the parameters' own if None.
        bucket_size: as in ``place``.
        num_ranks: between which a bucket may be split.
        is_scattered: of the buckets.
    """
    first = params[0]
    placement = place([param.numel() for param in params], bucket_size=bucket_size, world_size=num_ranks)
    buffer = torch.zeros(placement.bounds[-1], dtype=dtype or first.dtype, device=first.device)
    buckets = [
        Bucket(
            buffer[start:stop],
            tuple(params[index] for index in indices),
            tuple(placement.starts[index] - start for index in indices),
            is_scattered,
        )
        for indices, (start, stop) in zip(placement.buckets, pairwise(placement.bounds), strict=True)
    ]
    return buffer, buckets


def trained_by_dtype(
    modules: Sequence[nn.Module], apart: Collection[Parameter] = ()
) -> list[tuple[list[int], list[tuple[str, Parameter]]]]:
    """Trained parameters of each dtype and device, last first, with their places in the order of all.

    Args:
        modules: the parts of a model.
        apart: parameters that do not lie with the others.
    """
    seen: dict[Parameter, str] = {}
    for number, module in enumerate(modules):
        for name, param in module.named_parameters():
            if param.requires_grad:
                seen.setdefault(param, f"chunk {number}: {name}" if len(modules) > 1 else name)
    groups: dict[object, tuple[list[int], list[tuple[str, Parameter]]]] = {}
    for number, (param, name) in enumerate(reversed(seen.items())):
        places, params = groups.setdefault((param.dtype, param.device, param in apart), ([], []))
        places.append(number)
        params.append((name, param))
    return list(groups.values())
