"""Output layer and cross entropy in one function, over a split vocabulary. The logits of all ranks never exist.

Two plans compute the same result with different memory:

- ``local_logits`` keeps this rank's logits, and the gradient reuses their memory. Three matrix products.
- ``chunked`` computes one slice of the vocabulary at a time. Four matrix products, and little more memory than the
  gradients and one slice of logits. Without a weight gradient either plan takes two products, and without any gradient
  one.

Communication: one all-gather of 12 bytes per token and rank, 16 with label smoothing, twice that for fp64. The gradient
of the hidden states needs an all-reduce; with sequence parallelism they need an all-gather, and their gradient a
reduce-scatter. The all-gather of the loss overlaps with the computation of the hidden gradient from this rank's softmax
alone. The softmax over the whole vocabulary is that softmax times one number per token, which is multiplied in
afterwards (``linear_head`` has the formulas). Without a hidden gradient the all-gather overlaps with nothing.

Gradients are exact for every incoming gradient, one number per token. The forward computes the hidden gradient up to
that factor, and the backward the weight gradient.

Error, in addition to that of ``cross_entropy``: logits, their exponentials and both gradients are rounded to the
weight's dtype, the hidden gradient three times. With bf16 each rounding is 2^-9 relative.

The chunked forward computes for each slice the logits, their statistics, and the product of their exponentials with the
weight, summed under a running maximum as in online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). The
statistics are gathered while the last slice's product is computed. The hidden gradient then lacks only the incoming
factor of each token.

The chunked backward overlaps with the reduction of the hidden gradient. It computes for each slice the logits again,
their gradient in the same memory, and the slice's rows of the weight gradient, each written once. (Slices of tokens
would add to the whole weight gradient each time, and accumulation in fp32 would need a second tensor of its size.)
Without a weight gradient the backward computes no product.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sharding import Interval, balanced_sizes, intervals_of_sizes, uneven_sizes
from shardwise.kernels import products
from shardwise.kernels.dispatch import loss_kernels
from shardwise.kernels.host_memory import empty_in_huge_pages
from shardwise.kernels.loss_reference import compute_dtype, finite
from shardwise.kernels.products import add_product_, main_grad_of, placeholder
from shardwise.nn.arithmetic import arithmetic_of
from shardwise.nn.loss.linear_head import Head, LocalLogitsLoss, check_layouts, finished_hidden_gradient, times_rows
from shardwise.nn.loss.options import LossChecks, LossOptions, Reduction
from shardwise.nn.loss.vocabulary import IGNORE_INDEX, columns_between, columns_of, vocab_ranges

# Bytes of one slice of logits: enough columns for an efficient product on the device.
_SLICE_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
_MIN_COLUMNS = 256


class ChunkedLoss(Function):
    """Loss of each token, ``[n]``, from hidden states ``[n, h]``."""

    spmd_typecheck = staticmethod(check_layouts)

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        target_local: Tensor,
        ignored: Tensor,
        head: Head,
        max_bytes: int,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden = head.gathered(hidden)
        options = head.options
        smooth, capped = options.label_smoothing > 0, options.softcap is not None
        own: Tensor | None = None
        gather = product = sums = None
        ctx.slices = _slices(hidden, head.num_valid, max_bytes)
        for start, stop in ctx.slices:
            logits = _logits(hidden, weight, bias, start, stop)
            local = columns_between(target_local, start, stop)
            kernels = loss_kernels(logits, softcap=options.softcap)
            later = kernels.row_statistics(logits, local, want_sum=smooth, **head.options.of_kernels)
            before = own
            own = later if before is None else merged_statistics(before, later, start, stop - start)
            if stop == head.num_valid:
                # The gather is in flight during the last slice's product.
                gather = head.start_gather(own, ignored)
            if needs_hidden:
                maximum = own[:, 0]
                ones, zeros = torch.ones_like(maximum), torch.zeros_like(maximum)
                if smooth and capped:
                    # The smoothing term of each column is multiplied by the column's slope.
                    slopes, nowhere = torch.empty_like(logits), torch.full_like(local, -1)
                    kernels.gradient_(slopes, logits, nowhere, maximum, zeros, zeros, -ones, **head.options.of_kernels)
                    sums = _plus_product(sums, slopes, weight[start:stop])
                    del slopes
                kernels.gradient_(logits, logits, local, maximum, ones, zeros, **head.options.of_kernels)
                if before is not None and product is not None:
                    product.mul_((before[:, 0] - finite(maximum)).exp().unsqueeze(1))
                product = _plus_product(product, logits, weight[start:stop])
            # Free this slice's logits before the next slice's are allocated.
            del logits
        assert own is not None
        assert gather is not None
        combined = head.combined(gather.wait(), target, ignored, hidden, weight, bias)

        factor = combined.weight * (own[:, 0] - combined.maximum).exp()
        at_target, rest = combined.at_target, combined.rest
        grad_hidden, valid_weight = None, weight[: head.num_valid]
        if product is not None:
            if rest is not None:
                at_target = at_target + rest
                if sums is None:
                    rest = rest / options.temperature
                    sums = valid_weight.sum(dim=0, dtype=factor.dtype)
            at_target = at_target * head.target_slope(own)
            grad_hidden = finished_hidden_gradient(product, valid_weight, target_local, factor, at_target, rest, sums)
        if needs_weight or needs_bias:
            numbers = (target_local, own[:, 0], factor, combined.at_target, combined.rest)
            ctx.save_for_backward(grad_hidden, hidden, weight, bias, *numbers)
        else:
            ctx.save_for_backward(grad_hidden)
        ctx.head = head
        return combined.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad_hidden, *saved = ctx.saved_tensors
        head: Head = ctx.head
        needs_hidden = ctx.needs_input_grad[0]
        grad_output = grad_output.to(compute_dtype(grad_output.dtype))
        grad_weight = grad_bias = pending = None
        if needs_hidden:
            pending = head.start_reduction(times_rows(grad_hidden, grad_output))
        if saved:
            # This overlaps with the reduction of the hidden gradient.
            grad_weight, grad_bias = _weight_gradients(ctx, grad_output, saved)
        if needs_hidden:
            assert pending is not None
            grad_hidden = pending.wait()
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _weight_gradients(ctx: Any, grad_output: Tensor, saved: list[Any]) -> tuple[Tensor | None, Tensor | None]:
    hidden, weight, bias, target_local, maximum, factor, at_target, rest = saved
    _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    head: Head = ctx.head
    fuses = head.main_grad_weight is not None
    grad_weight = empty_in_huge_pages(weight.shape, weight) if needs_weight and not fuses else None
    main_grad = main_grad_of(head.main_grad_weight) if needs_weight and head.main_grad_weight is not None else None
    grad_bias = torch.zeros_like(bias) if needs_bias and bias is not None else None
    factor, at_target = grad_output * factor, grad_output * at_target
    rest = None if rest is None else grad_output * rest
    for start, stop in ctx.slices:
        logits = _logits(hidden, weight, bias, start, stop)
        local = columns_between(target_local, start, stop)
        kernels = loss_kernels(logits, softcap=head.options.softcap)
        kernels.gradient_(logits, logits, local, maximum, factor, at_target, rest, **head.options.of_kernels)
        if grad_weight is not None:
            torch.mm(logits.t(), hidden, out=grad_weight[start:stop])
        elif main_grad is not None:
            add_product_(main_grad[start:stop], logits, hidden)
        if grad_bias is not None:
            grad_bias[start:stop] = logits.sum(dim=0, dtype=factor.dtype)
        del logits
    if grad_weight is not None:
        grad_weight[head.num_valid :] = 0.0
    elif needs_weight and head.main_grad_weight is not None:
        grad_weight = placeholder(head.main_grad_weight)
    return grad_weight, grad_bias


def merged_statistics(before: Tensor, later: Tensor, num_before: int, num_later: int) -> Tensor:
    """Merge the statistics of ``num_before`` columns and of ``num_later`` further columns."""
    maximum = torch.maximum(before[:, 0], later[:, 0])
    base = finite(maximum)
    down_before, down_later = before[:, 0] - base, later[:, 0] - base
    numbers = [
        maximum,
        before[:, 1] * down_before.exp() + later[:, 1] * down_later.exp(),
        torch.maximum(before[:, 2] + down_before, later[:, 2] + down_later),
    ]
    if before.size(1) == 4:
        numbers.append(before[:, 3] + num_before * down_before + later[:, 3] + num_later * down_later)
    return torch.stack(numbers, dim=1)


def _slices(hidden: Tensor, num_columns: int, max_bytes: int) -> tuple[Interval, ...]:
    """Split the columns into intervals of about equal size, which are computed one after the other."""
    of_device = _SLICE_BYTES.get(hidden.device.type, _SLICE_BYTES["cuda"])
    column_bytes = max(hidden.size(0) * hidden.element_size(), 1)
    columns = max(min(max_bytes, of_device) // column_bytes, _MIN_COLUMNS)
    num_slices = max(1, -(-num_columns // columns))
    return intervals_of_sizes(balanced_sizes(num_columns, num_slices))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
    bias = None if bias is None else bias[start:stop]
    return products.linear_in_aligned_rows(hidden, weight[start:stop], bias)


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return ``total + left @ right``, in fp32 (fp64 for fp64 factors); may overwrite ``total``."""
    dtype = compute_dtype(left.dtype)
    if total is None:
        total = left.new_zeros(left.size(0), right.size(1), dtype=dtype)
    if left.dtype == dtype:
        return total.addmm_(left, right)
    if left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    # A CPU rounds each slice's product before it is added, because narrow products are several times as fast.
    return total.add_(left.mm(right))


