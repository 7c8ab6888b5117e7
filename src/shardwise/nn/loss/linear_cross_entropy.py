"""Output layer and cross entropy in one, over a split vocabulary: the logits of all ranks never exist.

Two plans compute the same, with different memory:

- ``local_logits``: this rank's logits are kept, and their memory becomes the gradient's. Three matrix products.
- ``chunked``: a slice of the vocabulary at a time. Four matrix products, and beside the gradients little more than one
  slice of logits. Without a gradient of the weight it takes two products, as the other plan would, and without any
  gradient one.

Communication, beside what moves hidden states (an all-reduce of their gradient; with sequence parallelism their
all-gather, and a reduce-scatter of their gradient): one all-gather of 12 bytes per token and rank, 16 with label
smoothing, twice that for fp64. It is in flight while the hidden gradient is computed from this rank's softmax alone:
the softmax over the whole vocabulary is that one times a number per token, which is multiplied in afterwards
(``linear_local_logits`` has the formulas). Where no hidden gradient is wanted there is nothing to hide it behind.

Gradients are exact for every incoming gradient, one number per token: the hidden gradient is computed in the forward up
to that factor, the weight gradient in the backward.

Error, beside that of ``cross_entropy``: logits, and what stands in their place, are rounded to the weight's dtype, as
are both gradients; the hidden gradient three times. With bf16 that is 2^-9 relative each.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.trees import exact_parts
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sharding import balanced_sizes, uneven_sizes
from shardwise.kernels import products
from shardwise.nn.loss.checks import LossChecks
from shardwise.nn.loss.linear_chunked import ChunkedLoss
from shardwise.nn.loss.linear_head import Head
from shardwise.nn.loss.linear_local_logits import LocalLogitsLoss
from shardwise.nn.loss.options import LossOptions, Reduction
from shardwise.nn.loss.vocabulary import IGNORE_INDEX, columns_of, vocab_ranges

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
    """Cross entropy of ``hidden @ weight.T + bias`` of each token, without the logits of all ranks.

    Layout I -> I for ``hidden`` (V -> I with sequence parallelism), V for ``weight`` and ``bias``. Works under
    ``torch.compile(fullgraph=True)``, but for ``gradient_accumulation_fusion``.

    Args:
        hidden: ``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism, by the balanced rule), or any shape
            ``[..., h]``; not modified.
        weight: ``[v/t, h]``, this rank's part of the output weight, or of the embedding that is tied to it.
        target: ``[s, b]``, or ``[...]``: global ids of all tokens, the same on every rank.
        bias: ``[v/t]`` or None.
        group: the ranks that split the vocabulary, and with sequence parallelism the sequence.
        vocab_size: true size of the vocabulary.
        label_smoothing: as in ``vocab_parallel_cross_entropy``, and so are all options up to the plan that are not
            explained here.
        sequence_parallel: ``hidden`` is this rank's shard along the first dimension.
        gradient_accumulation_fusion: add the weight gradient to ``weight.main_grad`` in place of returning it.
        plan: ``"local_logits"``, ``"chunked"``, or ``"auto"``: the former if a weight gradient is wanted and the
            logits fit ``memory_budget``.
        memory_budget: bytes that this rank's logits may take. ``"chunked"`` makes its slices of it, but none wider
            than are efficient (8 MiB on a CPU, 64 MiB elsewhere), nor narrower than 256 columns.
        validate: check that targets are in the vocabulary, on CUDA without waiting for it (``validation.check_ids``);
            on a CPU, that they are the same on all ranks (which costs nothing where they are), and warn where a mean
            has no token.
        check_finite: look for NaN and inf in the logits, for tokens with every logit -inf and, on CUDA too, for targets
            that are not the same on all ranks.

    Returns:
        ``[s, b]``, or a scalar if reduced; fp32 (fp64 for fp64 hidden states), the same on every rank.

    Raises:
        ConfigError: an option out of range, tensors of different dtypes; in the backward, a missing ``main_grad``.
        ShardingError: shapes that do not match, or a shard that does not fit the vocabulary or the sequence.
        VocabularyError: a target is outside the vocabulary and not ``ignore_index``.
        DesyncError: the ranks have different targets; on every rank.
        DivergenceError: logits that are NaN, with ``check_finite``.
    """
    if exact_parts(group) is not None:
        raise ConfigError(
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
    """How many tokens each rank holds with sequence parallelism; None if all hold as many."""
    sizes = uneven_sizes(target.size(0), group.size())
    return None if sizes is None else [size * target.shape[1:].numel() for size in sizes]
