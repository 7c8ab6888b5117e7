"""Cross entropy and log-probabilities over a split vocabulary, with one collective.

A logit ``x`` enters the softmax as ``y = softcap · tanh(x / softcap) / temperature``, which is ``x`` without options.
Rank ``r`` holds the logits of its part of the vocabulary, and sends three numbers per token::

    m_r = max y        s_r = Σ exp(y - m_r)        d_r = z - m_r

where ``z`` is the target's ``y`` (``d_r = -inf`` if the rank does not hold the target): 12 bytes, 24 for fp64 logits.
One all-gather sends these numbers to every rank. Each rank then computes

    M = max m_r        S = Σ s_r exp(m_r - M)        nll = log S - max_r (d_r + (m_r - M))

With label smoothing ``a`` each rank sends a fourth number, ``Σ (y - m_r)``. The loss is

    (1 - a) nll + a/(K-1) Σ_{i≠target} nll_i + z_loss (M + log S)²

over the true vocabulary of ``K`` ids. The backward needs no communication: with ``w = 1 + 2 z_loss (M + log S)`` and
``q`` the target distribution, ``∂loss/∂y = w exp(y - M) / S - q``. In the target's column two numbers near 1 may
cancel, so the gradient is computed there as ``expm1(-nll) + a + (w - 1) exp(-nll)``.

Error bound. ``M`` may be near 1e4, but no number near ``M`` is added to a number near 1. Let ``u`` be half a unit in
the last place of fp32 (6e-8; 1e-16 for fp64 logits), and take the logits as exact:

- each term of ``s_r``, and so their sum (all are positive), has a relative error of a few ``u`` plus ``u |y - m_r|``;
- ``log S`` has the relative error of ``S`` as absolute error, plus ``u log S``; the target's difference has ``u`` times
  the spread ``M - z``. So ``|error of nll| ≤ c u (1 + nll)`` with ``c`` about 10, for logits of any size;
- softcap and temperature round ``y``, which adds ``2 u max |y|``;
- the z-loss has a relative error of ``4 u``, plus an absolute error of ``u`` times its weight times ``M²``;
- the gradient is rounded to the logits' dtype once.

``kernels`` computes the two passes over the logits: one reads them, the other reads them and writes the gradient.

Preference losses are functions of two answers' log-probabilities relative to a reference model.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.core.layout import I, V
from shardwise.core.sharding import Interval
from shardwise.core.typed import check_move
from shardwise.kernels.dispatch import loss_kernels
from shardwise.nn.arithmetic import arithmetic_of
from shardwise.nn.loss.options import LossChecks, LossOptions, Reduction
from shardwise.nn.loss.vocabulary import (
    IGNORE_INDEX,
    check_target_shape,
    columns_between,
    columns_of,
    combine,
    equal_ranges,
    flat_rows,
    gather_statistics,
    vocab_ranges,
    with_size,
    without_sizes,
)


class SplitCrossEntropy(Function):
    """The two passes over the logits, and the communication between them; see the module."""

    @staticmethod
    def spmd_typecheck(outputs: Any, *, logits: Tensor, target: Tensor, group: ProcessGroup) -> None:
        check_move(outputs, group, I, (logits, V(dim=-1)), target=target)

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        ranges: list[Interval],
        options: LossOptions,
        ignore_index: int,
        inplace: bool,
        checks: LossChecks,
        sizes_are_known: bool,
        group: ProcessGroup,
    ) -> Tensor:
        own_ids = ranges[group.rank()]
        # The remaining columns are padding, which has no probability.
        flat = flat_rows(logits)[:, : own_ids[1] - own_ids[0]]
        target_local, ignored = columns_of(target, own_ids, ignore_index)
        arithmetic = arithmetic_of(group)
        columns, parts, size = arithmetic.parts_of_vocabulary(ranges, flat.size(0), group=group)

        def statistics(start: int, stop: int) -> Tensor:
            part, local = (
                flat[:, start:stop],
                target_local if len(columns) == 1 else columns_between(target_local, start, stop),
            )
            kernels, smooth = loss_kernels(part, softcap=options.softcap, size=size), options.label_smoothing > 0
            own = arithmetic.row_statistics(kernels, part, local, want_sum=smooth, **options.of_kernels)
            checks.mark_ignored_(own, ignored, group)
            return own if sizes_are_known else with_size(own, logits.size(-1))

        own = [statistics(*interval) for interval in columns]
        every = gather_statistics(own[0] if len(own) == 1 else torch.stack(own), group)
        if not sizes_are_known:
            every = without_sizes(every, logits.size(-1))
        checks.run(every, flat.__getitem__, target, ignored, own_ids, group)
        combined = combine(every, parts, ignored, options, arithmetic.activation)

        numbers = [combined.maximum, combined.weight, combined.at_target]
        rest = [] if combined.rest is None else [combined.rest]
        ctx.save_for_backward(logits, target_local, ignored, *numbers, *rest)
        ctx.num_valid, ctx.columns, ctx.size = flat.size(1), columns, size
        ctx.options = options
        # Under torch.compile the compiler plans memory.
        ctx.inplace = inplace and not torch.compiler.is_compiling()
        # Not a view, so that callers may modify the loss in place.
        return combined.loss.view(target.shape).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        logits, target_local, ignored, maximum, weight, at_target, *rest = ctx.saved_tensors
        source = flat_rows(logits)
        result = source if ctx.inplace else torch.empty_like(source)
        num_valid, options = ctx.num_valid, ctx.options
        incoming = grad_output.reshape(-1).to(maximum.dtype).masked_fill(ignored, 0.0)
        numbers = (maximum, incoming * weight, incoming * at_target, incoming * rest[0] if rest else None)
        for start, stop in ctx.columns:
            out, valid = result[:, start:stop], source[:, start:stop]
            local = target_local if len(ctx.columns) == 1 else columns_between(target_local, start, stop)
            loss_kernels(valid, out, softcap=options.softcap, size=ctx.size).gradient_(
                out, valid, local, *numbers, **options.of_kernels
            )
        if num_valid < result.size(1):
            result[:, num_valid:] = 0.0
        return result.view(logits.shape), *(None,) * 8


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
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
    inplace_: bool = False,
    validate: bool = True,
    check_finite: bool = False,
) -> Tensor:
    """Cross entropy of each token; see the module for the formula and its error.

    Layout V -> I: one all-gather of 12 bytes per token and rank in fp32 (16 with label smoothing), none in the
    backward.

    Args:
        logits: ``[..., v/t]``, this rank's part of the vocabulary.
        target: ``[...]`` global ids, the same on every rank.
        group: the ranks that split the vocabulary.
        vocab_size: true size of the vocabulary.
        label_smoothing: probability taken from the target and spread evenly over all other ids.
        z_loss: weight of the squared logarithm of the softmax's normalizer.
        softcap: bound of the logits, ``softcap · tanh(x / softcap)``; no bound if None.
        temperature: divisor of the (capped) logits.
        padded_vocab_size: size that was split, if padding was added; padded columns have no probability.
        ignore_index: target whose loss and gradient are 0.
        reduction: ``"none"``, ``"sum"``, or ``"mean"`` over the tokens that are not ignored.
        data_parallel_group: group whose tokens a mean counts. The results of its ranks add up to the mean over the
            whole batch, and so do their gradients. One all-reduce of 8 bytes.
        inplace_: whether the gradient may overwrite ``logits``, which the caller must not use again (ignored under
            torch.compile, which plans memory itself).
        validate: whether to check that targets are in the vocabulary, on CUDA without a synchronization
            (``validation.check_ids``). On a CPU, also compare the ranks' targets, which needs communication only if
            they differ, and warn if a mean has no tokens.
        check_finite: whether to look for NaN and inf in the logits, for tokens whose logits are all -inf and, also on
            CUDA, for targets that differ between ranks.

    Returns:
        ``[...]``, or a scalar if reduced; fp32 (fp64 for fp64 logits), the same on every rank.

    Raises:
        ConfigError: an option is out of range.
        ShardingError: the shapes of logits and target do not match, or the shard does not fit the vocabulary.
        VocabularyError: a target is outside the vocabulary and not ``ignore_index``.
        DesyncError: the ranks have different targets; on every rank.
        DivergenceError: with ``check_finite``, logits are NaN or inf, or all logits of a token are -inf.
    """
    return cross_entropy_of_ranges(
        vocab_ranges(logits.size(-1), vocab_size, padded_vocab_size, group),
        logits,
        target,
        LossOptions(label_smoothing, z_loss, softcap, temperature),
        Reduction(reduction, ignore_index, data_parallel_group, validate),
        group=group,
        inplace_=inplace_,
        check_finite=check_finite,
    )


def cross_entropy_of_ranges(
    ranges: list[Interval] | None,
    logits: Tensor,
    target: Tensor,
    options: LossOptions,
    reduction: Reduction,
    *,
    group: ProcessGroup,
    inplace_: bool = False,
    check_finite: bool = False,
    function: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Compute ``vocab_parallel_cross_entropy`` from every rank's range of ids.

    If ``ranges`` is None, each rank assumes that all shards have its own size, and the all-gather sends the sizes in
    one more row; ``vocabulary.without_sizes`` raises ShardingError on every rank if they differ. ``function`` is the
    implementation, ``SplitCrossEntropy.apply`` if None; in another autograd function's forward, pass its forward.
    """
    check_target_shape(logits, target)
    sizes_are_known = ranges is not None
    if ranges is None:
        ranges = equal_ranges(logits.size(-1), group)
    vocab_size = ranges[-1][1]
    if sizes_are_known:
        options.check_vocabulary(vocab_size)
        reduction.check_targets(target, vocab_size, group=group)
    checks = LossChecks(logits=check_finite, targets=reduction.validate)
    function = SplitCrossEntropy.apply if function is None else function
    ignored = reduction.ignore_index
    loss: Tensor = function(logits, target, ranges, options, ignored, inplace_, checks, sizes_are_known, group)
    if not sizes_are_known:
        # Not earlier: with different sizes, some ranks might reject a target and never reach the all-gather.
        reduction.check_targets(target, vocab_size, group=group)
    # The warning names the line that called this function's caller.
    return reduction.apply(loss, target, stacklevel=4)


