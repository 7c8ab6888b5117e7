"""Parameters in flat memory, of which each data-parallel rank updates an interval and gathers the rest.

Parameters lie as their gradients do, bucket by bucket. When every rank has updated its interval of each bucket, the
buckets are gathered in place, in about the order in which the forward uses them, and each is waited for just before the
first module that has a parameter in it runs: the gathers are in flight during the forward.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5, P_os.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from shardwise.communication.collectives import all_gather_async
from shardwise.communication.pending import Pending
from shardwise.data_parallel.gradient_buffers import GradientBuffers
from shardwise.data_parallel.gradient_trees import GradientTrees
from shardwise.sharding import Interval


@dataclass(frozen=True, eq=False)
class Division:
    """Which elements of one parameter each data-parallel rank updates.

    Attributes:
        group: the ranks.
        intervals: for each rank in order, first of its elements in row-major order and the one after the last; together
            all elements, and often none of a rank's.
    """

    group: ProcessGroup
    intervals: tuple[Interval, ...]

    @property
    def interval(self) -> Interval:
        """This rank's elements."""
        return self.intervals[self.group.rank()]


@dataclass(frozen=True, eq=False)
class Share(Division):
    """The same, and what this rank has of the parameter.

    Attributes:
        data: ``[m]``, this rank's elements of the parameter: a view.
        gradient: ``[m]``, those of its gradient.
    """

    data: Tensor
    gradient: Tensor


class ParameterBuffers:
    """The trained parameters of a model in flat memory, gathered during the next forward.

    From here on each trained parameter's memory is part of a bucket's. A bucket is waited for when a module that has
    one of its parameters is called. A module that was not called in some forward, such as an output layer whose weight
    a loss reads by itself, has its buckets waited for when a forward begins, from then on; so the first forward comes
    before the first ``gather_``. Whoever reads parameters otherwise calls ``wait`` before.

    Args:
        model: the module, or a pipeline stage's chunks, as it was given to ``gradients``.
        gradients: its gradients, in buckets.

    Attributes:
        group: the ranks that share out the updates.
        shares: by parameter.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], gradients: GradientBuffers | GradientTrees) -> None:
        self.group = gradients.group
        self.shares: dict[Parameter, Share] = {}
        self._buckets = gradients.buckets
        self._flats: list[Tensor] = []
        self._pending: list[Pending | None] = []
        self._handles: list[RemovableHandle] = []
        self._called: set[nn.Module] = set()
        self._begun: set[nn.Module] = set()
        # Buckets that are waited for when a forward begins.
        self._early: set[int] = set()
        of_param: dict[Parameter, int] = {}
        rank, num_ranks = self.group.rank(), self.group.size()
        for number, bucket in enumerate(self._buckets):
            # One after the other, so that there is never more than a bucket's parameters twice.
            first = bucket.params[0]
            flat = torch.zeros(bucket.data.numel(), dtype=first.dtype, device=first.device)
            for index, (param, start) in enumerate(zip(bucket.params, bucket.starts, strict=True)):
                view = flat.narrow(0, start, param.numel())
                view.copy_(param.detach().reshape(-1))
                param.data = view.view(param.shape)
                intervals = bucket.intervals(index, num_ranks)
                low, high = intervals[rank]
                gradient = bucket.data.narrow(0, start + low, high - low)
                self.shares[param] = Share(self.group, intervals, view[low:high], gradient)
                of_param[param] = number
            self._flats.append(flat)
            self._pending.append(None)
        self._buckets_of = _buckets_of(model, of_param)
        for module in self._buckets_of:
            self._handles.append(module.register_forward_pre_hook(_hook(self, ParameterBuffers._before_module)))
        self._inside: dict[nn.Module, set[nn.Module]] = {}
        for root in [model] if isinstance(model, nn.Module) else model:
            self._inside[root] = self._buckets_of.keys() & set(root.modules())
            hook = _hook(self, ParameterBuffers._before_forward)
            self._handles.append(root.register_forward_pre_hook(hook, prepend=True))

    @torch.no_grad()
    def gather_(self) -> None:
        """Start to give every rank the parameters as their owners have updated them; every rank calls."""
        self.wait()
        for root in list(self._begun):
            self._end_forward(root)
        for number in reversed(range(len(self._buckets))):
            flat = self._flats[number]
            own = self._buckets[number].own(flat, self.group)
            self._pending[number] = all_gather_async(own, group=self.group, buffer=flat)

    def wait(self) -> None:
        """Wait until all parameters are there."""
        self._wait_for(reversed(range(len(self._buckets))))

    def remove_(self) -> None:
        """Leave the parameters where they are, complete, and without hooks."""
        self.wait()
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _wait_for(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            pending = self._pending[number]
            if pending is not None:
                self._pending[number] = None
                gathered, flat = pending.wait(), self._flats[number]
                if gathered.data_ptr() != flat.data_ptr():
                    flat.copy_(gathered)

    def _before_forward(self, root: nn.Module) -> None:
        if root in self._begun:
            self._end_forward(root)
        self._begun.add(root)
        self._wait_for(sorted(self._early, reverse=True))

    def _end_forward(self, root: nn.Module) -> None:
        """Note whose parameters the forward of ``root`` has read, if at all, without a call of their module."""
        uncalled = self._inside[root] - self._called
        self._early.update(number for module in uncalled for number in self._buckets_of[module])
        self._called -= self._inside[root]
        self._begun.remove(root)

    def _before_module(self, module: nn.Module) -> None:
        self._called.add(module)
        self._wait_for(self._buckets_of[module])


def _buckets_of(
    model: nn.Module | Sequence[nn.Module], of_param: dict[Parameter, int]
) -> dict[nn.Module, tuple[int, ...]]:
    """By module that has trained parameters itself, their buckets, in the order in which they are gathered."""
    result: dict[nn.Module, tuple[int, ...]] = {}
    for root in [model] if isinstance(model, nn.Module) else model:
        for module in root.modules():
            own = {of_param[param] for param in module.parameters(recurse=False) if param in of_param}
            if own:
                result[module] = tuple(sorted(own, reverse=True))
    return result


def _hook(buffers: ParameterBuffers, call: Callable[[ParameterBuffers, nn.Module], None]) -> Callable[..., None]:
    """A hook that does not keep the buffers alive: a model may outlive them."""
    reference = weakref.ref(buffers)

    def hook(module: nn.Module, *_: Any) -> None:
        alive = reference()
        if alive is not None:
            call(alive, module)

    return hook
