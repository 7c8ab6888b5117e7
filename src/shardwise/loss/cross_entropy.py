r"""Cross entropy over a split vocabulary, with one collective.

Rank ``r`` holds the logits ``x`` of its part of the vocabulary. It sends three numbers per token::

    m_r = max x        s_r = Σ exp(x - m_r)        d_r = z - m_r

where ``z`` is the target's logit (``d_r = -inf`` where the rank does not hold the target). One all-gather brings every
rank's to every rank, and each then computes

    M = max m_r        S = Σ s_r exp(m_r - M)        loss = log S - max_r (d_r + (m_r - M))

Every sum is of numbers no larger than the spread of the logits: ``M`` itself, which may be near 1e4, is never added to
``log S``, so the error is a few roundings of the loss and of the spread, not of the largest logit.

With label smoothing ``a`` a fourth number travels, ``Σ (x - m_r)``, and the loss is
``(1 - a) nll_y + a/(K-1) Σ_{i≠y} nll_i`` over the true vocabulary of ``K`` ids.

The backward needs no communication: ``∂loss/∂x = exp(x - M) / S - (target distribution)``.

Logits are read in blocks of rows that fit the cache, so that no copy of them is made in the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.collectives.primitives import all_gather
from shardwise.errors import ConfigError, ShardingError
from shardwise.sharding import balanced_range
from shardwise.validation import check_ids

IGNORE_INDEX = -100

# Elements of one block: 1 MiB of fp32, about a core's second-level cache.
_BLOCK_ELEMENTS = 1 << 18


def _row_blocks(num_rows: int, num_columns: int) -> Iterator[slice]:
    rows = max(1, _BLOCK_ELEMENTS // max(num_columns, 1))
    for start in range(0, num_rows, rows):
        yield slice(start, min(start + rows, num_rows))


def _local_statistics(logits: Tensor, local_target: Tensor, owned: Tensor, want_sum: bool) -> Tensor:
    """``[n, 3 or 4]``: maximum, sum of exponentials, target minus maximum and, when asked, sum of differences."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    num_rows, num_columns = logits.shape
    statistics = torch.zeros(num_rows, 4 if want_sum else 3, dtype=dtype, device=logits.device)
    if num_columns == 0:
        statistics[:, 0] = -torch.inf
        statistics[:, 2] = -torch.inf
        return statistics
    for rows in _row_blocks(num_rows, num_columns):
        block = logits[rows].to(dtype)
        maximum = block.amax(dim=1, keepdim=True)
        # A row of -inf has no finite maximum to subtract; its exponentials are 0 whatever is subtracted.
        shifted = block - maximum.clamp(min=torch.finfo(dtype).min)
        out = statistics[rows]
        out[:, 2] = shifted.gather(1, local_target[rows].unsqueeze(1)).squeeze(1)
        if want_sum:
            out[:, 3] = shifted.sum(dim=1)
        out[:, 0] = maximum.squeeze(1)
        out[:, 1] = shifted.exp_().sum(dim=1)
    statistics[:, 2].masked_fill_(~owned, -torch.inf)
    return statistics


def _rows(logits: Tensor) -> Tensor:
    # Not -1 for their number: it is ambiguous where a rank holds no part of the vocabulary.
    return logits.detach().reshape(logits.shape[:-1].numel(), logits.size(-1))


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        label_smoothing: float,
        ranges: list[tuple[int, int]],
        ignore_index: int,
        overwrite_logits: bool,
        group: ProcessGroup,
    ) -> Tensor:
        vocab_size = ranges[-1][1]
        start, stop = ranges[group.rank()]
        num_valid = stop - start
        flat = _rows(logits)[:, :num_valid]
        flat_target = target.reshape(-1)
        ignored = flat_target == ignore_index
        local_target = flat_target - start
        owned = (local_target >= 0) & (local_target < num_valid) & ~ignored
        local_target = torch.where(owned, local_target, 0)

        own = _local_statistics(flat, local_target, owned, want_sum=label_smoothing > 0)
        every = all_gather(own.unsqueeze(0), group=group, dim=0)
        maximum = every[..., 0].amax(dim=0)
        below = every[..., 0] - maximum
        sum_exp = (every[..., 1] * below.exp()).sum(dim=0)
        log_sum_exp = sum_exp.log()
        loss = log_sum_exp - (every[..., 2] + below).amax(dim=0)
        if label_smoothing > 0:
            counts = every.new_tensor([last - first for first, last in ranges])
            # Empty shards have no maximum: nothing of theirs enters the sum.
            differences = (every[..., 3] + counts[:, None] * below.nan_to_num(neginf=0.0)).sum(dim=0)
            sum_nll = vocab_size * log_sum_exp - differences
            rest = label_smoothing / (vocab_size - 1)
            loss = (1.0 - label_smoothing - rest) * loss + rest * sum_nll
        loss = loss.masked_fill_(ignored, 0.0)

        ctx.save_for_backward(logits, local_target, owned, ignored, maximum, sum_exp)
        ctx.num_valid = num_valid
        ctx.vocab_size = vocab_size
        ctx.label_smoothing = label_smoothing
        ctx.overwrite_logits = overwrite_logits
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        logits, local_target, owned, ignored, maximum, sum_exp = ctx.saved_tensors
        # The saved values are the caller's when it did not give them up.
        source = _rows(logits)
        result = source if ctx.overwrite_logits else torch.empty_like(source)
        scale = grad_output.reshape(-1).to(sum_exp.dtype).masked_fill(ignored, 0.0)
        rest = ctx.label_smoothing / (ctx.vocab_size - 1) if ctx.label_smoothing > 0 else 0.0
        on_target = torch.where(owned, (1.0 - ctx.label_smoothing - rest) * scale, 0.0)
        factor = (scale / sum_exp).unsqueeze(1)
        maximum = maximum.unsqueeze(1)
        num_valid = ctx.num_valid
        for rows in _row_blocks(source.size(0), max(num_valid, 1)):
            block = source[rows, :num_valid]
            if source.dtype == sum_exp.dtype:
                probability = torch.sub(block, maximum[rows], out=result[rows, :num_valid])
            else:
                probability = block.to(sum_exp.dtype) - maximum[rows]
            probability.exp_().mul_(factor[rows])
            if rest:
                probability.sub_((rest * scale[rows]).unsqueeze(1))
            if num_valid:
                index = local_target[rows].unsqueeze(1)
                probability.scatter_add_(1, index, -on_target[rows].unsqueeze(1))
            if source.dtype != sum_exp.dtype:
                result[rows, :num_valid] = probability
        result[:, num_valid:] = 0.0
        return result.view(logits.shape), None, None, None, None, None, None


