"""Entropy of the predicted distribution over a split vocabulary.

Beside ``m_r = max y`` and ``s_r = Σ exp(y - m_r)`` each rank sends ``u_r = Σ exp(y - m_r) (y - m_r)``. With ``M`` the
largest ``m_r``, ``b_r = m_r - M``, ``S = Σ s_r exp(b_r)`` and ``U = Σ (u_r + b_r s_r) exp(b_r)``::

    H = log S - U / S                ∂H/∂y = -p (y - M - U / S)
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.kernels.loss_reference import compute_dtype, finite, row_blocks, transformed
from shardwise.nn.loss.combine import gather_statistics
from shardwise.nn.loss.options import LossOptions
from shardwise.nn.loss.vocabulary import flat_rows, vocab_ranges


class _VocabParallelEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_valid: int, options: LossOptions, group: ProcessGroup) -> Tensor:
        flat = flat_rows(logits)[:, :num_valid]
        every = gather_statistics(_statistics(flat, options), group)
        maximum = every[..., 0].amax(dim=0)
        # An empty or wholly forbidden shard has no maximum, and 0 in both sums.
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
            # An id of probability 0 adds nothing to the gradient, however small the logarithm.
            gradient = torch.where(exponentials == 0, 0.0, gradient)
            result[rows, : ctx.num_valid] = (gradient if slope is None else gradient * slope).to(result.dtype)
        return result.view(logits.shape), None, None, None


def _statistics(flat: Tensor, options: LossOptions) -> Tensor:
    """``[n, 3]``: maximum, sum of exponentials, and their sum weighted by the differences to the maximum."""
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
    """Entropy, in nats, of each token's distribution, ``-Σ p log p``.

    Layout V -> I: one all-gather of 12 bytes per token and rank (24 for fp64 logits), none in the backward.

    Args:
        logits: ``[..., v/t]``, this rank's part of the vocabulary; not modified. -inf forbids an id.
        group: the ranks that split the vocabulary.
        vocab_size: true size of the vocabulary.
        softcap: bound of the logits, ``softcap · tanh(x / softcap)``; none if None.
        temperature: divides the (capped) logits.
        padded_vocab_size: size that was split, where padding was added; padded columns take no probability.

    Returns:
        ``[...]``, fp32 (fp64 for fp64 logits), the same on every rank.

    Raises:
        ConfigError: an option out of range.
        ShardingError: the shard does not fit the vocabulary.
    """
    options = LossOptions(softcap=softcap, temperature=temperature)
    start, stop = vocab_ranges(logits.size(-1), vocab_size, padded_vocab_size, group)[group.rank()]
    entropy: Tensor = _VocabParallelEntropy.apply(logits, stop - start, options, group)
    return entropy