Plan = Literal["auto", "local_logits", "chunked"]
_PLANS = ("auto", "local_logits", "chunked")

MEMORY_BUDGET = 2 << 30


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    group: ProcessGroup,
    vocab_size: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    padded_vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "none",
    data_parallel_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation_fusion: bool = False,
    plan: Plan = "auto",
    memory_budget: int = MEMORY_BUDGET,
    validate: bool = True,
    check_finite: bool = False,
) -> Tensor:
    """Compute the cross entropy of each token from logits ``hidden @ weight.T + bias``, without all ranks' logits.

    Layout I -> I for ``hidden`` (V -> I with sequence parallelism), V for ``weight`` and ``bias``. Works under
    ``torch.compile(fullgraph=True)``, except with ``gradient_accumulation_fusion``.

    Args:
        hidden: ``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism, by the balanced rule), or any shape
            ``[..., h]``; not modified.
        weight: ``[v/t, h]``, this rank's part of the output weight, or of the embedding that is tied to it.
        target: ``[s, b]``, or ``[...]``: global ids of all tokens, the same on every rank.
        bias: ``[v/t]`` or None.
        group: the ranks that split the vocabulary and, with sequence parallelism, the sequence.
        vocab_size: true size of the vocabulary.
        sequence_parallel: whether ``hidden`` is this rank's shard along the first dimension.
        gradient_accumulation_fusion: whether to add the weight gradient to ``weight.main_grad`` instead of returning
            it.
        plan: ``"local_logits"``, ``"chunked"``, or ``"auto"``: the former if a weight gradient is needed and the
            logits fit ``memory_budget``.
        memory_budget: maximum bytes of this rank's logits. The slices of ``"chunked"`` stay within it and within an
            efficient size (8 MiB on a CPU, 64 MiB elsewhere), but have at least 256 columns.
        label_smoothing and all other options: as in ``vocab_parallel_cross_entropy``.

    Returns:
        ``[s, b]``, or a scalar if reduced; fp32 (fp64 for fp64 hidden states), the same on every rank.

    Raises:
        ConfigError: an option is out of range, or tensors have different dtypes; in the backward, ``main_grad`` is
            missing.
        ShardingError: shapes do not match, or the shard does not fit the vocabulary or the sequence.
        VocabularyError: a target is outside the vocabulary and not ``ignore_index``.
        DesyncError: the ranks have different targets; on every rank.
        DivergenceError: with ``check_finite``, logits are NaN or inf, or all logits of a token are -inf.
    """
    arithmetic_of(group).refuse(
        "exact: output layer and loss in one have no sum over parts; call the output layer and "
        "vocab_parallel_cross_entropy one after the other"
    )
    options = LossOptions(label_smoothing, z_loss, softcap, temperature)
    reduces = Reduction(reduction, ignore_index, data_parallel_group, validate)
    if plan not in _PLANS:
        raise ConfigError(f"plan is {plan!r}; choose one of {', '.join(_PLANS)}")
    sequence_parallel = sequence_parallel and group.size() > 1
    _check_shapes(hidden, weight, bias, target, sequence_parallel, group)
    ranges = vocab_ranges(weight.size(0), vocab_size, padded_vocab_size, group)
    options.check_vocabulary(ranges[-1][1])
    reduces.check_targets(target, ranges[-1][1], group=group)
    head = Head(
        ranges,
        options,
        sequence_parallel,
        _tokens_of_ranks(target, group) if sequence_parallel else None,
        weight if gradient_accumulation_fusion else None,
        LossChecks(logits=check_finite, targets=validate),
        group,
    )
    target_local, ignored = columns_of(target, head.own_ids, ignore_index)

    hidden = hidden.reshape(hidden.shape[:-1].numel(), hidden.size(-1))
    if torch.is_autocast_enabled(hidden.device.type):
        hidden, weight, bias = products.autocast(hidden, weight, bias)
    if not hidden.dtype == weight.dtype == (weight if bias is None else bias).dtype:
        raise ConfigError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}{'' if bias is None else f', bias {bias.dtype}'}; they "
            "must be of one dtype"
        )
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    needs_weight = weight.requires_grad or (bias is not None and bias.requires_grad)
    if plan == "auto":
        logits_bytes = target.numel() * weight.size(0) * weight.element_size()
        plan = "local_logits" if needs_weight and logits_bytes <= memory_budget else "chunked"
    loss: Tensor
    if plan == "local_logits" and torch.is_grad_enabled():
        loss = LocalLogitsLoss.apply(hidden, weight, bias, target, target_local, ignored, head)
    else:
        loss = ChunkedLoss.apply(hidden, weight, bias, target, target_local, ignored, head, memory_budget)
    return reduces.apply(loss.view(target.shape), target, stacklevel=3)


def _check_shapes(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, sequence_parallel: bool, group: ProcessGroup
) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.size(-1) != weight.size(1):
        raise ShardingError(f"hidden {list(hidden.shape)} must end in the width of the weight {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShardingError(f"bias {list(bias.shape)} must have one number for each row of {list(weight.shape)}")
    tokens = list(target.shape)
    if sequence_parallel:
        if not tokens:
            raise ShardingError("a single token has no sequence to split; turn sequence_parallel off")
        tokens[0] = balanced_sizes(tokens[0], group.size())[group.rank()]
    if list(hidden.shape[:-1]) != tokens:
        share = f", of which rank {group.rank()} of {group.size()} has {tokens}" if sequence_parallel else ""
        raise ShardingError(
            f"hidden {list(hidden.shape)} must have a row for each of target {list(target.shape)}{share}"
        )


def _tokens_of_ranks(target: Tensor, group: ProcessGroup) -> Sequence[int] | None:
    """Return each rank's number of tokens with sequence parallelism; None if all ranks hold the same number."""
    sizes = uneven_sizes(target.size(0), group.size())
    return None if sizes is None else [size * target.shape[1:].numel() for size in sizes]
