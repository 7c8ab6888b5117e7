"""A split vocabulary: the ids of each rank, the loss from all ranks' statistics, and the largest logits.

A caller may omit the size of the vocabulary. Each rank then assumes that all shards have its own size, which is wrong
if the ranks do not divide the vocabulary, or split it in another way. So each rank sends its size with its statistics,
as one more row, and all ranks raise before the loss is computed if the sizes differ.

For the largest logits every rank sends its largest logits with their ids, fp32 with int32 and fp64 with int64, and
selects from all of them. ``cross_entropy`` has the formula of the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import agree
from shardwise.core.communication.collectives import all_gather
from shardwise.core.communication.context import numbers_without_sync
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.layout import I, V
from shardwise.core.sharding import Interval, balanced_sizes, intervals_of_sizes
from shardwise.core.typed import check_move
from shardwise.kernels.loss_reference import compute_dtype
from shardwise.nn.loss.options import LossOptions

IGNORE_INDEX = -100


def vocab_ranges(
    local_size: int, vocab_size: int, padded_vocab_size: int | None, group: ProcessGroup
) -> list[Interval]:
    """Return every rank's range of true vocabulary ids, ``(start, stop)``, in rank order.

    ``local_size`` is the number of logits per token on this rank, and ``padded_vocab_size`` the size that was split, if
    padding was added.

    Raises:
        ConfigError: ``vocab_size`` is None.
        ShardingError: this rank's share of the vocabulary is not ``local_size``, the vocabulary has no ids, or
            ``padded_vocab_size`` is less than ``vocab_size``. If the group's calls are validated, all ranks raise it.
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
    if split_size < vocab_size:
        raise ShardingError(f"padded_vocab_size is {split_size}, less than vocab_size, which is {vocab_size}")
    ranges = intervals_of_sizes(balanced_sizes(split_size, t))

    def check_share() -> None:
        share = ranges[rank][1] - ranges[rank][0]
        if share != local_size:
            raise ShardingError(
                f"rank {rank} of {t} has {local_size} logits per token, but its balanced share of a vocabulary of "
                f"{split_size} is {share}; pass vocab_size (the true one, {vocab_size} here) and, where it was padded, "
                "padded_vocab_size"
            )

    agree(check_share, group=group, only_validated=True)
    return [(min(start, vocab_size), min(stop, vocab_size)) for start, stop in ranges]


def check_target_shape(logits: Tensor, target: Tensor) -> None:
    """Raise ShardingError unless there is one target for each token."""
    if logits.shape[:-1] != target.shape:
        raise ShardingError(
            f"logits {list(logits.shape)} and target {list(target.shape)} must agree in all but the logits' last "
            "dimension"
        )


def flat_rows(logits: Tensor) -> Tensor:
    """Reshape ``[..., v]`` to ``[n, v]``, without autograd; a view if the strides allow it."""
    # Not -1 for n, which is ambiguous if a rank holds no part of the vocabulary.
    return logits.detach().reshape(logits.shape[:-1].numel(), logits.size(-1))


