"""What every function over a split vocabulary starts from: which ids are whose, and this rank's logits as rows."""

from torch import Tensor
from torch.distributed import ProcessGroup

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
