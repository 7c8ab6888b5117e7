"""Comparisons with the dense computation, and parts of tensors, for cases and targets."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.sharding import balanced_sizes

_ROUNDINGS = 4096
"""Number of roundings that a difference may have, relative to the largest number: sums here have under 1,000 terms."""


class Called(nn.Module):
    """A module that is called through a function of it and the input, such as with a gather after the layer."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner
        self._call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self._call(*inputs)


class Synchronised:
    """A ``protocol.DataParallel`` of functions."""

    def __init__(self, call: Callable[..., Any], no_sync: Callable[[], Any], finish: Callable[[], Any]) -> None:
        self._call, self.no_sync, self.finish = call, no_sync, finish

    def __call__(self, *inputs: Tensor) -> Any:
        return self._call(*inputs)


def numbers(*shape: int, scale: float = 1.0) -> Tensor:
    """Return normal fp64 numbers, the same on every rank: the runner seeds each case."""
    return torch.randn(*shape, dtype=torch.float64) * scale


def part(tensor: Tensor, dim: int, group: ProcessGroup, target: Any = None) -> Tensor:
    """Return this rank's part of a whole tensor, by the target's ``sizes``.

    Without ``sizes``, the first ``n % t`` of ``t`` ranks have one element more.
    """
    sizes = getattr(target, "sizes", balanced_sizes)(tensor.size(dim), group.size())
    return tensor.narrow(dim, sum(sizes[: group.rank()]), sizes[group.rank()]).clone()


def joined(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the whole tensor of the ranks' parts, in the order of the ranks; collective, without a gradient."""
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, tensor.detach().clone(), group=group)
    return torch.cat(parts, dim)


def summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the ranks; collective, without a gradient."""
    total = tensor.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def grad_of(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor, which must have one."""
    assert tensor.grad is not None, f"a tensor of shape {list(tensor.shape)} got no gradient"
    return tensor.grad


def assert_close(
    actual: Tensor, expected: Tensor, what: str, target: Any = None, dtype: torch.dtype | None = None
) -> None:
    """Raise AssertionError unless two tensors differ by rounding alone.

    Args:
        actual: the target's tensor, of the shape of ``expected``.
        expected: the dense computation's.
        what: name of the tensor in the message.
        target: its ``precision`` is the dtype of its least precise step; fp64 if it has none.
        dtype: dtype of the rounding instead; a wider one than the target's has no effect.
    """
    assert tuple(actual.shape) == tuple(expected.shape), (
        f"{what} has shape {list(actual.shape)} and must have {list(expected.shape)}"
    )
    if not actual.numel():
        return
    rounding = [
        torch.finfo(each).eps for each in (getattr(target, "precision", torch.float64), dtype) if each is not None
    ]
    got, must = actual.detach().double(), expected.detach().double()
    tolerance = _ROUNDINGS * max(rounding) * max(float(must.abs().max()), 1e-3)
    wrong = ~((got - must).abs() <= tolerance)
    wrong &= ~(got.isnan() & must.isnan()) & (got != must)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        largest = float((got - must).abs().max())
        raise AssertionError(
            f"{what} at {list(place)} is {float(got[place]):.6g} and must be {float(must[place]):.6g} "
            f"(largest difference {largest:.3g}, rounding {tolerance:.1g})"
        )


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str, target: Any) -> None:
    """Compare tensors by name; ``actual`` must have every name of ``expected``."""
    missing = expected.keys() - actual.keys()
    assert not missing, f"{what} of {', '.join(sorted(missing))} is missing"
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, f"{what} of {name}", target)


def assert_same_on_ranks(tensor: Tensor, what: str, group: ProcessGroup) -> None:
    """Raise AssertionError unless every rank of a group holds the same bits; collective."""
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, tensor.detach().clone(), group=group)
    for rank, other in enumerate(parts):
        assert torch.equal(other, parts[0]), f"{what} differs between rank 0 and rank {rank} of the group"
