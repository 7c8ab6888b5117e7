"""Initialisation of a rank's shard as a slice of the whole parameter, which is the same at every number of ranks.

The whole parameter has the same bits at every number of ranks if the default generators of all ranks have the same
state. The generators also end in the same state, so the next parameter agrees as well. There are four kinds of methods:

* ``CounterNormal``, the models' default: a rank computes only its slice. The bits are the same on every device.
* PyTorch's normal, uniform, Xavier, Kaiming and constant methods, also as ``functools.partial``: a rank draws the
  parameter in blocks of rows, and never holds more than its slice and one block. On a CPU the values equal those of
  ``init_method(torch.empty(global_shape))``.
* The truncated normal, which redraws rejected numbers: a rank draws block by block, at every number of ranks. The
  values equal PyTorch's if the parameter is a single block.
* Any other method fills the whole parameter.

Xavier and Kaiming use the fans of the whole parameter.

``CounterNormal`` computes each number from a key and the number's position, so a rank can compute any part of a tensor.
The bits are the same on every device, however many numbers are computed at once. Philox uses only integers. The normal
numbers are computed from these by fp64 operations whose result IEEE 754 defines to the bit (addition, multiplication,
division, square root), one in each call because compilers fuse several. PyTorch's logarithm and sine are not used: they
differ between devices, and between the vectorized part of a tensor and its last elements.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox); Box and Muller 1958.
"""

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

from shardwise.core.sharding import Interval, ParamLayout

# 32-bit words per counter.
_WORDS = 4
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# Number of counters at a time. On a CPU the intermediate results of each thread stay in its cache.
_COUNTERS_PER_THREAD, _COUNTERS_ELSEWHERE = 1 << 14, 1 << 20

