"""The loss over a split vocabulary with Megatron's name and arguments, based on ``shardwise.nn.loss``."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.kernels import loss_reference
from shardwise.megatron.core.parallel_state import resolve_tensor_model_parallel_group
from shardwise.megatron.errors import AssertedConfigError, asserting
from shardwise.nn.loss.cross_entropy import SplitCrossEntropy, cross_entropy_of_ranges
from shardwise.nn.loss.options import LossOptions, Reduction
from shardwise.nn.loss.vocabulary import IGNORE_INDEX, columns_of, vocab_ranges

__all__ = ["VocabParallelCrossEntropy", "vocab_parallel_cross_entropy"]


_options = asserting(AssertedConfigError)(LossOptions)


class VocabParallelCrossEntropy:
    """The local steps of the loss, for programs that insert their own communication between them.

    The program reduces the maximum over the ranks before ``calculate_predicted_logits``, and the predicted logits and
    the sum after it. No step modifies its arguments. For gradients, use ``vocab_parallel_cross_entropy``, which needs
    one collective.
    """

    @staticmethod
    def calculate_logits_max(vocab_parallel_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits ``[..., v/t]`` in fp32 (fp64 stays fp64), and their maximum ``[...]``."""
        logits = vocab_parallel_logits.to(loss_reference.compute_dtype(vocab_parallel_logits.dtype))
        return logits, logits.amax(dim=-1)

    @staticmethod
    def calculate_predicted_logits(
        vocab_parallel_logits: Tensor, target: Tensor, logits_max: Tensor, vocab_start_index: int, vocab_end_index: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Compute the contribution of this rank's part of the vocabulary.

        Args:
            vocab_parallel_logits: ``[..., v/t]``.
            target: ``[...]`` global ids.
            logits_max: ``[...]``, the maximum over all ranks.
            vocab_start_index: first id of this rank.
            vocab_end_index: last id of this rank plus 1.

        Returns:
            A mask ``[...]``, True where another rank has the target, the local target ``[n]`` (0 there), the target's
            logit minus the maximum ``[...]`` (0 there), the sum of exponentials ``[...]``, and the exponentials
            ``[..., v/t]``.
        """
        columns, _ = columns_of(target, (vocab_start_index, vocab_end_index), IGNORE_INDEX)
        rows = vocab_parallel_logits.reshape(columns.numel(), vocab_parallel_logits.size(-1))
        shifted, at_target = loss_reference.below_maximum(rows, logits_max.reshape(-1), columns)
        target_mask = (columns < 0).view(target.shape)
        predicted_logits = at_target.view(target.shape).masked_fill(target_mask, 0.0)
        exp_logits = shifted.exp_().view(vocab_parallel_logits.shape)
        return target_mask, columns.clamp(min=0), predicted_logits, exp_logits.sum(dim=-1), exp_logits

    @staticmethod
    def calculate_cross_entropy_loss(
        exp_logits: Tensor, predicted_logits: Tensor, sum_exp_logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute softmax ``[..., v/t]`` and loss ``[...]`` from exponentials and the sums over the ranks."""
        return exp_logits / sum_exp_logits.unsqueeze(-1), sum_exp_logits.log() - predicted_logits

    @staticmethod
    def prepare_gradient_calculation_operands(
        softmax: Tensor, target_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Prepare arguments of ``calculate_gradients``.

        Returns:
            The softmax as ``[n, v/t]``, the numbers 0 to ``n - 1``, ``[n]`` with 1 where this rank has the target and
            0 elsewhere, and the softmax ``[..., v/t]``.
        """
        grad_2d = softmax.reshape(-1, softmax.size(-1))
        arange_1d = torch.arange(grad_2d.size(0), device=softmax.device)
        return grad_2d, arange_1d, 1.0 - target_mask.reshape(-1).to(softmax.dtype), softmax

    @staticmethod
    def calculate_gradients(
        grad_2d: Tensor,
        arange_1d: Tensor,
        masked_target_1d: Tensor,
        softmax_update: Tensor,
        grad_input: Tensor,
        grad_output: Tensor,
    ) -> Tensor:
        """Return the logits' gradient ``[..., v/t]``: (softmax - 1 at the target) times ``grad_output`` ``[...]``."""
        gradient = grad_2d.index_put((arange_1d, masked_target_1d), -softmax_update, accumulate=True)
        return gradient.view(grad_input.shape).mul_(grad_output.unsqueeze(-1))


class _VocabParallelCrossEntropy(Function):
    """Megatron's autograd function: ``vocab_parallel_cross_entropy`` without its options."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        tp_group: ProcessGroup | None = None,
    ) -> Tensor:
        group = resolve_tensor_model_parallel_group(tp_group)
        return cross_entropy_of_ranges(
            [(0, vocab_parallel_logits.size(-1))] if group.size() == 1 else None,
            vocab_parallel_logits,
            target,
            _options(label_smoothing),
            Reduction("none", IGNORE_INDEX, None, True),
            group=group,
            function=partial(SplitCrossEntropy.forward, ctx),
        )

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return SplitCrossEntropy.backward(ctx, grad_output)[0], None, None, None


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
    *,
    vocab_size: int | None = None,
    padded_vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    reduction: str = "none",
    data_parallel_group: ProcessGroup | None = None,
    inplace_: bool = False,
    validate: bool = True,
    check_finite: bool = False,
) -> Tensor:
    """Compute the cross entropy of each token over a vocabulary that is split over the ranks.

    Layout V -> I: one all-gather of 12 bytes per token and rank in fp32 (16 with label smoothing), none in the
    backward. Other keywords and errors are the same as in ``shardwise.nn.loss.vocab_parallel_cross_entropy``.

    Args:
        vocab_parallel_logits: ``[s, b, v/t]``; not modified unless ``inplace_``.
        target: ``[s, b]`` global ids.
        label_smoothing: probability taken from the target and spread over all other ids of the true vocabulary.
        tp_group: tensor-parallel group; the ambient one if None.
        vocab_size: true size of the vocabulary. If None, all ranks must have the same number of logits per token, which
            one more row of 12 bytes (16) checks, and padding counts as ids.

    Returns:
        ``[s, b]``, or a scalar if reduced; fp32 (fp64 for fp64 logits), the same on every rank.

    Raises:
        TopologyError: no group is given and none is initialised.
        ConfigError: ``padded_vocab_size`` without ``vocab_size``.
        ShardingError: on every rank, if ranks have different numbers of logits per token without ``vocab_size``. On
            CUDA this is an assertion on the device, without a wait, and under torch.compile a RuntimeError.
    """
    group = resolve_tensor_model_parallel_group(tp_group)
    local_size = vocab_parallel_logits.size(-1)
    if vocab_size is None and padded_vocab_size is not None:
        raise ConfigError(
            f"padded_vocab_size is {padded_vocab_size}, and without vocab_size it is ambiguous; pass vocab_size= too"
        )
    if vocab_size is None and group.size() == 1:
        vocab_size = local_size
    return cross_entropy_of_ranges(
        None if vocab_size is None else vocab_ranges(local_size, vocab_size, padded_vocab_size, group),
        vocab_parallel_logits,
        target,
        _options(label_smoothing, z_loss, softcap, temperature),
        Reduction(reduction, ignore_index, data_parallel_group, validate),
        group=group,
        inplace_=inplace_,
        check_finite=check_finite,
    )
