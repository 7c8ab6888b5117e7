"""A vocabulary whose size nobody gave: each rank takes every other's shard to be as large as its own.

That is wrong where the vocabulary does not divide by the ranks, or is split in another way. So each rank's size travels
with its statistics, as one more row of them, and ranks whose sizes differ never get as far as a loss.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ShardingError
from shardwise.core.sharding import Interval

# A size is sent as two numbers, since fp32 holds no more than 24 bits exactly.
_BASE = 1 << 16


def equal_ranges(local_size: int, group: ProcessGroup) -> list[Interval]:
    """Every rank's range of ids, ``(start, stop)``, if each has ``local_size`` of them."""
    return [(local_size * rank, local_size * (rank + 1)) for rank in range(group.size())]


def with_size(own: Tensor, local_size: int) -> Tensor:
    """This rank's statistics ``[n, k]`` and, in one more row, its number of columns: ``[n + 1, k]``."""
    # Not new_tensor: it copies from the host, which waits for a GPU.
    row = own.new_full((1, own.size(1)), local_size % _BASE)
    row.select(1, 0).fill_(local_size // _BASE)
    return torch.cat([own, row])


def without_sizes(every: Tensor, local_size: int) -> Tensor:
    """All ranks' statistics ``[t, n, k]`` out of ``[t, n + 1, k]``, where every rank has ``local_size`` columns.

    On CUDA and under torch.compile the check is an assertion on the device (``torch._assert_async``): nobody waits for
    its outcome, and the program ends where it fails.

    Raises:
        ShardingError: on every rank, if their numbers of columns differ or are 0.
    """
    high, low, *_ = every.select(1, -1).unbind(1)
    if every.is_cuda or torch.compiler.is_compiling() or type(every) is not Tensor:
        alike = ((high == local_size // _BASE) & (low == local_size % _BASE)).all()
        torch._assert_async(
            alike & (local_size > 0),
            "the ranks hold different numbers of logits per token, and no vocab_size was given; pass vocab_size=",
        )
    else:
        sizes = [int(size) for size in (high.double() * _BASE + low).tolist()]
        if len(set(sizes)) > 1:
            raise ShardingError(
                f"the ranks hold {sizes} logits per token; without vocab_size each takes the others' parts to be as "
                f"large as its own, so their losses would be of different vocabularies; pass vocab_size= "
                f"({sum(sizes)}, less what is padding)"
            )
        if local_size == 0:
            raise ShardingError("no rank holds any logits; a vocabulary needs at least 1 id")
    return every.narrow(1, 0, every.size(1) - 1)
