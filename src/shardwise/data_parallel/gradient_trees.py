"""Gradients whose bits do not depend on how many data-parallel ranks share the samples.

A step's micro-batches, of one size at every layout, are the leaves of one binary tree. A rank has a run of them, which
is a subtree, and sums it as its gradients come, with a partial sum kept for each level; the roots of the ranks'
subtrees are summed between the ranks (``communication.trees``). Where the number of micro-batches is no power of two,
the leaves are runs of as many as its odd factor says, summed one after the other.

A weight that is used twice, as embedding and as output layer, has a tree for each use, and their sum at the end: on
different pipeline stages the two are summed apart as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.communication.collectives import all_reduce
from shardwise.communication.trees import TreeCounter
from shardwise.errors import ConfigError

# Gradients travel in runs of about this many elements.
_BUCKET_ELEMENTS = 1 << 23


class GradientTrees:
    """The gradients of a model, summed by a tree over a step's micro-batches and the data-parallel ranks.

    After each backward a parameter's ``grad`` is taken away. ``finish()``, once a step, leaves the sum in ``grad``, or
    in ``main_grad`` where it is of another dtype than the parameter.

    Args:
        model: the module whose trained parameters it is, or a pipeline stage's chunks.
        group: the ranks that see different samples; it sums over parts (``communication.trees.sum_in_parts``).
        dtype: of the sums; each parameter's own if None.

    Raises:
        ConfigError: in ``finish``, a parameter got a gradient from some micro-batches only.
    """

    def __init__(
        self, model: nn.Module | Sequence[nn.Module], *, group: ProcessGroup, dtype: torch.dtype | None = None
    ) -> None:
        self.group = group
        self.dtype = dtype
        self._run = 1
        modules = [model] if isinstance(model, nn.Module) else list(model)
        self._sums: dict[tuple[Parameter, int], _Sum] = {}
        self._names: dict[Parameter, str] = {}
        for chunk in modules:
            for name, param in chunk.named_parameters():
                if param.requires_grad and param not in self._names:
                    self._names[param] = name
                    param.register_post_accumulate_grad_hook(self._take)
            for module in chunk.modules():
                if getattr(module, "delays_weight_gradients", False):
                    layer: Any = module
                    # What has no weight of its own is an output layer that is given the embedding's.
                    layer.register_weight_gradient_hook(partial(self._take, use=int(layer.weight is None)))
        for param in self._names:
            tensor: Any = param
            # Models hand the output layer's part of a tied weight's gradient here.
            tensor.take_output_gradient = self._take_output_gradient

    def begin(self, num_micro_batches: int) -> None:
        """Forget all gradients; this rank has so many micro-batches in the step to come, and others as many."""
        self._run = num_micro_batches // (num_micro_batches & -num_micro_batches)
        self._sums.clear()
        for param in self._names:
            tensor: Any = param
            param.grad = tensor.main_grad = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing: sums over ranks wait for ``finish`` anyway."""
        yield

    @torch.no_grad()
    def finish(self) -> None:
        """Sum over the ranks; gradients are then those of all ranks' micro-batches."""
        counts = {(self._names[param], use): each.count for (param, use), each in self._sums.items()}
        if len(set(counts.values())) > 1:
            most = max(counts.values())
            name, count = next((name, count) for (name, _), count in counts.items() if count != most)
            raise ConfigError(
                f"exact: {name} got a gradient from {count} of {most} micro-batches; it needs one from each"
            )
        keys = [key for param in self._names for use in (0, 1) if (key := (param, use)) in self._sums]
        totals = dict(zip(keys, self._over_ranks([self._sums.pop(key).total() for key in keys]), strict=True))
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
            self._add(param, use, grad)

    def _take_output_gradient(self, param: Parameter, grad: Tensor) -> None:
        self._add(param, 1, grad)

    @torch.no_grad()
    def _add(self, param: Parameter, use: int, grad: Tensor) -> None:
        summed = self._sums.setdefault((param, use), _Sum(self._run))
        summed.add(grad if self.dtype is None else grad.to(self.dtype))

    def _over_ranks(self, totals: Sequence[Tensor]) -> list[Tensor]:
        if self.group.size() == 1:
            return list(totals)
        summed: list[Tensor] = []
        for bucket in _buckets(totals):
            flat = all_reduce(torch.cat([total.flatten() for total in bucket]), group=self.group, may_overwrite=True)
            sizes = [total.numel() for total in bucket]
            summed += [part.view(total.shape) for part, total in zip(flat.split(sizes), bucket, strict=True)]
        return summed


class _Sum:
    """A tree whose leaves are sums of ``run`` terms that follow one another."""

    __slots__ = ("_leaf", "_run", "_tree", "count")

    def __init__(self, run: int) -> None:
        self._run = run
        self._tree = TreeCounter()
        self._leaf: Tensor | None = None
        self.count = 0

    def add(self, term: Tensor) -> None:
        self.count += 1
        self._leaf = term if self._leaf is None else self._leaf + term
        if self.count % self._run == 0:
            self._tree.add(self._leaf)
            self._leaf = None

    def total(self) -> Tensor:
        return self._tree.total()


def _buckets(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Runs of tensors of one dtype, each of about ``_BUCKET_ELEMENTS``."""
    bucket: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        if bucket and (elements + tensor.numel() > _BUCKET_ELEMENTS or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, elements = [], 0
        bucket.append(tensor)
        elements += tensor.numel()
    if bucket:
        yield bucket
