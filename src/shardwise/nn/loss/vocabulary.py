"""The split of the vocabulary: the ids of each rank and of each part of it, and this rank's logits as rows.

There is one part for each rank, or several in a group that sums over parts.

A caller may give no size of the vocabulary. Then each rank takes every other's shard to be as large as its own, which
is wrong where the vocabulary does not divide by the ranks, or is split in another way. So each rank's size travels with
its statistics, as one more row of them, and ranks whose sizes differ never get as far as a loss.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.trees import exact_parts
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sharding import Interval, balanced_sizes, intervals_of_sizes

IGNORE_INDEX = -100


def vocab_ranges(
    local_size: int, vocab_size: int, padded_vocab_size: int | None, group: ProcessGroup
) -> list[Interval]:
    """Every rank's range of true vocabulary ids, ``(start, stop)``, in rank order.

    Args:
        local_size: number of logits per token on this rank, checked against the split.
        vocab_size: true size of the vocabulary.
        padded_vocab_size: size that was split, where padding was added; the true size if None.
        group: the ranks that split the vocabulary.

    Raises:
        ConfigError: ``vocab_size`` is None.
        ShardingError: this rank's share of the vocabulary is not ``local_size``, or the vocabulary has no ids.
    """
    t, rank = group.size(), group.rank()
    if vocab_size is None:
        raise ConfigError(
            f"vocab_size is None; pass the number of ids of the whole vocabulary, which the {local_size} logits per "
            "token of one rank do not tell"
        )
    split_size = vocab_size if padded_vocab_size is None else padded_vocab_size
    if vocab_size < 1:
        raise ShardingError(f"a vocabulary of {vocab_size} ids on {t} ranks; it needs at least 1")
    ranges = intervals_of_sizes(balanced_sizes(split_size, t))
    share = ranges[rank][1] - ranges[rank][0]
    if share != local_size or split_size < vocab_size:
        raise ShardingError(
            f"rank {rank} of {t} has {local_size} logits per token, but its balanced share of a vocabulary of "
            f"{split_size} is {share}; pass vocab_size (the true one, {vocab_size} here) and, where it was padded, "
            "padded_vocab_size"
        )
    return [(min(start, vocab_size), min(stop, vocab_size)) for start, stop in ranges]


def check_target_shape(logits: Tensor, target: Tensor) -> None:
    """Raise ShardingError unless there is one target for each token."""
    if logits.shape[:-1] != target.shape:
        raise ShardingError(
            f"logits {list(logits.shape)} and target {list(target.shape)} must agree in all but the logits' last "
            "dimension"
        )


def flat_rows(logits: Tensor) -> Tensor:
    """``[..., v]`` as ``[n, v]``, without autograd; the logits' own memory wherever their strides allow."""
    # Not -1 for their number: it is ambiguous where a rank holds no part of the vocabulary.
    return logits.detach().reshape(logits.shape[:-1].numel(), logits.size(-1))


def columns_of(target: Tensor, interval: Interval, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Targets as columns of this rank's logits.

    Args:
        target: ``[...]`` global ids, of any integer dtype.
        interval: this rank's ids.
        ignore_index: a target that is in no rank's part.

    Returns:
        ``[n]`` int64 columns, -1 where the target is not this rank's, and where it is ignored, ``[n]``.
    """
    flat = target.reshape(-1).long()
    ignored = flat == ignore_index
    start, stop = interval
    return (flat - start).masked_fill((flat < start) | (flat >= stop) | ignored, -1), ignored


def column_parts(ranges: Sequence[Interval], group: ProcessGroup) -> tuple[list[Interval], list[Interval]]:
    """The parts of this rank's columns, and the ids of every part of all ranks.

    Args:
        ranges: every rank's ids.
        group: the ranks that split the vocabulary.

    Raises:
        ConfigError: the bounds of the ranks' ids are not among the cuts into parts.
    """
    (first, last), number = ranges[group.rank()], exact_parts(group)
    if number is None:
        return [(0, last - first)], list(ranges)
    vocab_size, per_rank = ranges[-1][1], number // group.size()
    parts = intervals_of_sizes(balanced_sizes(vocab_size, number))
    if any(run != (parts[i * per_rank][0], parts[(i + 1) * per_rank - 1][1]) for i, run in enumerate(ranges)):
        raise ConfigError(
            f"exact: the loss over {vocab_size} ids is cut into {number} parts, and the bounds of the ranks' ids "
            f"({list(ranges)}) are not among the cuts; use a vocabulary that {number} divides, without padding"
        )
    own = parts[group.rank() * per_rank : (group.rank() + 1) * per_rank]
    return [(start - first, stop - first) for start, stop in own], list(parts)


def columns_between(target_local: Tensor, start: int, stop: int) -> Tensor:
    """Targets as columns of those from ``start`` to ``stop``, -1 where they are not among them."""
    return (target_local - start).masked_fill((target_local < start) | (target_local >= stop), -1)


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
