"""Normal numbers by a counter: each is a function of a key and of its own place, and of nothing else.

So whoever needs a part of a tensor computes that part alone. The numbers are the same bits on every device and however
many are computed at once: Philox is integers, and what makes normals of them uses only those operations on fp64 whose
result IEEE 754 defines to the bit (addition, multiplication, division, square root; PyTorch's logarithm and sine differ
between devices, and between a vector's body and its end), each in a call of its own, since compilers fuse what stands
together.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox); Box and Muller 1958.
"""

import math

import torch
from torch import Tensor

# Numbers of 32 bits that one counter gives.
_WORDS = 4
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# Counters at a time: on a CPU so few, for each thread, that what lies between two operations stays in its cache.
_COUNTERS_PER_THREAD, _COUNTERS_ELSEWHERE = 1 << 14, 1 << 20

# Enough terms for an error of 1e-12.
_ATANH = [1 / (2 * k + 1) for k in range(8)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(7)]
_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6)]


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four random words for each counter of four words.

    Args:
        counter: int64 tensors of shapes that broadcast, each number from 0 to 2^32 - 1; not modified.
        key: of 64 bits.

    Returns:
        int64 tensors of the broadcast shape, each number from 0 to 2^32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, key >> 32 & _MASK
    for _ in range(_ROUNDS):
        # The products of two words, modulo 2^64. Their low words need no mask before the end.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = ((p0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def fill_normal_(out: Tensor, *, key: int, rows: Tensor, column: int, mean: float = 0.0, std: float = 1.0) -> None:
    """Fill a part of a whole matrix with independent normal numbers.

    In row ``r`` of the whole, columns ``4 b`` to ``4 b + 3`` are what counter ``(b, r)`` gives: two pairs by Box and
    Muller, computed in fp64 and rounded at the end, to fp32 first where ``out`` is narrower.

    Args:
        out: ``[n, m]``, or a view of that shape; overwritten.
        key: of the matrix, of 64 bits.
        rows: ``[n]``, int64, which rows of the whole these are; on the device of ``out``.
        column: which column of the whole is the first here; the next ones follow it.
        mean, std: of the numbers.
    """
    num_rows, num_columns = out.shape
    first, last = column // _WORDS, -(-(column + num_columns) // _WORDS)
    on_cpu = out.device.type == "cpu"
    at_once = _COUNTERS_PER_THREAD * torch.get_num_threads() if on_cpu else _COUNTERS_ELSEWHERE
    width = max(1, min(at_once, last - first))
    height = max(1, at_once // width)
    for block in range(first, last, width):
        blocks = torch.arange(block, min(block + width, last), device=out.device)
        # What these counters give, and what of it is wanted.
        start = block * _WORDS
        low, high = max(start, column), min(start + len(blocks) * _WORDS, column + num_columns)
        for row in range(0, num_rows, height):
            normals = _normals(key, rows[row : row + height, None], blocks).mul_(std).add_(mean)
            out[row : row + height, low - column : high - column].copy_(normals[:, low - start : high - start])


def _normals(key: int, rows: Tensor, blocks: Tensor) -> Tensor:
    """``[n, 1]`` and ``[m]`` to ``[n, 4 m]``: what each counter gives."""
    words = philox((blocks, rows & _MASK, rows >> 32, rows.new_zeros(())), key)
    normals = torch.empty((*words[0].shape, _WORDS), dtype=torch.float64, device=rows.device)
    for pair in range(0, _WORDS, 2):
        radius = _radius(words[pair])
        for place, coordinate in enumerate(_direction(words[pair + 1])):
            torch.mul(coordinate, radius, out=normals[..., pair + place])
    return normals.flatten(1)


def _radius(words: Tensor) -> Tensor:
    """``sqrt(-2 log u)`` of ``u = (word + 0.5) / 2^32``."""
    bits = words.to(torch.float64).add_(0.5).view(torch.int64)
    # u = 2^e m with m from 1 to 2, and log m = log sqrt 2 + 2 atanh((m - sqrt 2) / (m + sqrt 2)).
    e = (bits >> 52).to(torch.float64).sub_(1023 + 32 - 0.5)
    m = bits.bitwise_and_((1 << 52) - 1).bitwise_or_(1023 << 52).view(torch.float64)
    z = (m - math.sqrt(2)).div_(m + math.sqrt(2))
    return e.mul_(-2 * math.log(2)).sub_(_polynomial(_ATANH, z * z).mul_(z).mul_(4)).sqrt_()


def _direction(words: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of an angle, all equally likely."""
    # 30 bits are an angle from -45 to 45 degrees; two bits say which of four quarters of the circle it lies in.
    x = (words & ((1 << 30) - 1)).to(torch.float64).sub_((1 << 29) - 0.5).mul_(math.pi / (1 << 31))
    squares = x * x
    large = _polynomial(_COSINE, squares).mul_(1 - (words >> 29 & 2))
    small = _polynomial(_SINE, squares).mul_(x)
    is_steep = words >= 1 << 31
    return torch.where(is_steep, small, large), torch.where(is_steep, large, small)


def _polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    """``c[0] + c[1] x + c[2] x^2 + ...``"""
    value = (x * coefficients[-1]).add_(coefficients[-2])
    for coefficient in coefficients[-3::-1]:
        value.mul_(x).add_(coefficient)
    return value
