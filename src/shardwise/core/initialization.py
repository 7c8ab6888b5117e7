"""One initialisation for every layout: a rank's slice is that of the whole parameter.

The whole weight is the same bit for bit, whatever the number of ranks, as long as every rank's default generator is in
the same state; and the generator ends in the same state too, so that the next parameter agrees as well. Four kinds of
methods:

* ``CounterNormal``, with which models start: a rank computes its slice and nothing else, and its bits are the same on
  every device.
* PyTorch's normal, uniform, Xavier and Kaiming methods and constants, by themselves or as ``functools.partial``: drawn
  a bounded block of rows at a time, so that no rank ever holds more than its slice and one block. On a CPU the values
  are those of ``init_method(torch.empty(global_shape))``.
* The truncated normal, which draws rejected numbers again: each block by itself, at every number of ranks. The values
  are PyTorch's as long as the parameter is one block.
* An arbitrary method is given the whole parameter.

What depends on the parameter's shape (the fans of Xavier and Kaiming) is taken from the whole one.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import init

from shardwise.core.philox import fill_normal_
from shardwise.core.sharding import Interval, ParamLayout

InitMethod = Callable[[Tensor], object]

_BLOCK_ELEMENTS = 1 << 20
# PyTorch's CPU normal fills 16 values at a time: a block that is a multiple of 16 elements continues the same stream.
_ROW_MULTIPLE = 16
_WITHOUT_FP64 = ("mps",)


@dataclass(frozen=True)
class Normal:
    """Fill with independent normal numbers."""

    std: float
    mean: float = 0.0

    def __call__(self, tensor: Tensor) -> Tensor:
        return init.normal_(tensor, mean=self.mean, std=self.std)


@dataclass(frozen=True)
class CounterNormal:
    """Fill with independent normal numbers, each a function of its place in the parameter and of a key.

    The key is one number of the CPU's default generator, on every device and however large the parameter. See
    ``shardwise.core.philox``.
    """

    std: float
    mean: float = 0.0

    def __call__(self, tensor: Tensor) -> Tensor:
        return initialize_shard_(tensor, ParamLayout.replicated(tensor.shape, 1), 0, self)

    def fill_(self, shard: Tensor, layout: ParamLayout, rank: int) -> None:
        """Fill what ``rank`` holds of a parameter: a matrix of its last dimension, where it has several before."""
        shape, key = layout.global_shape or (1,), draw_seed()
        target = shard if shard.device.type not in _WITHOUT_FP64 else torch.empty_like(shard, device="cpu")
        rows = torch.arange(math.prod(shape[:-1]), device=target.device)
        columns: tuple[Interval, ...] = ((0, shape[-1]),)
        if layout.dim == len(shape) - 1:
            columns = layout.intervals[rank]
        elif layout.dim is not None:
            rows = replace(layout, global_shape=shape[:-1]).take(rows.view(shape[:-1]), rank).flatten()
        matrix = target.view(len(rows), sum(stop - start for start, stop in columns))
        sizes = [stop - start for start, stop in columns]
        for (start, _), part in zip(columns, matrix.split(sizes, dim=1), strict=True):
            fill_normal_(part, key=key, rows=rows, column=start, mean=self.mean, std=self.std)
        if target is not shard:
            shard.copy_(target)


def init_method_normal(sigma: float) -> Normal:
    """Normal with standard deviation ``sigma``."""
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Normal:
    """Normal with standard deviation ``sigma / sqrt(multiplier * num_layers)``, for weights that write to the residual.

    Source: Radford et al. 2019, section 2.3.
    """
    return Normal(sigma / math.sqrt(multiplier * num_layers))


@dataclass(frozen=True)
class _BlockMethod:
    """How to fill one block of a parameter.

    Attributes:
        fill: fills the block in place.
        one_stream: whether consecutive blocks, on a CPU, get the numbers that one fill of all would get.
    """

    fill: InitMethod
    one_stream: bool = True


# Each number depends on its place in the generator's stream alone.
_ELEMENTWISE: tuple[Any, ...] = (init.normal_, init.uniform_, init.constant_, init.zeros_, init.ones_)


def _block_method(init_method: InitMethod, shape: tuple[int, ...]) -> _BlockMethod | None:
    """How ``init_method`` of a whole parameter of ``shape`` fills a block of it; None if that is not known."""
    if isinstance(init_method, Normal):
        return _BlockMethod(init_method)
    function: Any = init_method
    options: dict[str, Any] = {}
    if isinstance(init_method, functools.partial):
        if init_method.args:
            return None
        function, options = init_method.func, init_method.keywords
    if function in _ELEMENTWISE:
        return _BlockMethod(init_method)
    if function is init.trunc_normal_:
        return _BlockMethod(init_method, one_stream=False)
    std_of = {
        init.xavier_uniform_: _xavier_std,
        init.xavier_normal_: _xavier_std,
        init.kaiming_uniform_: _kaiming_std,
        init.kaiming_normal_: _kaiming_std,
    }.get(function)
    if std_of is None or len(shape) < 2 or 0 in shape:
        return None
    bound = inspect.signature(function).bind(None, **options)
    bound.apply_defaults()
    std, generator = std_of(shape, bound.arguments), bound.arguments["generator"]
    if function in (init.xavier_normal_, init.kaiming_normal_):
        return _BlockMethod(functools.partial(init.normal_, mean=0.0, std=std, generator=generator))
    limit = math.sqrt(3.0) * std
    return _BlockMethod(functools.partial(init.uniform_, a=-limit, b=limit, generator=generator))


def _fans(shape: tuple[int, ...]) -> tuple[int, int]:
    receptive_field = math.prod(shape[2:])
    return shape[1] * receptive_field, shape[0] * receptive_field


def _xavier_std(shape: tuple[int, ...], options: dict[str, Any]) -> float:
    gain: float = options["gain"]
    return gain * math.sqrt(2.0 / float(sum(_fans(shape))))


def _kaiming_std(shape: tuple[int, ...], options: dict[str, Any]) -> float:
    fan = _fans(shape)[("fan_in", "fan_out").index(options["mode"].lower())]
    gain: float = init.calculate_gain(options["nonlinearity"], options["a"])
    return gain / math.sqrt(fan)


def _blocks_continue_one_stream(device: torch.device) -> bool:
    # Elsewhere a number depends on how many are drawn with it, so that one rank must draw the same blocks as several.
    return device.type == "cpu"


@torch.no_grad()
def initialize_shard_(
    shard: Tensor, layout: ParamLayout, rank: int, init_method: InitMethod, *, on_cpu: bool = False
) -> Tensor:
    """Fill ``shard`` with this rank's slice of ``init_method`` applied to the whole parameter.

    Args:
        shard: this rank's part, of shape ``layout.local_shape(rank)``; overwritten. A meta tensor stays as it is, and
            nothing is drawn.
        layout: where the part lies in the whole.
        rank: this rank in the tensor-parallel group.
        init_method: fills a tensor in place.
        on_cpu: draw on the CPU in fp32 (fp64 for an fp64 shard), whatever the shard's device and dtype, and copy: the
            same weights, up to the shard's rounding, on every device. ``CounterNormal`` gives these anyway.

    Returns:
        ``shard``.
    """
    if shard.is_meta:
        return shard
    if isinstance(init_method, CounterNormal):
        init_method.fill_(shard, layout, rank)
        return shard
    staging = shard
    if on_cpu:
        staging = torch.empty(0, dtype=torch.promote_types(shard.dtype, torch.float32), device="cpu")
    method = _block_method(init_method, layout.global_shape)
    direct = staging.device == shard.device and staging.dtype == shard.dtype
    one_stream = method is not None and method.one_stream and _blocks_continue_one_stream(staging.device)
    if direct and (layout.dim is None or (layout.world_size == 1 and one_stream)):
        init_method(shard)
    elif method is None or layout.dim is None:
        whole = staging.new_empty(layout.global_shape)
        init_method(whole)
        shard.copy_(layout.take(whole, rank))
    elif layout.dim == 0:
        _fill_rows(shard, layout, rank, _blocks(staging, layout, method))
    else:
        _fill_columns(shard, layout, rank, _blocks(staging, layout, method))
    return shard


def _blocks(staging: Tensor, layout: ParamLayout, method: _BlockMethod) -> Iterator[tuple[int, int, Tensor]]:
    """Each block of rows of the whole parameter, filled: first row, last row (excluded), values."""
    rows, row_shape = layout.global_shape[0], layout.global_shape[1:]
    for start, stop in _row_blocks(rows, math.prod(row_shape)):
        block = staging.new_empty((stop - start, *row_shape))
        method.fill(block)
        yield start, stop, block


def _row_blocks(num_rows: int, row_elements: int) -> list[tuple[int, int]]:
    """Runs of rows of about a million elements, each run but the last a multiple of 16 rows."""
    rows = max(_ROW_MULTIPLE, _BLOCK_ELEMENTS // max(row_elements, 1) // _ROW_MULTIPLE * _ROW_MULTIPLE)
    starts = list(range(0, num_rows, rows)) or [0]
    if len(starts) > 1 and (num_rows - starts[-1]) * row_elements < _ROW_MULTIPLE:
        # The last 16 values of a fill depend on each other; a shorter tail would be drawn by another rule.
        starts.pop()
    return list(zip(starts, [*starts[1:], num_rows], strict=True))


def _fill_rows(shard: Tensor, layout: ParamLayout, rank: int, blocks: Iterator[tuple[int, int, Tensor]]) -> None:
    for start, stop, block in blocks:
        offset = 0
        for first, last in layout.intervals[rank]:
            low, high = max(first, start), min(last, stop)
            if low < high:
                where = offset + low - first
                shard[where : where + high - low].copy_(block[low - start : high - start])
            offset += last - first


def _fill_columns(shard: Tensor, layout: ParamLayout, rank: int, blocks: Iterator[tuple[int, int, Tensor]]) -> None:
    assert layout.dim is not None
    for start, stop, block in blocks:
        parts = [block.narrow(layout.dim, first, last - first) for first, last in layout.intervals[rank]]
        shard[start:stop].copy_(torch.cat(parts, layout.dim))


def draw_seed() -> int:
    """A seed from the CPU's default generator, whatever PyTorch's default device is: one number, of 63 bits."""
    seed = torch.empty((), dtype=torch.int64, device="cpu").random_()
    # Fake tensors have no values, and nothing that is made of them has.
    return 0 if isinstance(seed, FakeTensor) else int(seed)


@contextmanager
def part_seeded(seed: int | None, *part: object) -> Iterator[None]:
    """Seed the default generators by ``seed`` and the name of a part of the model; give them back their states after.

    So a part starts from the same values whichever other parts this rank has, as on a pipeline stage. Nothing happens
    if ``seed`` is None.
    """
    if seed is None:
        yield
        return
    own_seed = int.from_bytes(hashlib.sha256(repr((seed, *part)).encode()).digest()[:8], "big") >> 1
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        # Not torch.manual_seed, which would leave its seed to a CUDA that is initialised later.
        torch.default_generator.manual_seed(own_seed)
        if devices:
            torch.cuda.manual_seed(own_seed)
        yield