def vocab_ranges(
    local_size: int, vocab_size: int | None, padded_vocab_size: int | None, group: ProcessGroup
) -> list[tuple[int, int]]:
    """Every rank's range of true vocabulary ids, ``(start, stop)``, in rank order.

    Args:
        local_size: number of logits per token on this rank, checked against the split.
        vocab_size: true size of the vocabulary; ``local_size`` times the number of ranks if None.
        padded_vocab_size: size that was split, where padding was added; the true size if None.
        group: the ranks that split the vocabulary.

    Raises:
        ShardingError: this rank's share of the vocabulary is not ``local_size``.
    """
    t, rank = group.size(), group.rank()
    true_size = local_size * t if vocab_size is None else vocab_size
    split_size = true_size if padded_vocab_size is None else padded_vocab_size
    ranges = [balanced_range(split_size, t, r) for r in range(t)]
    share = ranges[rank][1] - ranges[rank][0]
    if share != local_size or split_size < true_size:
        raise ShardingError(
            f"rank {rank} of {t} has {local_size} logits per token, but its balanced share of a vocabulary of "
            f"{split_size} is {share}; pass vocab_size (the true one, {true_size} here) and, where it was padded, "
            "padded_vocab_size"
        )
    return [(min(start, true_size), min(stop, true_size)) for start, stop in ranges]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: ProcessGroup,
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
    padded_vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    overwrite_logits: bool = False,
    validate: bool = True,
) -> Tensor:
    """Cross entropy of each token; see the module for the formula.

    Layout V -> I: one all-gather of 12 bytes per token and rank in fp32 (16 with label smoothing), none in the
    backward.

    Args:
        logits: ``[..., v/t]``, this rank's part of the vocabulary.
        target: ``[...]`` global ids, the same on every rank.
        group: the ranks that split the vocabulary.
        label_smoothing: probability taken from the target and spread over all other ids.
        vocab_size: true size of the vocabulary; ``v/t`` times the number of ranks if None.
        padded_vocab_size: size that was split, where padding was added; padded columns take no probability.
        ignore_index: a target that costs nothing and has no gradient.
        overwrite_logits: the caller gives up ``logits``: their memory becomes the gradient's.
        validate: check that targets are in the vocabulary.

    Returns:
        ``[...]``, fp32 (fp64 for fp64 logits), the same on every rank.

    Raises:
        ShardingError: the shapes of logits and target do not match, or the shard does not fit the vocabulary.
        VocabularyError: a target is outside the vocabulary and not ``ignore_index``.
    """
    if logits.shape[:-1] != target.shape:
        raise ShardingError(
            f"logits {list(logits.shape)} and target {list(target.shape)} must agree in all but the logits' last "
            "dimension"
        )
    ranges = vocab_ranges(logits.size(-1), vocab_size, padded_vocab_size, group)
    true_size = ranges[-1][1]
    if not 0.0 <= label_smoothing < 1.0 or (label_smoothing > 0 and true_size < 2):
        raise ConfigError(
            f"label_smoothing is {label_smoothing} over {true_size} ids; it must be at least 0 and under 1, and "
            "needs at least 2 ids"
        )
    if validate:
        check_ids(target, true_size, what="target", ignore_index=ignore_index)
    loss: Tensor = _VocabParallelCrossEntropy.apply(
        logits, target, label_smoothing, ranges, ignore_index, overwrite_logits, group
    )
    return loss
