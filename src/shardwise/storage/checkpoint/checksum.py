"""A checksum of a tensor that ranks compute together, each from the slices that it reads anyway.

Each row (last dimension) is cut into words of 4 bytes, the last filled up with zeros. The checksum is the sum of them
times ``2 * position + 1``, modulo 2**64: the sums of disjoint slices add up to that of the whole, however it was cut,
which CRCs do not. A wrong word never goes unnoticed, nor do two with one flipped bit each.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MODULUS = 1 << 64

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_BLOCK_BYTES = 1 << 20


def slice_checksum(part: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> int:
    """What a slice adds to the checksum of a tensor.

    Args:
        part: the slice, of any dtype of at most 8 bytes, on any device.
        offsets: its first index in each dimension of the tensor.
        shape: the tensor's shape.
    """
    if part.dim() == 0:
        return slice_checksum(part.view(1), [0], [1])
    if part.numel() == 0:
        return 0
    bits = part.detach().contiguous().view(_BITS[part.element_size()])
    per_element = bits.size(-1) // part.size(-1)
    bits = bits.view(-1, bits.size(-1))
    per_word = 4 // bits.element_size()
    # These are the words that the slice's rows lie in; other ranks may hold the rest of the first and the last.
    first, phase = divmod(offsets[-1] * per_element, per_word)
    num_words = -(-(phase + bits.size(1)) // per_word)
    weights = 2 * torch.arange(first, first + num_words) + 1
    words_of_rows = 2 * _row_numbers(part.shape, offsets, shape) * -(-shape[-1] * per_element // per_word)
    num_rows = max(1, _BLOCK_BYTES // (8 * num_words))
    total = 0
    for start in range(0, bits.size(0), num_rows):
        block = bits[start : start + num_rows].cpu()
        padded = block.new_zeros(block.size(0), num_words * per_word)
        padded[:, phase : phase + block.size(1)] = block
        words = padded.view(torch.int32).to(torch.int64)
        # int64 arithmetic wraps around, which is what modulo 2**64 asks for.
        rows = words_of_rows[start : start + num_rows] * words.sum(1)
        total += int(rows.sum() + (words * weights).sum())
    return total % MODULUS


def _row_numbers(part: Sequence[int], offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """``[rows of the part]``: the number of each of its rows among those of the tensor."""
    numbers = torch.zeros((), dtype=torch.int64)
    for dim in range(len(shape) - 1):
        along = torch.arange(offsets[dim], offsets[dim] + part[dim]) * math.prod(shape[dim + 1 : -1])
        numbers = numbers.unsqueeze(-1) + along
    return numbers.flatten()
