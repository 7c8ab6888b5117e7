"""Gradients in contiguous buffers, reduced over data-parallel ranks bucket by bucket during the backward.

The gradients of a model lie in one flat buffer per dtype, in reverse order of the parameters, which is roughly the
order in which a backward computes them. A buffer is cut into buckets. The all-reduce of a bucket starts as soon as its
last gradient is complete and overlaps with the computation of the next gradients; ``finish`` waits for the remaining
buckets. No copies are needed, because ``param.main_grad`` is a view of the buffer.

Every rank starts the buckets in the same order. A rank that did not use a parameter contributes zeros to its bucket at
``finish`` and makes the same calls as the other ranks; later buckets start late on that rank.

Source: Li et al. 2020 (arXiv:2006.15704), section 3.2.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.agreement import check_same
from shardwise.core.communication.collectives import all_reduce_async, reduce_scatter_async
from shardwise.core.errors import ConfigError
from shardwise.training.gradients.base import Bucket, BucketSize, Gradients, make_buckets, trained_by_dtype, weak_hook


@dataclass(eq=False)
class _Slot:
    name: str
    view: Tensor
    bucket: Bucket
    # The gradient may arrive from a layer's deferred computation, or at an unknown time.
    comes_from_layer: bool
    comes_late: bool
    # True if param.grad was set to the view.
    is_attached: bool = False


class GradientBuffers(Gradients):
    """The gradients of a model, reduced over data-parallel ranks.

    Each trained parameter has ``main_grad``, a view of a buffer, of the parameter's shape. In the parameter's own dtype
    its ``grad`` is that view too, from the first backward on, and optimizers find it there; in another dtype each
    micro-batch's gradient is added to ``main_grad``, and ``grad`` is None.

    All backward passes of a step except the last run inside ``no_sync()``; then ``finish()`` is called once.
    ``zero_()`` clears gradients. So does ``param.grad = None`` (as in ``optimizer.zero_grad()``) if ``grad`` is a view
    and no layer adds to ``main_grad``. A parameter that no rank used in a step has a gradient of zeros.

    Args:
        model: the module with the trained parameters, or a pipeline stage's chunks.
        group: the ranks that see different samples.
        bucket_size: maximum elements per bucket, unless one parameter has more; "auto" for ``default_bucket_size``;
            None for one bucket per dtype.
        dtype: dtype of the buffers; None for each parameter's own.
        average: average over the ranks instead of summing: gradients are divided by the number of ranks before the
            reduction.
        overlap: reduce buckets during the backward instead of all at ``finish``.
        late: parameters whose gradients are complete only when ``finish`` (or ``start``) is called.
        scatter: reduce-scatter instead of all-reduce: each rank gets the sum only in its own interval of each bucket
            (``Bucket.own``), which halves the traffic.
        whole: with ``scatter``, parameters whose gradients are all-reduced, in separate buckets; for example those that
            are then summed over other groups.
        other_groups: for parameters whose copies are on other ranks than those of ``group``, such as experts, these
            ranks.

    Attributes:
        buffers: flat buffers, one per dtype.
        buckets: buckets in the order of reduction.
        before_reducing: callback before the first bucket of a step is reduced (``ParameterBuffers``); or None.

    Raises:
        ConfigError: ``bucket_size`` is not positive.
        DesyncError: the ranks have different parameters.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        group: ProcessGroup,
        bucket_size: BucketSize = "auto",
        dtype: torch.dtype | None = None,
        average: bool = False,
        overlap: bool = True,
        late: Collection[Parameter] = (),
        scatter: bool = False,
        whole: Collection[Parameter] = (),
        other_groups: Mapping[Parameter, ProcessGroup] | None = None,
    ) -> None:
        if isinstance(bucket_size, int) and bucket_size < 1:
            raise ConfigError(f"bucket_size is {bucket_size}; it must be at least 1, or None for one bucket")
        self.group = group
        self.average = average
        self.overlap = overlap
        self.buffers: list[Tensor] = []
        self.before_reducing: Callable[[], None] | None = None
        self._synchronises = True
        self._num_started = 0
        self._slots: dict[Parameter, _Slot] = {}
        modules = [model] if isinstance(model, nn.Module) else list(model)
        layers: list[Any] = [layer for chunk in modules for layer in chunk.modules()]
        delaying = [layer for layer in layers if getattr(layer, "delays_weight_gradients", False)]
        delayed: set[Parameter] = {layer.weight for layer in delaying}
        # Layers that share the weight of another layer, which is known once a gradient is deferred.
        self._borrowing = [layer for layer in delaying if layer.weight is None]
        late, whole = set(late), set(whole) if scatter else set()
        # Order buckets by the position of their last parameter.
        placed: dict[int, Bucket] = {}
        others = other_groups or {}
        for places, params in trained_by_dtype(modules, lambda param: (param in whole, others.get(param))):
            names, first = {param: name for name, param in params}, params[0][1]
            scatters, over = scatter and first not in whole, others.get(first, group)
            buffer, buckets = make_buckets(names, dtype, bucket_size, group=over, is_scattered=scatters)
            self.buffers.append(buffer)
            last = -1
            for bucket in buckets:
                for index, param in enumerate(bucket.params):
                    view = bucket.view(index)
                    self._slots[param] = _Slot(names[param], view, bucket, param in delayed, param in late)
                last += len(bucket.params)
                placed[places[last]] = bucket
        self.buckets = [placed[place] for place in sorted(placed)]
        for over in dict.fromkeys([group, *others.values()]):
            if over.size() > 1:
                own = [each for each in self.buckets if each.group is over]
                facts = [(str(each.data.dtype), each.data.numel(), len(each.params)) for each in own]
                check_same(facts, "their trained parameters (dtype, elements and number, by bucket)", group=over)
        for param, slot in self._slots.items():
            tensor: Any = param
            tensor.main_grad = slot.view
            if not slot.comes_from_layer:
                # A layer that adds to main_grad calls the hooks only if this attribute exists.
                tensor.grad_added_to_main_grad = False
            param.register_post_accumulate_grad_hook(weak_hook(self._arrived, False))
        for layer in delaying:
            layer.register_weight_gradient_hook(weak_hook(self._arrived, True))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def start(self) -> None:
        """Start the reduction of every bucket that has not started, complete or not."""
        while self._num_started < len(self.buckets):
            self._start_next()

    def finish(self) -> None:
        """Reduce the remaining buckets and wait; gradients (with ``scatter``, this rank's) are then complete."""
        self.start()
        self._wait()
        for param, slot in self._slots.items():
            self._attach(param, slot)

    def zero_(self) -> None:
        self._wait()
        if not self.are_clear:
            for buffer in self.buffers:
                buffer.zero_()
        self.are_clear = False
        for param, slot in self._slots.items():
            param.grad = None
            slot.is_attached = False
            if not slot.comes_from_layer:
                tensor: Any = param
                tensor.grad_added_to_main_grad = False

    def scale_(self, factor: float | Tensor) -> None:
        """Multiply all gradients."""
        for buffer in self.buffers:
            buffer.mul_(factor)

    @torch.no_grad()
    def _arrived(self, param: Parameter, from_layer: bool) -> None:
        """Record that a gradient of ``param`` was computed by a backward or by a layer's deferred computation."""
        slot = self._slots.get(param)
        if slot is None:
            # The gradient belongs to a copy of the layer.
            return
        bucket = slot.bucket
        if bucket.pending is not None:
            raise ConfigError(
                f"a gradient of {slot.name} came when its bucket had been reduced already; run all backward passes of "
                "a step but the last inside no_sync(), and end the step with finish (finish_grad_sync)"
            )
        self._take_in(param, slot)
        if not (self.overlap and self._synchronises) or slot.comes_late:
            return
        waits = slot.comes_from_layer or any(layer.delayed_weight is param for layer in self._borrowing)
        if waits != from_layer:
            return
        bucket.arrived.add(param)
        while self._num_started < len(self.buckets):
            following = self.buckets[self._num_started]
            if len(following.arrived) < len(following.params):
                return
            self._start_next()

    def _take_in(self, param: Parameter, slot: _Slot) -> None:
        """Add the ``grad`` of autograd to the view."""
        grad = param.grad
        if grad is slot.view:
            return
        if slot.is_attached:
            # Code that removed the view from ``grad`` wants the gradient cleared.
            if getattr(param, "grad_added_to_main_grad", False):
                raise ConfigError(
                    f"a layer has added the gradient of {slot.name} to main_grad, which still held the step before; "
                    "with gradient_accumulation_fusion call zero_ (zero_grad_buffer) at the start of every step"
                )
            if grad is None:
                slot.view.zero_()
            else:
                slot.view.copy_(grad)
        elif grad is not None:
            slot.view.add_(grad)
        self._attach(param, slot)

    @staticmethod
    def _attach(param: Parameter, slot: _Slot) -> None:
        slot.is_attached = slot.view.dtype == param.dtype
        param.grad = slot.view if slot.is_attached else None

    def _start_next(self) -> None:
        if self._num_started == 0 and self.before_reducing is not None:
            self.before_reducing()
        bucket = self.buckets[self._num_started]
        with torch.no_grad():
            for param in bucket.params:
                self._take_in(param, self._slots[param])
            if self.average and self.group.size() > 1:
                # Of experts too: they saw the tokens of all data-parallel ranks.
                bucket.data.mul_(1 / self.group.size())
            reduce = reduce_scatter_async if bucket.is_scattered else all_reduce_async
            if bucket.group is self.group:
                bucket.pending = reduce(bucket.data, group=self.group, may_overwrite=True)
            else:
                # Copies of experts are on other ranks.
                bucket.pending = reduce(bucket.data, group=bucket.group, may_overwrite=True)
        self._num_started += 1

    def _wait(self) -> None:
        for bucket in self.buckets:
            bucket.wait()
        self._num_started = 0
