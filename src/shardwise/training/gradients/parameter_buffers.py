"""Parameters in flat memory: each data-parallel rank updates an interval and gathers the rest.

Parameters have the layout of their gradients, bucket by bucket. When every rank has updated its interval of each
bucket, the buckets are gathered in place, roughly in the order in which the forward uses them. The first module with a
parameter in a bucket waits for it and starts the next one, so that one gather overlaps with the forward. More gathers
in flight would not help: a GPU with one queue starts kernels in launch order, and the forward would start after the
last gather.

Buckets start in the same order on every rank, and all have started before the first gradient is reduced in the group.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5, P_os.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_gather_async
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.sharding import Interval
from shardwise.training.gradients.base import weak_hook
from shardwise.training.gradients.gradient_buffers import GradientBuffers
from shardwise.training.gradients.gradient_trees import GradientTrees


@dataclass(frozen=True, eq=False)
class Division:
    """Division of one parameter's elements between the data-parallel ranks, which update them.

    Attributes:
        group: the data-parallel ranks.
        intervals: each rank's elements, in row-major order; together all elements; a rank's interval is often empty.
    """

    group: ProcessGroup
    intervals: tuple[Interval, ...]

    @property
    def interval(self) -> Interval:
        """This rank's elements."""
        return self.intervals[self.group.rank()]


@dataclass(frozen=True, eq=False)
class Share(Division):
    """A division with tensors of this rank's elements.

    Attributes:
        data: ``[m]``, a view of the parameter.
        gradient: ``[m]``, a view of the parameter's gradient.
    """

    data: Tensor
    gradient: Tensor


class ParameterBuffers:
    """The trained parameters of a model in flat memory, gathered during the next forward.

    Each trained parameter is a view of a bucket. A call of a module waits for the buckets of its parameters. So does a
    parameter's ``wait_for_values``, for code that reads the parameter without calling its module, such as the loss that
    is fused with the output layer. If a forward does neither for some module, later forwards wait for that module's
    buckets when they begin; therefore run a forward before the first ``gather_``. All other code that reads parameters
    must call ``wait`` first, on every rank.

    Args:
        model: the module, or a pipeline stage's chunks; the same as for ``gradients``.
        gradients: the model's gradients, in buckets.

    Attributes:
        shares: share of each parameter.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], gradients: GradientBuffers | GradientTrees) -> None:
        self.shares: dict[Parameter, Share] = {}
        self._buckets = gradients.buckets
        self._flats: list[Tensor] = []
        self._pending: list[Pending | None] = []
        # Buckets start last first.
        self._num_started = len(self._buckets)
        self._called: set[nn.Module] = set()
        self._begun: set[nn.Module] = set()
        # Buckets to wait for at the start of a forward.
        self._early: set[int] = set()
        of_param: dict[Parameter, int] = {}
        for number, bucket in enumerate(self._buckets):
            # Copy one bucket at a time, so that no more than one bucket's parameters exist twice.
            first = bucket.params[0]
            flat = torch.zeros(bucket.data.numel(), dtype=first.dtype, device=first.device)
            for index, (param, start) in enumerate(zip(bucket.params, bucket.starts, strict=True)):
                view = flat.narrow(0, start, param.numel())
                view.copy_(param.detach().reshape(-1))
                param.data = view.view(param.shape)
                intervals = bucket.intervals(index)
                low, high = intervals[bucket.group.rank()]
                gradient = bucket.data.narrow(0, start + low, high - low)
                self.shares[param] = Share(bucket.group, intervals, view[low:high], gradient)
                of_param[param] = number
            self._flats.append(flat)
            self._pending.append(None)
        # The buckets of each module's direct parameters, in the order of gathering.
        self._buckets_of: dict[nn.Module, list[int]] = {}
        owners: dict[Parameter, list[nn.Module]] = {param: [] for param in of_param}
        roots = [model] if isinstance(model, nn.Module) else list(model)
        for module in dict.fromkeys(module for root in roots for module in root.modules()):
            own = [param for param in module.parameters(recurse=False) if param in owners]
            if own:
                self._buckets_of[module] = sorted({of_param[param] for param in own}, reverse=True)
                module.register_forward_pre_hook(weak_hook(self._before_module))
            for param in own:
                owners[param].append(module)
        self._inside: dict[nn.Module, set[nn.Module]] = {}
        for root in roots:
            self._inside[root] = self._buckets_of.keys() & set(root.modules())
            root.register_forward_pre_hook(weak_hook(self._before_forward), prepend=True)
        self._owners = list(owners.values())
        for place, param in enumerate(owners):
            tensor: Any = param
            tensor.wait_for_values = weak_hook(self._before_reading, place)
        gradients.before_reducing = weak_hook(self.start)

    def gather_(self) -> None:
        """Start to gather the updated parameters; every rank calls. A bucket starts when the previous one ends."""
        self.wait()
        for root in list(self._begun):
            self._end_forward(root)
        self._num_started = 0
        self._start(1)

    def start(self) -> None:
        """Start all remaining buckets; every rank calls this before other collectives in the group."""
        self._start(len(self._buckets))

    def wait(self) -> None:
        """Wait until all parameters are complete; every rank calls."""
        self.start()
        self._wait_for(reversed(range(len(self._buckets))))

    @torch.no_grad()
    def _start(self, count: int) -> None:
        while self._num_started < min(count, len(self._buckets)):
            self._num_started += 1
            number = len(self._buckets) - self._num_started
            flat = self._flats[number]
            bucket = self._buckets[number]
            self._pending[number] = all_gather_async(bucket.own(flat), group=bucket.group, buffer=flat)

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
        """Record modules that the forward of ``root`` did not call; it may have read their parameters directly."""
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
