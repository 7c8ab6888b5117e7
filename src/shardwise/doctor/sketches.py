"""Sketches of tensors, which can be merged over ranks and compared without the tensors.

A small tensor is kept whole. Of a large one are kept a slice of every 2nd, 4th... index of its long dimensions, and for
each dimension the sums over all other dimensions. Both can be merged: the shards of a dimension are concatenated, and
partial sums are added. The sums of a dimension are added where another dimension is split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

# A tensor of at most this many elements is kept whole if nothing else is said; a slice has at most as many. Elements
# count, not bytes, so that runs of two dtypes keep the same.
FEW_ELEMENTS = 1 << 12
_SLICE = "slice"
# Of fewer elements none is left out.
_MANY = 16


@dataclass(frozen=True)
class Sketch:
    """A part of a tensor, and its sums.

    The view ``"slice"`` has the indices that are multiples of ``strides``, powers of two; there is none if shards begin
    elsewhere. The views ``"0"``, ``"1"``... have the sums over all dimensions but one, which have size 1. A whole
    tensor has ``"slice"`` alone.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    views: dict[str, Tensor]

    @classmethod
    def of(cls, tensor: Tensor, *, most_elements: int = FEW_ELEMENTS) -> Sketch:
        """Make a sketch, which has its own memory on the tensor's device; up to ``most_elements`` are kept whole."""
        tensor, shape = tensor.detach(), tuple(tensor.shape)
        if tensor.numel() <= most_elements:
            return cls(shape, tensor.dtype, (1,) * len(shape), {_SLICE: tensor.clone()})
        strides = _strides(shape)
        sketch = cls(shape, tensor.dtype, (1,) * len(shape), {_SLICE: tensor}).reduced(strides)
        if sketch.views[_SLICE].numel() > FEW_ELEMENTS:
            del sketch.views[_SLICE]
        return sketch

    @property
    def slice(self) -> Tensor | None:
        """The view ``"slice"``, if there is one."""
        return self.views.get(_SLICE)

    @property
    def is_whole(self) -> bool:
        """Whether all elements are kept."""
        return _SLICE in self.views and len(self.views) == 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all views."""
        return sum(view.numel() * view.itemsize for view in self.views.values())

    def reduced(self, strides: Sequence[int]) -> Sketch:
        """Return a sketch with these strides, which are multiples of this one's."""
        views = dict(self.views)
        if _SLICE in views:
            whole = views.pop(_SLICE)
            if self.is_whole:
                for dim in range(len(self.shape)):
                    others = [other for other in range(len(self.shape)) if other != dim]
                    views[str(dim)] = whole.sum(others, keepdim=True, dtype=torch.float64) if others else whole.double()
            steps = [slice(None, None, new // old) for new, old in zip(strides, self.strides, strict=True)]
            views[_SLICE] = whole[tuple(steps)].clone() if steps else whole.clone()
        return Sketch(self.shape, self.dtype, tuple(strides), views)

    def doubled(self) -> Sketch:
        """Return the sketch with views in fp64, on the CPU."""
        return replace(self, views={name: view.to("cpu", torch.float64) for name, view in self.views.items()})

    def scaled(self, factor: float) -> Sketch:
        """Return the sketch of the tensor times a factor."""
        return replace(self, views={name: view * factor for name, view in self.views.items()})

    def transposed(self) -> Sketch:
        """Return the sketch of the tensor with its first two dimensions swapped."""
        swapped = {"0": "1", "1": "0"}
        views = {swapped.get(name, name): view.transpose(0, 1) for name, view in self.views.items()}
        one, two, *rest = self.shape
        strides = (self.strides[1], self.strides[0], *self.strides[2:])
        return Sketch((two, one, *rest), self.dtype, strides, views)

    def count(self, name: str) -> int:
        """Return the number of elements of the tensor that one number of the view sums."""
        return 1 if name == _SLICE else math.prod(self.shape) // max(self.shape[int(name)], 1)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return powers of two that divide the sizes, and leave few elements if that is possible."""
    strides = [1] * len(shape)
    while math.prod(size // stride for size, stride in zip(shape, strides, strict=True)) > FEW_ELEMENTS:
        dims = [dim for dim, size in enumerate(shape) if size % (2 * strides[dim]) == 0]
        if not dims:
            break
        longest = max(dims, key=lambda dim: shape[dim] // strides[dim])
        strides[longest] *= 2
    return tuple(strides)


def alike(sketches: Sequence[Sketch]) -> list[Sketch]:
    """Return the sketches in fp64 with one set of strides for each number of dimensions, to merge and compare them."""
    doubled = [sketch.doubled() for sketch in sketches]
    if all(sketch.is_whole for sketch in doubled):
        return doubled
    strides: dict[int, list[int]] = {}
    for sketch in doubled:
        if not sketch.is_whole:
            own = strides.setdefault(len(sketch.shape), [1] * len(sketch.shape))
            strides[len(own)] = list(map(max, own, sketch.strides))
    return [
        sketch.reduced(strides[len(sketch.shape)]) if len(sketch.shape) in strides else sketch for sketch in doubled
    ]


def concatenated(sketches: Sequence[Sketch], dim: int) -> Sketch:
    """Merge shards along a dimension."""
    first = sketches[0]
    shape = list(first.shape)
    shape[dim] = sum(sketch.shape[dim] for sketch in sketches)
    views = {}
    for name in first.views:
        if not all(name in sketch.views for sketch in sketches):
            continue
        parts = [sketch.views[name] for sketch in sketches]
        if name == _SLICE:
            if all(sketch.shape[dim] % first.strides[dim] == 0 for sketch in sketches[:-1]):
                views[name] = torch.cat(parts, dim)
        elif int(name) == dim:
            views[name] = torch.cat(parts, dim)
        elif all(part.shape == parts[0].shape for part in parts):
            views[name] = torch.stack(parts).sum(0)
    return Sketch(tuple(shape), first.dtype, first.strides, views)


def added(sketches: Sequence[Sketch]) -> Sketch:
    """Merge partial sums."""
    first = sketches[0]
    common = [name for name in first.views if all(name in sketch.views for sketch in sketches)]
    return replace(first, views={name: torch.stack([each.views[name] for each in sketches]).sum(0) for name in common})


def placed(
    sketches: Sequence[Sketch], dim: int, intervals: Sequence[Sequence[Sequence[int]]], *, sums: bool = False
) -> list[Sketch]:
    """Merge shards that consist of intervals ``[start, stop]`` of a dimension, by the intervals of each rank.

    Overlapping copies give several results; with ``sums`` they are partial sums, which are added.
    """
    cuts = sorted({edge for own in intervals for interval in own for edge in interval})
    pieces: dict[int, list[Sketch]] = {}
    for sketch, own in zip(sketches, intervals, strict=True):
        begin = 0
        for start, stop in own:
            edges = [edge for edge in cuts if start <= edge <= stop]
            for low, high in pairwise(edges):
                pieces.setdefault(low, []).append(_cut(sketch, dim, begin, high - low))
                begin += high - low
    order = sorted(pieces)
    if not order:
        # Of an empty dimension.
        return [concatenated(sketches, dim)]
    if sums:
        return [concatenated([added(pieces[low]) for low in order], dim)]
    copies = max(map(len, pieces.values()))
    chosen = [[pieces[low][min(copy, len(pieces[low]) - 1)] for low in order] for copy in range(copies)]
    return [concatenated(each, dim) for each in chosen]


def _cut(sketch: Sketch, dim: int, start: int, length: int) -> Sketch:
    shape, stride = list(sketch.shape), sketch.strides[dim]
    is_all = start == 0 and length == shape[dim]
    shape[dim] = length
    views = {}
    for name, view in sketch.views.items():
        if is_all:
            views[name] = view
        elif name != _SLICE and int(name) == dim:
            views[name] = view.narrow(dim, start, length)
        elif name == _SLICE and start % stride == 0 and length % stride == 0:
            views[name] = view.narrow(dim, start // stride, length // stride)
    return Sketch(tuple(shape), sketch.dtype, sketch.strides, views)


def distance(one: Sketch, other: Sketch, *, left_out: float = 0.0) -> dict[str, float]:
    """Return the root mean square of the difference of each view; infinite where one has NaN and the other has not.

    ``left_out`` is a share of the elements, those that differ most, that do not count; sums then do not count either.
    """
    found = {}
    for name, view in one.views.items():
        if name not in other.views:
            continue
        if not view.numel():
            found[name] = 0.0
            continue
        difference = (view - other.views[name]).square()
        same = (view == other.views[name]) | (view.isnan() & other.views[name].isnan())
        difference = difference.masked_fill(same, 0.0).flatten()
        if left_out and name == _SLICE and difference.numel() >= _MANY:
            difference = difference.sort().values[: -(1 + int(left_out * difference.numel()))]
        elif left_out and _SLICE in one.views and _SLICE in other.views and name != _SLICE:
            continue
        mean = float(difference.mean())
        found[name] = math.inf if math.isnan(mean) else math.sqrt(mean)
    return found


def rms(sketch: Sketch) -> dict[str, float]:
    """Return the root mean square of each view's finite numbers."""
    found = {}
    for name, view in sketch.views.items():
        finite = view[view.isfinite()]
        found[name] = math.sqrt(float(finite.square().mean())) if finite.numel() else 0.0
    return found
