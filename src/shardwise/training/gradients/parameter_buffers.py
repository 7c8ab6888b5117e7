"""Parameters in flat memory, of which each data-parallel rank updates an interval and gathers the rest.

Parameters lie as their gradients do, bucket by bucket. When every rank has updated its interval of each bucket, the
buckets are gathered in place, in about the order in which the forward uses them. Each is waited for just before the
first module that has a parameter in it runs, and the next one starts then: one gather is in flight while the forward
computes. No more are, since a GPU with one queue starts kernels in the order of their launches, and the forward would
begin behind the last gather.

Buckets start in one order on every rank, whatever order a rank reads them in, and all have started before the first
gradient is reduced in the same group.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5, P_os.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from shardwise.core.communication.collectives import all_gather_async
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.sharding import Interval
from shardwise.training.gradients.gradient_buffers import GradientBuffers
from shardwise.training.gradients.gradient_trees import GradientTrees


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
    one of its parameters is called, or when the parameter's ``wait_for_values`` is, which the parameter has from here
    on for code that reads it without calling its module (as the loss that is fused with the output layer does). A
    module that was not called in some forward, nor waited for so, has its buckets waited for when a forward begins,
    from then on; so the first forward comes before the first ``gather_``. Code that reads parameters otherwise calls
    ``wait`` before, on every rank.

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
        # Buckets start last first.
        self._num_started = len(self._buckets)
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
        owners: dict[Parameter, list[nn.Module]] = {param: [] for param in of_param}
        for module in self._buckets_of:
            for param in module.parameters(recurse=False):
                if param in owners:
                    owners[param].append(module)
            self._handles.append(module.register_forward_pre_hook(_hook(self, ParameterBuffers._before_module)))
        self._inside: dict[nn.Module, set[nn.Module]] = {}
        for root in [model] if isinstance(model, nn.Module) else model:
            self._inside[root] = self._buckets_of.keys() & set(root.modules())
            hook = _hook(self, ParameterBuffers._before_forward)
            self._handles.append(root.register_forward_pre_hook(hook, prepend=True))
        self._owners = list(owners.values())
        for place, param in enumerate(owners):
            tensor: Any = param
            tensor.wait_for_values = _hook(self, ParameterBuffers._before_reading, place)
        self._gradients = gradients
        gradients.before_reducing = _hook(self, ParameterBuffers.start)

    def gather_(self) -> None:
        """Start to give every rank the parameters as their owners have updated them; every rank calls.

        The first bucket starts now, and each other one when the one before it is waited for.
        """
        self.wait()
        for root in list(self._begun):
            self._end_forward(root)
        self._num_started = 0
        self._start(1)

    def start(self) -> None:
        """Start what has not started yet; where ranks make other calls in the group next, every rank calls."""
        self._start(len(self._buckets))

    def wait(self) -> None:
        """Wait until all parameters are there; every rank calls."""
        self.start()
        self._wait_for(reversed(range(len(self._buckets))))

    def remove_(self) -> None:
        """Leave the parameters where they are, complete, and without hooks; every rank calls."""
        self.wait()
        for handle in self._handles:
            handle.remove()
        for param in self.shares:
            vars(param).pop("wait_for_values", None)
        self._gradients.before_reducing = None

    @torch.no_grad()
    def _start(self, count: int) -> None:
        """Start gathers, in their order, until ``count`` buckets have started."""
        while self._num_started < min(count, len(self._buckets)):
            self._num_started += 1
            number = len(self._buckets) - self._num_started
            flat = self._flats[number]
            own = self._buckets[number].own(flat, self.group)
            self._pending[number] = all_gather_async(own, group=self.group, buffer=flat)

    @torch.no_grad()
    def _wait_for(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            count = len(self._buckets) - number
            if self._pending[number] is not None or self._num_started < count:
                # The bucket itself, and the next one.
                self._start(count + 1)
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

    def _before_reading(self, place: int) -> None:
        for module in self._owners[place]:
            self._before_module(module)


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


def _hook(buffers: ParameterBuffers, call: Callable[..., None], *given: Any) -> Callable[..., None]:
    """What calls ``call(buffers, *given)``, or of a module's hook ``call(buffers, module)``.

    It does not keep the buffers alive: a model may outlive them.
    """
    reference = weakref.ref(buffers)

    def hook(*arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            call(alive, *(given or arguments[:1]))

    return hook