def vocab_parallel_log_probs(
    logits: Tensor,
    ids: Tensor,
    *,
    group: ProcessGroup,
    vocab_size: int,
    softcap: float | None = None,
    temperature: float = 1.0,
    padded_vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    inplace_: bool = False,
    validate: bool = True,
) -> Tensor:
    """Return the log-probability of each id in ``ids``, for policy gradients, for example.

    Layout V -> I: one all-gather of 12 bytes per token and rank (24 for fp64 logits), none in the backward.

    Args:
        logits: ``[..., v/t]``, this rank's part of the vocabulary; not modified unless ``inplace_``.
        ids: ``[...]`` global ids, the same on every rank.
        group: the ranks that split the vocabulary.
        vocab_size: true size of the vocabulary.
        softcap: bound of the logits, ``softcap · tanh(x / softcap)``; no bound if None.
        temperature: divisor of the (capped) logits.
        padded_vocab_size: size that was split, if padding was added; padded columns have no probability.
        ignore_index: id whose result and gradient are 0.
        inplace_: whether the gradient may overwrite ``logits``, which the caller must not use again.
        validate: whether to check that ids are in the vocabulary and, on a CPU, that they are the same on all ranks.

    Returns:
        ``[...]``, fp32 (fp64 for fp64 logits), the same on every rank.

    Raises:
        ConfigError: an option is out of range.
        ShardingError: the shapes of logits and ids do not match, or the shard does not fit the vocabulary.
        VocabularyError: an id is outside the vocabulary and not ``ignore_index``.
        DesyncError: the ranks have different ids; on every rank.
    """
    return vocab_parallel_cross_entropy(
        logits,
        ids,
        group=group,
        softcap=softcap,
        temperature=temperature,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
        ignore_index=ignore_index,
        inplace_=inplace_,
        validate=validate,
    ).neg()