# Enough terms for an error of 1e-12.
_ATANH = [1 / (2 * k + 1) for k in range(8)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(7)]
_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6)]


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute four random words from each counter of four words, by Philox4x32-10.

    Words and counters are int64 with values from 0 to 2^32 - 1, whose shapes broadcast; the key has 64 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, key >> 32 & _MASK
    for _ in range(_ROUNDS):
        # Products of two words, modulo 2^64. Their low words need no mask before the end.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = ((p0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def fill_normal_(out: Tensor, *, key: int, rows: Tensor, column: int, mean: float = 0.0, std: float = 1.0) -> None:
    """Fill a part of a matrix with independent normal numbers.

    Counter ``(b, r)`` yields the numbers in row ``r`` and columns ``4 b`` to ``4 b + 3`` of the whole matrix: two pairs
    by Box and Muller. They are computed in fp64 and rounded at the end, through fp32 if ``out`` is narrower than fp32.

    Args:
        out: the part, ``[n, m]``, which may be a view; overwritten.
        key: 64-bit key of the matrix.
        rows: int64 ``[n]``, indices of the part's rows in the whole matrix; on the device of ``out``.
        column: index of the part's first column in the whole matrix.
    """
    num_rows, num_columns = out.shape
    first, last = column // _WORDS, -(-(column + num_columns) // _WORDS)
    on_cpu = out.device.type == "cpu"
    at_once = _COUNTERS_PER_THREAD * torch.get_num_threads() if on_cpu else _COUNTERS_ELSEWHERE
    width = max(1, min(at_once, last - first))
    height = max(1, at_once // width)
    for block in range(first, last, width):
        blocks = torch.arange(block, min(block + width, last), device=out.device)
        # The part's columns that these counters yield.
        start = block * _WORDS
        low, high = max(start, column), min(start + len(blocks) * _WORDS, column + num_columns)
        for row in range(0, num_rows, height):
            normals = _normals(key, rows[row : row + height, None], blocks).mul_(std).add_(mean)
            out[row : row + height, low - column : high - column].copy_(normals[:, low - start : high - start])


def _normals(key: int, rows: Tensor, blocks: Tensor) -> Tensor:
    """Compute the numbers of all counters: ``[n, 1]`` and ``[m]`` to ``[n, 4 m]``."""
    words = philox((blocks, rows & _MASK, rows >> 32, rows.new_zeros(())), key)
    normals = torch.empty((*words[0].shape, _WORDS), dtype=torch.float64, device=rows.device)
    for pair in range(0, _WORDS, 2):
        radius = _radius(words[pair])
        for place, coordinate in enumerate(_direction(words[pair + 1])):
            torch.mul(coordinate, radius, out=normals[..., pair + place])
    return normals.flatten(1)


def _radius(words: Tensor) -> Tensor:
    """Compute ``sqrt(-2 log u)`` for ``u = (word + 0.5) / 2^32``."""
    bits = words.to(torch.float64).add_(0.5).view(torch.int64)
    # u = 2^e m with m from 1 to 2, and log m = log sqrt 2 + 2 atanh((m - sqrt 2) / (m + sqrt 2)).
    e = (bits >> 52).to(torch.float64).sub_(1023 + 32 - 0.5)
    m = bits.bitwise_and_((1 << 52) - 1).bitwise_or_(1023 << 52).view(torch.float64)
    z = (m - math.sqrt(2)).div_(m + math.sqrt(2))
    return e.mul_(-2 * math.log(2)).sub_(_polynomial(_ATANH, z * z).mul_(z).mul_(4)).sqrt_()


def _direction(words: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the cosine and sine of an angle that is uniform over the circle."""
    # 30 bits determine an angle from -45 to 45 degrees; two bits select one of the four quarters of the circle.
    x = (words & ((1 << 30) - 1)).to(torch.float64).sub_((1 << 29) - 0.5).mul_(math.pi / (1 << 31))
    squares = x * x
    large = _polynomial(_COSINE, squares).mul_(1 - (words >> 29 & 2))
    small = _polynomial(_SINE, squares).mul_(x)
    is_steep = words >= 1 << 31
    return torch.where(is_steep, small, large), torch.where(is_steep, large, small)


def _polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    """Evaluate ``c[0] + c[1] x + c[2] x^2 + ...``."""
    value = (x * coefficients[-1]).add_(coefficients[-2])
    for coefficient in coefficients[-3::-1]:
        value.mul_(x).add_(coefficient)
    return value


InitMethod = Callable[[Tensor], object]

_BLOCK_ELEMENTS = 1 << 20
# PyTorch's CPU normal fills 16 values at a time, so blocks of a multiple of 16 elements continue the same stream.
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
    """Fill with independent normal numbers, each a function of a key and its position in the parameter.

    The key is one number drawn from the CPU's default generator, for parameters of every size and on every device.
    """

    std: float
    mean: float = 0.0

    def __call__(self, tensor: Tensor) -> Tensor:
        return initialize_shard_(tensor, ParamLayout.replicated(tensor.shape, 1), 0, self)

    def fill_(self, shard: Tensor, layout: ParamLayout, rank: int) -> None:
        """Fill a rank's shard of a parameter, taken as a matrix whose columns are the last dimension."""
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
    """Return a method that fills with normal numbers of standard deviation ``sigma``."""
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Normal:
    """Return ``Normal(sigma / sqrt(multiplier * num_layers))``, for weights that write to the residual.

    Source: Radford et al. 2019, section 2.3.
    """
    return Normal(sigma / math.sqrt(multiplier * num_layers))


# Each number depends only on its position in the generator's stream.
_ELEMENTWISE: tuple[Any, ...] = (init.normal_, init.uniform_, init.constant_, init.zeros_, init.ones_)


def _block_method(init_method: InitMethod, shape: tuple[int, ...]) -> tuple[InitMethod | None, bool]:
    """Return a method that fills a parameter of ``shape`` block by block, None if it can only be filled as a whole; and
    True if consecutive blocks on a CPU get the numbers of a single fill.
    """
    function, options = init_method, {}
    if isinstance(init_method, functools.partial):
        function, options = init_method.func, init_method.keywords
        if init_method.args:
            return None, False
    if isinstance(function, Normal) or function in _ELEMENTWISE:
        return init_method, True
    if function is init.trunc_normal_:
        return init_method, False
    is_xavier = function in (init.xavier_uniform_, init.xavier_normal_)
    is_kaiming = function in (init.kaiming_uniform_, init.kaiming_normal_)
    if not (is_xavier or is_kaiming) or len(shape) < 2 or 0 in shape:
        return None, False
    bound = inspect.signature(function).bind(None, **options)
    bound.apply_defaults()
    given, fans = bound.arguments, [size * math.prod(shape[2:]) for size in (shape[1], shape[0])]
    if is_xavier:
        std = given["gain"] * math.sqrt(2.0 / float(sum(fans)))
    else:
        fan = fans[("fan_in", "fan_out").index(given["mode"].lower())]
        std = init.calculate_gain(given["nonlinearity"], given["a"]) / math.sqrt(fan)
    if function in (init.xavier_normal_, init.kaiming_normal_):
        return functools.partial(init.normal_, mean=0.0, std=std, generator=given["generator"]), True
    limit = math.sqrt(3.0) * std
    return functools.partial(init.uniform_, a=-limit, b=limit, generator=given["generator"]), True


def _blocks_continue_one_stream(device: torch.device) -> bool:
    # On other devices a number depends on how many the call draws, so one rank must draw the same blocks as several.
    return device.type == "cpu"


@torch.no_grad()
def initialize_shard_(
    shard: Tensor, layout: ParamLayout, rank: int, init_method: InitMethod, *, on_cpu: bool = False
) -> Tensor:
    """Fill ``shard``, in place, with this rank's slice of ``init_method`` applied to the whole parameter.

    For a meta tensor, nothing is drawn. ``on_cpu`` draws on the CPU in fp32 (fp64 for an fp64 shard) and copies. The
    weights are then the same on every device, up to the shard's rounding. ``CounterNormal`` does not need this.
    """
    if shard.is_meta:
        return shard
    if isinstance(init_method, CounterNormal):
        init_method.fill_(shard, layout, rank)
        return shard
    staging = shard
    if on_cpu:
        staging = torch.empty(0, dtype=torch.promote_types(shard.dtype, torch.float32), device="cpu")
    fill, one_stream = _block_method(init_method, layout.global_shape)
    direct = staging.device == shard.device and staging.dtype == shard.dtype
    one_stream = one_stream and _blocks_continue_one_stream(staging.device)
    if direct and (layout.dim is None or (layout.world_size == 1 and one_stream)):
        init_method(shard)
    elif fill is None or layout.dim is None:
        whole = staging.new_empty(layout.global_shape)
        init_method(whole)
        shard.copy_(layout.take(whole, rank))
    elif layout.dim == 0:
        _fill_rows(shard, layout, rank, _blocks(staging, layout, fill))
    else:
        for start, stop, block in _blocks(staging, layout, fill):
            shard[start:stop].copy_(replace(layout, global_shape=tuple(block.shape)).take(block, rank))
    return shard


def _blocks(staging: Tensor, layout: ParamLayout, fill: InitMethod) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the first row, the last row (excluded) and the values of each block of rows of the whole parameter."""
    rows, row_shape = layout.global_shape[0], layout.global_shape[1:]
    for start, stop in _row_blocks(rows, math.prod(row_shape)):
        block = staging.new_empty((stop - start, *row_shape))
        fill(block)
        yield start, stop, block


def _row_blocks(num_rows: int, row_elements: int) -> list[tuple[int, int]]:
    """Split the rows into blocks of about a million elements; all but the last have a multiple of 16 rows."""
    rows = max(_ROW_MULTIPLE, _BLOCK_ELEMENTS // max(row_elements, 1) // _ROW_MULTIPLE * _ROW_MULTIPLE)
    starts = list(range(0, num_rows, rows)) or [0]
    if len(starts) > 1 and (num_rows - starts[-1]) * row_elements < _ROW_MULTIPLE:
        # A fill draws its last 16 values together, and would draw a shorter tail by another rule.
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


def draw_seed() -> int:
    """Draw a seed of 63 bits: one number from the CPU's default generator."""
    seed = torch.empty((), dtype=torch.int64, device="cpu").random_()
    # Fake tensors have no values, nor do the tensors that are filled with this seed.
    return 0 if isinstance(seed, FakeTensor) else int(seed)


@contextmanager
def part_seeded(seed: int | None, *part: object) -> Iterator[None]:
    """Seed the default generators inside the block from ``seed`` and a model part's name; no-op if ``seed`` is None.

    The part then starts with the same values on every pipeline stage, independent of the stage's other parts.
    """
    if seed is None:
        yield
        return
    own_seed = int.from_bytes(hashlib.sha256(repr((seed, *part)).encode()).digest()[:8], "big") >> 1
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        # torch.manual_seed would also set the seed that CUDA takes when it is initialised later.
        torch.default_generator.manual_seed(own_seed)
        if devices:
            torch.cuda.manual_seed(own_seed)
        yield
