"""The memory of a rehearsed step over time: storages that fake tensors have, as they come and go."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry

from shardwise.core.communication.accounting import CollectiveCounter

_aten: Any = torch.ops.aten
_c10d: Any = torch.ops.c10d


class Transfer(NamedTuple):
    """A collective or a message of a rank, with the bytes that it contributes.

    ``axis`` is ``"tp"``, ``"pp"``, ``"dp"``, ``"embd"`` (the stages of a tied weight), ``"cp"``, ``"ep"`` or
    ``"expert_dp"``; ``name`` that of the collective, or ``"send"``.
    """

    axis: str
    name: str
    num_bytes: int


class PhaseLabel(NamedTuple):
    """A part of a step on one micro-batch, such as ``"forward"`` of a chunk.
     ``span`` is 0 for what comes before the first span of layers (``spans_of``), then the number of the span from 1 in
    the order of the action, and one more for what comes after the last. None for the whole action.
    """

    action: str
    micro_batch: int = 0
    chunk: int = 0
    span: int | None = None


@dataclass(frozen=True)
class Segment:
    """A part of a step: its highest bytes and those at its end, above those at its start, and its operations.

    ``at`` is the ``place`` of the part in which the peak is reached, its own if None; ``parts`` the segments that it
    consists of, if they are known.
    """

    place: PhaseLabel
    peak: int = 0
    net: int = 0
    flops: int = 0
    sent: Counter[Transfer] = field(default_factory=Counter)
    at: PhaseLabel | None = None
    parts: tuple[Segment, ...] = ()

    def then(self, other: Segment) -> Segment:
        """This segment, followed by another."""
        later = self.net + other.peak
        return Segment(
            self.place,
            max(self.peak, later),
            self.net + other.net,
            self.flops + other.flops,
            self.sent + other.sent,
            self.at or self.place if self.peak >= later else other.at or other.place,
        )

    def without(self, *axes: str) -> Segment:
        """This segment without the collectives of some axes."""
        return replace(self, sent=Counter({each: count for each, count in self.sent.items() if each.axis not in axes}))

    def scaled(self, axis: str, name: str, factor: float) -> Segment:
        """This segment with ``factor`` times the bytes of a collective of an axis."""
        sent: Counter[Transfer] = Counter()
        for each, count in self.sent.items():
            is_meant = (each.axis, each.name) == (axis, name)
            sent[each._replace(num_bytes=round(each.num_bytes * factor)) if is_meant else each] += count
        return replace(self, sent=sent)

    def times(self, number: int) -> Segment:
        """This segment ``number`` times in a row."""
        if number == 0:
            return Segment(self.place)
        sent = Counter({each: count * number for each, count in self.sent.items()})
        peak = self.peak + max(0, (number - 1) * self.net)
        return Segment(self.place, peak, number * self.net, number * self.flops, sent, self.at)


def joined(segments: Sequence[Segment], place: PhaseLabel) -> Segment:
    """Segments in a row as one."""
    total = Segment(place, at=segments[0].at or segments[0].place if segments else None)
    for segment in segments:
        total = total.then(segment)
    return total


class Timeline(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside the block return, the collectives and the operations.

    Enter it inside ``FakeTensorMode``. A number that the host reads is 1.0, or 0 if it is an integer; tensors that it
    compares are equal, and elements that it looks for are everywhere. ``axes`` has, by name of a process group, the
    name of its axis; ``live`` the bytes of the storages that exist; ``segments`` each part of a step, cut by ``mark``.
    """

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.live = 0
        self.segments: list[Segment] = []
        self._axes = axes
        self._sizes: dict[int, int] = {}
        self._counter = CollectiveCounter()
        self._label: PhaseLabel | None = None
        self._begin(None)

    def __enter__(self) -> Timeline:
        self._counter.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._counter.__exit__(*exception)

    def mark(self, label: PhaseLabel | None) -> None:
        """End the current segment and begin one at this place; None begins a part that is not recorded."""
        if self._label is not None:
            sent = Counter(self._sent)
            sent += Counter(
                Transfer(self._axes.get(each.group, ""), each.name, each.num_bytes) for each in self._counter.launches
            )
            peak, net = self._peak - self._start, self.live - self._start
            self.segments.append(Segment(self._label, peak, net, self._flops, sent))
        self._begin(label)

    def _begin(self, label: PhaseLabel | None) -> None:
        self._label = label
        self._start = self._peak = self.live
        self._flops = 0
        self._sent: list[Transfer] = []
        self._counter.launches.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            # AdamW's number of steps, for one, must not be 0.
            return False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 0
        if func is _aten.equal.default:
            return True
        if func is _aten.nonzero.default:
            return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        if func is _c10d.send.default:
            self._sent += [Transfer("pp", "send", tensor.nbytes) for tensor in args[0]]
        # PyTorch's fake form takes bf16 only.
        result = _grouped_product(*args) if func is _aten._grouped_mm.default else func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._add(result)
        elif isinstance(result, (list, tuple)):
            for each in result:
                if isinstance(each, Tensor):
                    self._add(each)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            # Options such as the dtype of a result do not count; the formulas of convolutions have all arguments.
            is_convolution = "convolution" in func.name()
            counted = args if is_convolution else (arg for arg in args if isinstance(arg, Tensor))
            self.count_flops(count(*counted, out_val=result))
        elif func is _aten._grouped_mm.default:
            self.count_flops(2 * args[0].numel() * args[1].size(-1))
        elif func.namespace == "mkldnn":
            # oneDNN's linear, which the registry lacks (``kernels.products``).
            self.count_flops(2 * result.numel() * args[0].size(-1))
        elif func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.count_flops(4 * args[0].numel() * args[1].size(2))
        elif func is _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            # Of five products, one repeats the forward's; the gradient of the output comes first.
            self.count_flops(10 * args[1].numel() * args[2].size(2))
        return result

    def _add(self, tensor: Tensor) -> None:
        # A subclass around other tensors has a storage without memory.
        if not is_traceable_wrapper_subclass(tensor):
            self.count(tensor.untyped_storage())

    def count_flops(self, number: int) -> None:
        """Add floating-point operations to the current segment."""
        self._flops += number

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or its new size."""
        key = storage._cdata
        size = storage.nbytes()
        held = self._sizes.get(key)
        if held is None:
            weakref.finalize(storage, self._remove, key)
        elif held == size:
            return
        self._sizes[key] = size
        self.live += size - (held or 0)
        self._peak = max(self._peak, self.live)

    def _remove(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _grouped_product(input_: Tensor, weights: Tensor, ends: Tensor, *_: Any) -> Tensor:
    """The result of products of runs of rows with a matrix each, or of the gradients of these matrices."""
    runs = [ends.size(0)] * (weights.dim() == 2)
    return input_.new_empty(*runs, input_.size(0), weights.size(-1))


def read_at_once(tensor: FakeTensor) -> Any:
    """``tolist`` of a tensor without values: zeros."""
    return np.zeros(tuple(tensor.shape), {torch.bool: bool, torch.int64: int}.get(tensor.dtype, float)).tolist()


def address(tensor: FakeTensor) -> int:
    """``data_ptr`` of a tensor without memory: a number that tells which views begin at the same element."""
    return int(tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize)