def columns_of(target: Tensor, interval: Interval, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return targets ``[...]`` as int64 columns ``[n]`` of this rank's logits, -1 for others, and the ignored mask."""
    flat = target.reshape(-1).long()
    ignored = flat == ignore_index
    start, stop = interval
    return (flat - start).masked_fill((flat < start) | (flat >= stop) | ignored, -1), ignored


def columns_between(target_local: Tensor, start: int, stop: int) -> Tensor:
    """Convert columns to columns of the slice from ``start`` to ``stop``, -1 if outside it."""
    return (target_local - start).masked_fill((target_local < start) | (target_local >= stop), -1)


# A size is sent as two numbers, because fp32 represents only 24 bits exactly.
_BASE = 1 << 16


def equal_ranges(local_size: int, group: ProcessGroup) -> list[Interval]:
    """Return every rank's range of ids, ``(start, stop)``, if each has ``local_size`` ids."""
    return [(local_size * rank, local_size * (rank + 1)) for rank in range(group.size())]


def with_size(own: Tensor, local_size: int) -> Tensor:
    """Append this rank's number of columns to its statistics ``[n, k]``, as one more row: ``[n + 1, k]``."""
    # Not new_tensor, whose copy from the host synchronizes with a GPU.
    row = own.new_full((1, own.size(1)), local_size % _BASE)
    row.select(1, 0).fill_(local_size // _BASE)
    return torch.cat([own, row])


def without_sizes(every: Tensor, local_size: int) -> Tensor:
    """Check that every rank has ``local_size`` columns; return the statistics ``[t, n, k]`` out of ``[t, n + 1, k]``.

    On CUDA and under torch.compile the check is an assertion on the device (``torch._assert_async``), without
    synchronization. If it fails, the program ends.

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


@dataclass(frozen=True)
class Combined:
    """The loss of each token, and the numbers of its gradient, all ``[n]``.

    Attributes:
        loss: loss of the token, 0 if ignored.
        maximum: largest ``y`` over all ranks.
        weight: factor of ``exp(y - maximum)`` in the gradient, 0 if the token is ignored.
        at_target: gradient in the target's column, 0 if the token is ignored.
        rest: negative of the constant part of the gradient in all other columns; None without label smoothing.
    """

    loss: Tensor
    maximum: Tensor
    weight: Tensor
    at_target: Tensor
    rest: Tensor | None


def gather_statistics(own: Tensor, group: ProcessGroup) -> Tensor:
    """Gather every rank's ``[n, k]``, or ``[p, n, k]`` of its parts, to ``[t p, n, k]``; the loss's one collective."""
    return all_gather(own if own.dim() == 3 else own.unsqueeze(0), group=group, dim=0)


def combine(
    every: Tensor,
    ranges: Sequence[Interval],
    ignored: Tensor,
    options: LossOptions,
    activation: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = lambda function, input_: function(input_),
) -> Combined:
    """Compute the loss from all ranks' statistics.

    ``every`` is each rank's ``row_statistics``, ``[t, n, 3]`` or with label smoothing ``[t, n, 4]``. ``ranges`` are the
    ranks' ids, and ``ignored``, ``[n]``, marks the tokens whose loss is 0. ``activation`` computes elementwise
    functions (``nn.arithmetic.Activation``).
    """
    vocab_size, smoothing, z_loss = ranges[-1][1], options.label_smoothing, options.z_loss
    maximum = every[..., 0].amax(dim=0)
    below = every[..., 0] - maximum
    sum_exp = _in_order(every[..., 1] * activation(torch.exp, below))
    log_sum_exp = activation(torch.log, sum_exp)
    nll = log_sum_exp - (every[..., 2] + below).amax(dim=0)

    loss, weight = nll, sum_exp.reciprocal()
    # If the target is nearly certain, expm1 keeps digits of its probability minus 1 that a subtraction would lose.
    at_target = torch.expm1(-nll) + smoothing
    rest = None
    if smoothing > 0:
        counts = numbers_without_sync([float(stop - start) for start, stop in ranges], every)
        # Empty shards have no finite maximum and add nothing to the sum.
        differences = _in_order(every[..., 3] + counts[:, None] * below.nan_to_num(neginf=0.0))
        of_others = smoothing / (vocab_size - 1)
        loss = (1.0 - smoothing - of_others) * nll + of_others * (vocab_size * log_sum_exp - differences)
        rest = torch.full_like(nll, of_others).masked_fill_(ignored, 0.0)
    if z_loss > 0:
        log_normalizer = maximum + log_sum_exp
        loss = loss + z_loss * log_normalizer.square()
        slope = 2.0 * z_loss * log_normalizer
        weight = weight * (1.0 + slope)
        at_target = at_target + slope * torch.exp(-nll)
    loss, weight, at_target = (x.masked_fill(ignored, 0.0) for x in (loss, weight, at_target))
    return Combined(loss, maximum, weight, at_target, rest)


def _in_order(terms: Tensor) -> Tensor:
    """Sum ``[t, n]`` over ``t`` in order. The order of ``Tensor.sum`` depends on a column's place among the others."""
    total, *others = terms.unbind(0)
    for term in others:
        total = total + term
    return total


_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _gather_candidates(values: Tensor, ids: Tensor, sizes: list[int], group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gather every rank's ``[n, c]`` values and ids to ``[n, Σ c]``, in rank order; one collective."""
    integers = _INTEGERS[values.dtype]
    packed = torch.stack([values.contiguous().view(integers), ids.to(integers)], dim=2)
    every = all_gather(packed, group=group, dim=1, sizes=sizes)
    return every[..., 0].contiguous().view(values.dtype), every[..., 1].long()


class _VocabParallelTopk(Function):
    @staticmethod
    def spmd_typecheck(outputs: Any, *, logits: Tensor, group: ProcessGroup) -> None:
        check_move(outputs, group, I, (logits, V(dim=-1)))

    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, ranges: list[Interval], group: ProcessGroup) -> tuple[Tensor, Tensor]:
        start, stop = ranges[group.rank()]
        flat = flat_rows(logits)[:, : stop - start]
        own = flat.topk(min(k, stop - start), dim=1)
        # Sort by id, so that the stable sort below puts the smallest id of equal values first.
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
    logits: Tensor, k: int, *, group: ProcessGroup, vocab_size: int, padded_vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest logits of each token and their ids, largest first, the smaller id first if equal.

    Layout V -> I: one all-gather of ``8 k`` bytes per token and rank (16 for fp64 logits), none in the backward. The
    values have a gradient. If several logits are equal to the smallest result, any of them may be left out.

    Args:
        logits: ``[..., v/t]``, this rank's part of the vocabulary; not modified.
        k: number of logits; at most the size of the vocabulary.
        group, vocab_size, padded_vocab_size: as in ``vocab_parallel_cross_entropy``.

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
    logits: Tensor, *, group: ProcessGroup, vocab_size: int, padded_vocab_size: int | None = None
) -> Tensor:
    """Return the id of each token's largest logit, the smallest id if several are equal; NaN counts as the largest.

    One all-gather of 8 bytes per token and rank (16 for fp64 logits); no gradient.

    Args:
        logits: ``[..., v/t]``, this rank's part of the vocabulary; not modified.
        group, vocab_size, padded_vocab_size: as in ``vocab_parallel_cross_entropy``.

    Returns:
        int64 ids ``[...]``, the same on every rank.

    Raises:
        ShardingError: the shard does not fit the vocabulary.
    """
    ranges = vocab_ranges(logits.size(-1), vocab_size, padded_vocab_size, group)
    start, stop = ranges[group.rank()]
    flat = flat_rows(logits)[:, : stop - start]
    # PyTorch's argmax returns the first of equal values.
    columns = flat.argmax(dim=1, keepdim=True) if stop > start else flat.new_zeros(flat.shape, dtype=torch.long)
    values = flat.gather(1, columns).to(compute_dtype(logits.dtype))
    sizes = [min(1, last - first) for first, last in ranges]
    values, ids = _gather_candidates(values, columns + start, sizes, group)
    return ids.gather(1, values.argmax(dim=1, keepdim=True)).view(logits.shape[:-1])