PreferenceKind = Literal["sigmoid", "robust", "hinge", "ipo"]


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    kind: PreferenceKind = "sigmoid",
    label_smoothing: float = 0.0,
    num_chosen: Tensor | None = None,
    num_rejected: Tensor | None = None,
) -> Tensor:
    """Compute the loss of each pair of answers, without a reward model.

    With ``d = chosen - rejected``, ``sigmoid`` is ``-(1 - e) log σ(beta d) - e log σ(-beta d)``. ``robust`` has ``+``
    before the second term, and is divided by ``1 - 2 e``. ``hinge`` is ``max(0, 1 - beta d)``. ``ipo`` is
    ``(d - 1 / (2 beta))²``, where ``chosen`` and ``rejected`` are means over the tokens of the answer.

    Args:
        chosen: ``[n]``, log-probability of each preferred answer under the model, minus that under the reference.
        rejected: ``[n]``, the same for the other answers.
        beta: strength of the constraint to the reference model.
        kind: kind of the loss.
        label_smoothing: ``e``, probability that a preference is labelled the wrong way round.
        num_chosen: ``[n]``, number of tokens of each preferred answer; for ``ipo``.
        num_rejected: ``[n]``, number of tokens of each other answer; for ``ipo``.

    Returns:
        ``[n]``.

    Raises:
        ConfigError: an option is out of range, the kind is unknown, or ``ipo`` has no numbers of tokens.

    Source: Rafailov et al. 2023 (arXiv:2305.18290), equation 7; robust: Chowdhury et al. 2024 (arXiv:2403.00409);
        hinge: Zhao et al. 2023 (arXiv:2305.10425); ipo: Azar et al. 2023 (arXiv:2310.12036), equation 17.
    """
    # Each condition is written so that NaN fails it.
    if not 0.0 < beta < math.inf:
        raise ConfigError(f"beta is {beta}; it must be over 0 and finite")
    if not 0.0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing is {label_smoothing}; it must be at least 0 and under 0.5")
    if label_smoothing and kind not in ("sigmoid", "robust"):
        raise ConfigError(f"label_smoothing is {label_smoothing}, and {kind!r} has none; use 'sigmoid' or 'robust'")
    if kind == "ipo":
        if num_chosen is None or num_rejected is None:
            raise ConfigError("ipo is of means over tokens; pass num_chosen and num_rejected")
        difference = chosen / num_chosen.clamp(min=1) - rejected / num_rejected.clamp(min=1)
        return (difference - 1 / (2 * beta)).square()
    scaled = beta * (chosen - rejected)
    if kind == "hinge":
        return torch.relu(1 - scaled)
    right, wrong = -F.logsigmoid(scaled), -F.logsigmoid(-scaled)
    if kind == "sigmoid":
        return (1 - label_smoothing) * right + label_smoothing * wrong
    if kind == "robust":
        return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    raise ConfigError(f"kind is {kind!r}; choose one of sigmoid, robust, hinge, ipo")
