"""Shapes that stages send ahead of hidden states, for micro-batches of different sizes.

A header is a small tensor of integers that the receiving host reads: whether the sender failed, then the shape.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.core.errors import ShardingError

Sizes = tuple[int | None, ...]
"""A shape, with None for each size that may differ between micro-batches."""

_MAX_BYTES = 2**36


def make_header(shape: Sequence[int], device: torch.device, *, has_failed: bool = False) -> Tensor:
    """Return the header of a message of ``shape``, ``[1 + dims]`` int64; zeros make one to receive into."""
    return torch.tensor([has_failed, *shape], dtype=torch.int64, device=device)


def read_header(header: Tensor, sizes: Sizes, dtype: torch.dtype, *, whose: str) -> tuple[tuple[int, ...], bool]:
    """Return the shape of the message that follows a header, and whether its sender failed.

    The host waits for the header's device. Raises ShardingError if it is not the header of a message that ``sizes``
    and ``dtype`` allow; ``whose`` names the message.
    """
    failed, *shape = header.tolist()
    check_shape(shape, sizes, dtype, f"{whose} were announced with the shape")
    if failed not in (0, 1):
        raise ShardingError(f"{whose} were announced by {[failed, *shape]}, which must begin with 0 or 1")
    return tuple(shape), bool(failed)


def check_shape(shape: Sequence[int], sizes: Sizes, dtype: torch.dtype, what: str) -> None:
    """Raise ShardingError, which begins with ``what`` and the shape, unless stages may exchange such a tensor."""
    if len(shape) != len(sizes) or any(size not in (None, own) for size, own in zip(sizes, shape, strict=True)):
        remedy = "every micro-batch must have the same size and length"
        if None in sizes:
            remedy = "micro-batches may differ only in the sizes that are any here"
        exchanged = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ShardingError(f"{what} {list(shape)}, and the stages exchange [{exchanged}]; {remedy}")
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if min(shape, default=0) < 0 or num_bytes > _MAX_BYTES:
        raise ShardingError(
            f"{what} {list(shape)}, {num_bytes} bytes of {dtype}; no size may be negative, and a message has at most "
            f"{_MAX_BYTES >> 30} GiB: give shorter or fewer samples to a micro-batch"
        )
