"""The largest logits of a split vocabulary and their ids: every rank sends its own largest, and each picks from all.

A logit travels with its id, both in the same number of bytes: fp32 with int32, fp64 with int64.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import all_gather
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import Interval
from shardwise.kernels.loss_reference import compute_dtype
from shardwise.nn.loss.vocabulary import flat_rows, vocab_ranges

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _gather_candidates(values: Tensor, ids: Tensor, sizes: list[int], group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Every rank's ``[n, c]`` values and ids as ``[n, Σ c]``, in rank order; one collective."""
    integers = _INTEGERS[values.dtype]
    packed = torch.stack([values.contiguous().view(integers), ids.to(integers)], dim=2)
    every = all_gather(packed, group=group, dim=1, sizes=sizes)
    return every[..., 0].contiguous().view(values.dtype), every[..., 1].long()


class _VocabParallelTopk(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, ranges: list[Interval], group: ProcessGroup) -> tuple[Tensor, Tensor]:
        start, stop = ranges[group.rank()]
        flat = flat_rows(logits)[:, : stop - start]
        own = flat.topk(min(k, stop - start), dim=1)
        # By id, so that the sort below, which keeps the order of equal values, prefers the smallest.
        columns = own.indices.sort(dim=1).values
        values = flat.gather(1, columns).to(compute_dtype(logits.dtype))
        sizes = [min(k, last - first) for first, last in ranges]
        values, ids = _gather_candidates(values, columns + start, sizes, group)
        values, order = values.sort(dim=1, descending=True, stable=True)
        values, ids = values[:, :k].contiguous(), ids.gather(1, order[:, :k])
        ctx.save_for_backward(ids)
        ctx.mark_non_differentiable(ids)
        ctx.interval, ctx.shape, ctx.dtype = (start, stop), logits.shape, logits.dtype
        shape = (*logits.shape[:-1], k)
        return values.view(shape).detach(), ids.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor, _: Any) -> Any:
        (ids,) = ctx.saved_tensors
        start, stop = ctx.interval
        gradient = torch.zeros(ids.size(0), ctx.shape[-1], dtype=ctx.dtype, device=ids.device)
        if gradient.size(1):
            owned = (ids >= start) & (ids < stop)
            own = torch.where(owned, grad_values.reshape(ids.shape).to(ctx.dtype), 0.0)
            gradient.scatter_add_(1, torch.where(owned, ids - start, 0), own)
        return gradient.view(ctx.shape), None, None, None


def vocab_parallel_topk(
    logits: Tensor,
    k: int,
    *,
    group: ProcessGroup,
    vocab_size: int,
    padded_vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` largest logits of each token, largest first, and their ids; of equal ones the smaller id comes first.

    Layout V -> I: one all-gather of ``8 k`` bytes per token and rank (16 for fp64 logits), none in the backward. The
    values have a gradient. Where more logits than fit are equal to the smallest, any of them may be left out.

    Args:
        logits: ``[..., v/t]``, this rank's part of the vocabulary; not modified.
        k: how many; at most the size of the vocabulary.
        group: the ranks that split the vocabulary.
        vocab_size: true size of the vocabulary.
        padded_vocab_size: size that was split, where padding was added; padded columns are left out.

    Returns:
        Values ``[..., k]``, fp32 (fp64 for fp64 logits), and int64 ids ``[..., k]``, the same on every rank.

    Raises:
        ConfigError: ``k`` is under 1 or over the size of the vocabulary.
        ShardingError: the shard does not fit the vocabulary.
    """
    ranges = vocab_ranges(logits.size(-1), vocab_size, padded_vocab_size, group)
    if not 1 <= k <= ranges[-1][1]:
        raise ConfigError(f"k is {k}; it must be at least 1 and at most the {ranges[-1][1]} ids of the vocabulary")
    result: tuple[Tensor, Tensor] = _VocabParallelTopk.apply(logits, k, ranges, group)
    return result


def vocab_parallel_argmax(
    logits: Tensor,
    *,
    group: ProcessGroup,
    vocab_size: int,
    padded_vocab_size: int | None = None,
) -> Tensor:
    """The id of each token's largest logit, the smallest of them if several are equal; NaN counts as the largest.

    One all-gather of 8 bytes per token and rank (16 for fp64 logits); no gradient.

    Args:
        logits: ``[..., v/t]``, this rank's part of the vocabulary; not modified.
        group: the ranks that split the vocabulary.
        vocab_size: true size of the vocabulary.
        padded_vocab_size: size that was split, where padding was added; padded columns are left out.

    Returns:
        int64 ids ``[...]``, the same on every rank.

    Raises:
        ShardingError: the shard does not fit the vocabulary.
    """
    ranges = vocab_ranges(logits.size(-1), vocab_size, padded_vocab_size, group)
    start, stop = ranges[group.rank()]
    flat = flat_rows(logits)[:, : stop - start]
    # PyTorch's argmax is the first of several.
    columns = flat.argmax(dim=1, keepdim=True) if stop > start else flat.new_zeros(flat.shape, dtype=torch.long)
    values = flat.gather(1, columns).to(compute_dtype(logits.dtype))
    sizes = [min(1, last - first) for first, last in ranges]
    values, ids = _gather_candidates(values, columns + start, sizes, group)
    return ids.gather(1, values.argmax(dim=1, keepdim=True)).view(logits.shape[:-1])
