"""Gradients whose bits do not depend on the number of data-parallel ranks.

A step's micro-batches, which have the same size at every layout, are the leaves of a binary tree. Each rank runs
consecutive micro-batches, which form a subtree. It sums their gradients as they are computed, and keeps one partial sum
per level. The roots of the subtrees are summed over the ranks (``core.communication.trees``). If the number of
micro-batches is not a power of two, each leaf is a sequential sum over as many micro-batches as its odd factor.

A weight that is both embedding and output layer has a tree for each use, and the two sums are added at the end. Stages
of a pipeline sum the two uses separately too.

An expert has a tree for each data-parallel rank that sends it tokens, since that rank's micro-batches are a subtree.
Their sums are the next leaves of the tree over ranks, which continues over the ranks that hold the same expert.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_reduce, reduce_scatter
from shardwise.core.communication.trees import TreeCounter, deterministic_sum, exact_total, tree_sum
from shardwise.core.errors import ConfigError
from shardwise.exact.context_terms import whole_losses
from shardwise.training.gradients.base import (
    DEFAULT_BUCKET_SIZE,
    Bucket,
    Gradients,
    Total,
    all_reduced,
    make_buckets,
    trained_by_dtype,
)


class ExactTotal(Total):
    """A ``Total`` of the loss that is rounded once, so that it does not depend on how micro-batches are distributed.

    Args:
        zeros: as for ``Total``.
        counts: whether this rank's values are counted, and not those of another rank that has the same values.
    """

    def __init__(self, zeros: Tensor, *, counts: bool = True) -> None:
        super().__init__(zeros)
        self._losses: list[Tensor] = []
        self._counts = counts

    def add(self, values: Tensor) -> None:
        if self._counts:
            self._losses.append(values.to(self.tensor.dtype))

    def over(self, groups: Sequence[ProcessGroup]) -> Tensor:
        losses: list[float] = torch.cat(self._losses).tolist() if self._losses else []
        return self.tensor.new_tensor([exact_total(losses, groups=groups, what="the losses")])


def _run_of(num_micro_batches: int) -> int:
    """Return the number of micro-batches of a leaf."""
    return num_micro_batches // (num_micro_batches & -num_micro_batches)


class GradientTrees(Gradients):
    """The gradients of a model, summed by a tree over a step's micro-batches and the data-parallel ranks.

    After each backward, ``grad`` is moved into the tree. ``finish()``, called once per step, writes the sum to
    ``grad``, or to ``main_grad`` if the sum has another dtype than the parameter.

    Args:
        model: the module with the trained parameters, or a pipeline stage's chunks.
        group: the ranks that see different samples; it sums over parts (``core.communication.trees.sum_in_parts``).
        dtype: dtype of the sums; each parameter's own if None.
        context: the ranks of ``group`` that share the positions of a sample, or None. Losses are summed over all
            positions on each, and gradients are those of ``exact.context_terms``.
        scatter, whole, other_groups: as for ``GradientBuffers``; ``main_grad`` is a view of the bucket. Other groups
            sum over parts, too.

    Attributes:
        buckets: buckets in the order of reduction, with ``scatter`` only.
        before_reducing: callback before the first bucket is reduced (``ParameterBuffers``); or None.

    Raises:
        ConfigError: from ``finish``, if a parameter got a gradient from only some micro-batches, or from none with
            ``scatter``.
    """

    seeds_micro_batches = True
    are_taken_in_backward = True

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        group: ProcessGroup,
        dtype: torch.dtype | None = None,
        context: ProcessGroup | None = None,
        scatter: bool = False,
        whole: Collection[Parameter] = (),
        other_groups: Mapping[Parameter, ProcessGroup] | None = None,
    ) -> None:
        self.group = group
        self._others = other_groups or {}
        self.dtype = dtype
        self.context = context
        self.total = partial(ExactTotal, counts=context is None or context.rank() == 0)
        self.buckets: list[Bucket] = []
        self.before_reducing: Callable[[], None] | None = None
        self._run = 1
        modules = [model] if isinstance(model, nn.Module) else list(model)
        # By parameter, use, and number of the rank whose tokens the gradients are of.
        self._sums: dict[tuple[Parameter, int, int], _Sum] = {}
        self._names: dict[Parameter, str] = {}
        for chunk in modules:
            for name, param in chunk.named_parameters():
                if param.requires_grad and param not in self._names:
                    self._names[param] = name
                    param.register_post_accumulate_grad_hook(self._take)
            for module in chunk.modules():
                if getattr(module, "delays_weight_gradients", False):
                    layer: Any = module
                    # A layer without a weight is an output layer that receives the embedding's weight.
                    layer.register_weight_gradient_hook(partial(self._take, use=int(layer.weight is None)))
        for param in self._names:
            tensor: Any = param
            # Models pass the output layer's part of a tied weight's gradient to this hook.
            tensor.take_output_gradient = partial(self._add, use=1)
        for param in self._others:
            tensor = param
            tensor.take_gradient_of_source = partial(self._add, param)
        whole = set(whole)
        others = self._others
        for _, params in trained_by_dtype(modules, lambda each: (each in whole, others.get(each))) if scatter else ():
            of_dtype, first = [param for _, param in params], params[0][1]
            over, scatters = others.get(first, group), first not in whole
            self.buckets += make_buckets(of_dtype, dtype, "auto", group=over, is_scattered=scatters)[1]

    def sum_of_losses(self, losses: Tensor, dtype: torch.dtype | None) -> Tensor:
        if self.context is not None and self.context.size() > 1:
            losses = whole_losses(losses, group=self.context)
        return deterministic_sum(losses, dtype)

    def begin(self, num_micro_batches: int) -> None:
        self._run = _run_of(num_micro_batches)
        self.zero_()

    @staticmethod
    def num_sums(done: int, num_micro_batches: int) -> int:
        run = _run_of(num_micro_batches)
        return (done // run).bit_count() + (done % run > 0)

    def zero_(self) -> None:
        self._sums.clear()
        for param in self._names:
            tensor: Any = param
            param.grad = tensor.main_grad = None

    @torch.no_grad()
    def finish(self) -> None:
        counts = {(self._names[param], *more): each.count for (param, *more), each in self._sums.items()}
        if len(set(counts.values())) > 1:
            most = max(counts.values())
            name, count = next((name, count) for (name, *_), count in counts.items() if count != most)
            raise ConfigError(
                f"exact: {name} got a gradient from {count} of {most} micro-batches; it needs one from each"
            )
        if self.before_reducing is not None:
            self.before_reducing()
        for bucket in self.buckets:
            self._reduce_(bucket)
        if self.buckets:
            return
        totals: dict[tuple[Parameter, int], Tensor] = {}
        for group in dict.fromkeys([self.group, *self._others.values()]):
            of_group = {
                (param, use): self._own_total(param, use)
                for param in self._names
                for use in (0, 1)
                if self._others.get(param, self.group) is group and (param, use, 0) in self._sums
            }
            totals |= zip(of_group, _over_ranks(list(of_group.values()), group), strict=True)
        for param in self._names:
            own, as_output = totals.get((param, 0)), totals.get((param, 1))
            total = own if as_output is None else as_output if own is None else own.add_(as_output)
            if total is None:
                continue
            tensor: Any = param
            if total.dtype == param.dtype:
                param.grad = total
            else:
                tensor.main_grad = total

    def _take(self, param: Tensor, use: int = 0) -> None:
        assert isinstance(param, Parameter)
        grad, param.grad = param.grad, None
        if grad is not None:
            self._add(param, grad, use)

    @torch.no_grad()
    def _add(self, param: Parameter, grad: Tensor, use: int = 0, source: int = 0) -> None:
        summed = self._sums.setdefault((param, use, source), _Sum(self._run))
        summed.add(grad if self.dtype is None else grad.to(self.dtype))

    def _own_total(self, param: Parameter, use: int) -> Tensor:
        keys = itertools.takewhile(self._sums.__contains__, ((param, use, source) for source in itertools.count()))
        return tree_sum([self._sums.pop(key).total() for key in list(keys)], may_overwrite=True)

    def _reduce_(self, bucket: Bucket) -> None:
        """Sum a bucket over the ranks. Each element's owner gets the sum, or every rank does."""
        others: list[tuple[int, Tensor]] = []
        for index, param in enumerate(bucket.params):
            totals = [self._own_total(param, use) for use in (0, 1) if (param, use, 0) in self._sums]
            if not totals:
                raise ConfigError(
                    f"exact: {self._names[param]} got no gradient, and its optimizer's state is split over the "
                    "data-parallel ranks; freeze it, or leave zero out"
                )
            tensor: Any = param
            tensor.main_grad = bucket.view(index).copy_(totals[0])
            others += [(index, total.flatten()) for total in totals[1:]]
        target = bucket.own(bucket.data) if bucket.is_scattered else bucket.data
        reduce = reduce_scatter if bucket.is_scattered else all_reduce
        group = bucket.group
        target.copy_(reduce(bucket.data, group=group))
        for index, total in others:
            view = bucket.view(index).view(-1)
            if not bucket.is_scattered:
                view += all_reduce(total, group=group)
                continue
            intervals = bucket.intervals(index)
            low, high = intervals[group.rank()]
            view[low:high] += reduce_scatter(total, group=group, sizes=[stop - start for start, stop in intervals])


def _over_ranks(totals: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return list(totals)
    return [total for _, total in all_reduced(totals, group=group, most_elements=DEFAULT_BUCKET_SIZE)]


class _Sum:
    """A tree whose leaves are sums of ``run`` consecutive terms; the sums reuse the terms' memory."""

    __slots__ = ("_leaf", "_run", "_tree", "count")

    def __init__(self, run: int) -> None:
        self._run = run
        self._tree = TreeCounter(may_overwrite=True)
        self._leaf: Tensor | None = None
        self.count = 0

    def add(self, term: Tensor) -> None:
        self.count += 1
        self._leaf = term if self._leaf is None else self._leaf.add_(term)
        if self.count % self._run == 0:
            self._tree.add(self._leaf)
            self._leaf = None

    def total(self) -> Tensor:
        return self._tree.total()
