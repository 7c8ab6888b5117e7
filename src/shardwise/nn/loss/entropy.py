"""Entropy of distributions over a split vocabulary, and the Kullback-Leibler divergence between two of them.

For the entropy each rank sends ``m_r = max y``, ``s_r = Σ exp(y - m_r)`` and ``u_r = Σ exp(y - m_r) (y - m_r)``. With
``M`` the largest ``m_r``, ``b_r = m_r - M``, ``S = Σ s_r exp(b_r)`` and ``U = Σ (u_r + b_r s_r) exp(b_r)``::

    H = log S - U / S                ∂H/∂y = -p (y - M - U / S)

For the divergence between predicted logits ``x`` (distribution ``p``) and the teacher's ``t`` (``q``), each rank sends
both maxima, both sums of exponentials, and ``c_r = Σ exp(t - m_t,r) ((t - m_t,r) - (x - m_x,r))``. With ``b = m_r - M``
for each of the two and ``C = Σ (c_r + (b_t - b_x) s_t,r) exp(b_t)``::

    D = C / S_t - log S_t + log S_x        ∂D/∂x = p - q        ∂D/∂t = q (log q - log p - D)
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.errors import ShardingError
from shardwise.core.layout import I, V
from shardwise.core.typed import check_move
from shardwise.kernels.loss_reference import compute_dtype, finite, row_blocks, transformed
from shardwise.nn.loss.options import LossOptions
from shardwise.nn.loss.vocabulary import flat_rows, gather_statistics, vocab_ranges


class _VocabParallelEntropy(Function):
    @staticmethod
    def spmd_typecheck(outputs: Any, *, logits: Tensor, group: ProcessGroup) -> None:
        check_move(outputs, group, I, (logits, V(dim=-1)))

    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_valid: int, options: LossOptions, group: ProcessGroup) -> Tensor:
        flat = flat_rows(logits)[:, :num_valid]
        every = gather_statistics(_statistics(flat, options), group)
        maximum = every[..., 0].amax(dim=0)
        # An empty shard, or one with only -inf, has no finite maximum, and its sums are 0.
        below = (every[..., 0] - maximum).nan_to_num(neginf=0.0)
        share = below.exp()
        sum_exp = (share * every[..., 1]).sum(dim=0)
        mean = (share * (every[..., 2] + below * every[..., 1])).sum(dim=0) / sum_exp
        ctx.save_for_backward(logits, maximum, sum_exp, mean)
        ctx.num_valid = num_valid
        ctx.options = options
        return (sum_exp.log() - mean).view(logits.shape[:-1]).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        logits, maximum, sum_exp, mean = ctx.saved_tensors
        source = flat_rows(logits)
        result = torch.zeros_like(source)
        scale = grad_output.reshape(-1).to(sum_exp.dtype) / sum_exp
        for rows in row_blocks(source[:, : ctx.num_valid]):
            y, slope = transformed(source[rows, : ctx.num_valid], ctx.options.softcap, ctx.options.temperature)
            shifted = y - finite(maximum[rows]).unsqueeze(1)
            exponentials = shifted.exp()
            gradient = exponentials * (mean[rows].unsqueeze(1) - shifted) * scale[rows].unsqueeze(1)
            # The gradient of an id of probability 0 is 0, even if its logarithm is -inf.
            gradient = torch.where(exponentials == 0, 0.0, gradient)
            result[rows, : ctx.num_valid] = (gradient if slope is None else gradient * slope).to(result.dtype)
        return result.view(logits.shape), None, None, None


def _statistics(flat: Tensor, options: LossOptions) -> Tensor:
    """Return ``[n, 3]``: maximum, sum of exponentials, and their sum weighted by the differences from the maximum."""
    statistics = torch.zeros(flat.size(0), 3, dtype=compute_dtype(flat.dtype), device=flat.device)
    if flat.size(1) == 0:
        statistics[:, 0] = -torch.inf
        return statistics
    for rows in row_blocks(flat):
        y, _ = transformed(flat[rows], options.softcap, options.temperature)
        maximum = y.amax(dim=1)
        shifted = y - finite(maximum).unsqueeze(1)
        exponentials = shifted.exp()
        out = statistics[rows]
        out[:, 0] = maximum
        out[:, 1] = exponentials.sum(dim=1)
        out[:, 2] = torch.where(exponentials == 0, 0.0, exponentials * shifted).sum(dim=1)
    return statistics


def vocab_parallel_entropy(
    logits: Tensor,
    *,
    group: ProcessGroup,
    vocab_size: int,
    softcap: float | None = None,
    temperature: float = 1.0,
    padded_vocab_size: int | None = None,
) -> Tensor:
    """Compute the entropy ``-Σ p log p`` of each token's distribution, in nats.

    Layout V -> I: one all-gather of 12 bytes per token and rank (24 for fp64 logits), none in the backward.

    Args:
        logits: ``[..., v/t]``, this rank's part of the vocabulary; not modified. -inf forbids an id.
        group, vocab_size, padded_vocab_size, softcap, temperature: as in ``vocab_parallel_cross_entropy``.

    Returns:
        ``[...]``, fp32 (fp64 for fp64 logits), the same on every rank.

    Raises:
        ConfigError: an option is out of range.
        ShardingError: the shard does not fit the vocabulary.
    """
    options = LossOptions(softcap=softcap, temperature=temperature)
    start, stop = vocab_ranges(logits.size(-1), vocab_size, padded_vocab_size, group)[group.rank()]
    entropy: Tensor = _VocabParallelEntropy.apply(logits, stop - start, options, group)
    return entropy


class _VocabParallelKLDiv(Function):
    @staticmethod
    def spmd_typecheck(outputs: Any, *, logits: Tensor, teacher: Tensor, group: ProcessGroup) -> None:
        check_move(outputs, group, I, (logits, V(dim=-1)), (teacher, V(dim=-1)))

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Tensor, num_valid: int, options: LossOptions, group: ProcessGroup
    ) -> Tensor:
        flat, flat_teacher = (flat_rows(x)[:, :num_valid] for x in (logits, teacher))
        every = gather_statistics(_kl_statistics(flat, flat_teacher, options), group)
        maximum, of_teacher = every[..., 0].amax(dim=0), every[..., 1].amax(dim=0)
        # An empty shard, or one with only -inf, has no finite maximum, and its sums are 0.
        below = (every[..., 0] - maximum).nan_to_num(neginf=0.0)
        teacher_below = (every[..., 1] - of_teacher).nan_to_num(neginf=0.0)
        sum_exp = (below.exp() * every[..., 2]).sum(dim=0)
        teacher_sum = (teacher_below.exp() * every[..., 3]).sum(dim=0)
        cross = every[..., 4] + (teacher_below - below) * every[..., 3]
        # log q - log p is the difference of the two logits plus this.
        offset = sum_exp.log() - teacher_sum.log()
        divergence = (teacher_below.exp() * cross).sum(dim=0) / teacher_sum + offset
        ctx.save_for_backward(logits, teacher, maximum, of_teacher, sum_exp, teacher_sum, offset, divergence)
        ctx.num_valid = num_valid
        ctx.options = options
        # The caller may modify the result in place, and the divergence is saved for the backward.
        return divergence.view(logits.shape[:-1]).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        logits, teacher, *numbers = ctx.saved_tensors
        dtype = numbers[0].dtype
        numbers = [x.unsqueeze(1) for x in (*numbers, grad_output.reshape(-1).to(dtype))]
        maximum, of_teacher, sum_exp, teacher_sum, offset, divergence, incoming = numbers
        flat, flat_teacher = flat_rows(logits), flat_rows(teacher)
        results = [
            torch.zeros_like(x) if needed else None
            for x, needed in zip((flat, flat_teacher), ctx.needs_input_grad, strict=False)
        ]
        options, valid = ctx.options, slice(0, ctx.num_valid)
        for rows in row_blocks(flat[:, valid]):
            y, slope = transformed(flat[rows, valid], options.softcap, options.temperature)
            z, teacher_slope = transformed(flat_teacher[rows, valid], options.softcap, options.temperature)
            y, z = y - finite(maximum[rows]), z - finite(of_teacher[rows])
            q = z.exp() / teacher_sum[rows]
            if results[0] is not None:
                gradient = (y.exp() / sum_exp[rows] - q) * incoming[rows]
                results[0][rows, valid] = (gradient if slope is None else gradient * slope).to(logits.dtype)
            if results[1] is not None:
                gradient = q * (z - y + offset[rows] - divergence[rows]) * incoming[rows]
                gradient = torch.where(q == 0, 0.0, gradient)
                gradient = gradient if teacher_slope is None else gradient * teacher_slope
                results[1][rows, valid] = gradient.to(teacher.dtype)
        of_logits, of_teacher_logits = results
        return (
            None if of_logits is None else of_logits.view(logits.shape),
            None if of_teacher_logits is None else of_teacher_logits.view(teacher.shape),
            None,
            None,
            None,
        )


def _kl_statistics(flat: Tensor, teacher: Tensor, options: LossOptions) -> Tensor:
    """Return ``[n, 5]``: both maxima, both sums of exponentials (the teacher's second), and the mixed sum."""
    dtype = torch.promote_types(compute_dtype(flat.dtype), compute_dtype(teacher.dtype))
    statistics = torch.zeros(flat.size(0), 5, dtype=dtype, device=flat.device)
    if flat.size(1) == 0:
        statistics[:, :2] = -torch.inf
        return statistics
    for rows in row_blocks(flat):
        y, _ = transformed(flat[rows], options.softcap, options.temperature)
        z, _ = transformed(teacher[rows], options.softcap, options.temperature)
        maximum, of_teacher = y.amax(dim=1), z.amax(dim=1)
        y, z = y - finite(maximum).unsqueeze(1), z - finite(of_teacher).unsqueeze(1)
        q = z.exp()
        out = statistics[rows]
        out[:, 0] = maximum
        out[:, 1] = of_teacher
        out[:, 2] = y.exp().sum(dim=1)
        out[:, 3] = q.sum(dim=1)
        # An id that the teacher forbids adds nothing, even if it is predicted.
        out[:, 4] = torch.where(q == 0, 0.0, q * (z - y)).sum(dim=1)
    return statistics


def vocab_parallel_kl_div(
    logits: Tensor,
    teacher_logits: Tensor,
    *,
    group: ProcessGroup,
    vocab_size: int,
    softcap: float | None = None,
    temperature: float = 1.0,
    padded_vocab_size: int | None = None,
) -> Tensor:
    """Compute the divergence ``Σ q (log q - log p)`` of each token's prediction ``p`` from the teacher's ``q``.

    Layout V -> I: one all-gather of 20 bytes per token and rank (40 if either is fp64), none in the backward. Both
    arguments get gradients. Swap them for the divergence in the other direction.

    Args:
        logits, teacher_logits: ``[..., v/t]``, this rank's part of the vocabulary; not modified. -inf forbids an id.
        group, vocab_size, padded_vocab_size: as in ``vocab_parallel_entropy``.
        softcap, temperature: as in ``vocab_parallel_entropy``, for both logits.

    Returns:
        ``[...]``, fp32 (fp64 if either is fp64), the same on every rank; infinite where the teacher gives probability
        to an id that ``logits`` forbid.

    Raises:
        ConfigError: an option is out of range.
        ShardingError: the two shapes differ, or the shard does not fit the vocabulary.
    """
    if logits.shape != teacher_logits.shape:
        raise ShardingError(
            f"logits {list(logits.shape)} and teacher_logits {list(teacher_logits.shape)} must have the same shape"
        )
    options = LossOptions(softcap=softcap, temperature=temperature)
    start, stop = vocab_ranges(logits.size(-1), vocab_size, padded_vocab_size, group)[group.rank()]
    divergence: Tensor = _VocabParallelKLDiv.apply(logits, teacher_logits, stop - start, options, group)
    return divergence
