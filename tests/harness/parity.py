"""Comparisons of a parallel result with the dense result."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.communication.collectives import all_gather
from shardwise.core.sharding import ParamLayout

_MOST_DIMS = 7


def assert_close_to(actual: Tensor, expected: Tensor, *, rtol_of_norm: float, name: str = "result") -> None:
    """Assert ``norm(actual - expected) <= rtol_of_norm * norm(expected)``, in the 2-norm over all elements.

    The bound is relative to the norm of the whole tensor, because the rounding error of a sum scales with its terms,
    not with its value: the error of an element near zero may exceed the element. Equal infinities agree. If
    ``expected`` is all zeros, ``actual`` must be too.
    """
    __tracebackhide__ = True
    _check_kind(actual, expected, name)
    wide = torch.complex128 if actual.is_complex() else torch.float64
    a, e = actual.detach().to("cpu", wide), expected.detach().to("cpu", wide)
    difference = torch.where(a == e, torch.zeros_like(e), a - e).abs()
    error = float(torch.linalg.vector_norm(difference))
    norm = float(torch.linalg.vector_norm(torch.where(e.isinf(), torch.zeros_like(e), e)))
    # Written so that a NaN fails.
    if error <= rtol_of_norm * norm:
        return
    worst = int(difference.nan_to_num(nan=torch.inf).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), difference.shape)]
    relative = f"{error / norm:.3e} of the norm {norm:.3e}" if norm else f"{error:.3e} where all is zero"
    raise AssertionError(
        f"{name}: error {relative}, more than {rtol_of_norm:.3e}; worst at {index}: {a.flatten()[worst].item()!r}, "
        f"expected {e.flatten()[worst].item()!r}"
    )


def assert_bit_equal(actual: Tensor, expected: Tensor, *, name: str = "result") -> None:
    """Assert that two tensors have the same shape, dtype and bits. NaNs with equal bits are equal; 0 and -0 differ."""
    __tracebackhide__ = True
    _check_kind(actual, expected, name)
    differs = (_bits(actual) != _bits(expected)).any(dim=-1)
    if not bool(differs.any()):
        return
    first = int(differs.nonzero()[0, 0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), actual.shape)]
    raise AssertionError(
        f"{name}: {int(differs.sum())} of {actual.numel()} elements differ; first at {index}: "
        f"{actual.detach().flatten()[first].item()!r}, expected {expected.detach().flatten()[first].item()!r}"
    )


def _check_kind(actual: Tensor, expected: Tensor, name: str) -> None:
    __tracebackhide__ = True
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{name}: {list(actual.shape)} of {actual.dtype}, expected {list(expected.shape)} of {expected.dtype}"
        )


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of each element, ``[n, itemsize]``."""
    # Clone, because a tensor of one element counts as contiguous with any strides, but cannot be viewed as bytes.
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).flatten()
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size())


@contextlib.contextmanager
def assert_unmodified(*tensors: Tensor, **named: Tensor) -> Iterator[None]:
    """Assert that the block does not modify the tensors: the bits are the same, and nothing is written to the storage.

    >>> x = torch.ones(2)
    >>> with assert_unmodified(x=x):
    ...     y = x + 1
    """
    __tracebackhide__ = True
    watched = {f"tensor {i}": tensor for i, tensor in enumerate(tensors)} | named
    before = {name: (tensor.detach().clone(), _version(tensor)) for name, tensor in watched.items()}
    yield
    for name, tensor in watched.items():
        snapshot, version = before[name]
        assert_bit_equal(tensor, snapshot, name=f"{name} was modified")
        if _version(tensor) != version:
            raise AssertionError(f"{name} was written to: its version went from {version} to {_version(tensor)}")


def _version(tensor: Tensor) -> int:
    # An inference tensor has no version counter.
    return 0 if tensor.is_inference() else tensor._version


def gather_shards(
    local: Tensor, layout: ParamLayout, group: dist.ProcessGroup, *, check_replicas: bool = True
) -> Tensor:
    """Assemble a whole parameter or gradient from every rank's part, on every rank."""
    __tracebackhide__ = True
    shards = gather_all(local, group)
    whole = layout.assemble(shards)
    if check_replicas:
        for rank, shard in enumerate(shards):
            assert_bit_equal(shard, layout.take(whole, rank), name=f"rank {rank} against its replicas on other ranks")
    return whole.to(local.device)


def gather_all(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather every rank's tensor on every rank, on the CPU and without gradient; shapes may differ.

    This uses the library's all-gather, which has separate tests. Tests gather thousands of tensors, and
    ``all_gather_object`` takes forty times as long.
    """
    own = local.detach().cpu().contiguous()
    shape = torch.zeros(1, _MOST_DIMS + 1, dtype=torch.int64)
    shape[0, 0] = own.dim()
    shape[0, 1 : own.dim() + 1] = torch.tensor(own.shape)
    shapes = [tuple(row[1 : row[0] + 1]) for row in all_gather(shape, group=group).tolist()]
    sizes = [math.prod(other) * own.element_size() for other in shapes]
    # Send words of 8 bytes, because the backend does not support every dtype.
    words = torch.zeros(1, -(-max(sizes) // 8), dtype=torch.int64)
    words.view(torch.uint8)[0, : own.nbytes] = own.view(-1).view(torch.uint8)
    rows = all_gather(words, group=group).view(torch.uint8)
    return [row[:size].view(own.dtype).view(other) for row, size, other in zip(rows, sizes, shapes, strict=True)]
