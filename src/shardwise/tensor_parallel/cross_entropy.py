"""The door to ``shardwise.loss``: the loss over a split vocabulary, under the name and order that programs know."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.loss.cross_entropy import IGNORE_INDEX
from shardwise.loss.cross_entropy import vocab_parallel_cross_entropy as _cross_entropy
from shardwise.parallel_state import resolve_tensor_model_parallel_group

__all__ = ["vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
    *,
    vocab_size: int | None = None,
    padded_vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    validate: bool = True,
) -> Tensor:
    """Cross entropy of each token over a vocabulary split over the ranks.

    Layout V -> I: one all-gather of 12 bytes per token and rank in fp32 (16 with label smoothing), none in the
    backward.

    Args:
        vocab_parallel_logits: ``[s, b, v/t]``; not modified.
        target: ``[s, b]`` global ids.
        label_smoothing: probability taken from the target and spread over all other ids of the true vocabulary.
        tp_group: tensor-parallel group; the ambient one if None.
        vocab_size: true size of the vocabulary; ``v/t`` times the number of ranks if None.
        padded_vocab_size: size that was split, where padding was added; padded columns take no probability.
        ignore_index: a target that costs nothing and has no gradient.
        validate: check that targets are in the vocabulary (never under torch.compile or CUDA graphs).

    Returns:
        ``[s, b]``, fp32 (fp64 for fp64 logits), the same on every rank.

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: shapes that do not match, or a shard that does not fit the vocabulary.
        VocabularyError: a target outside the vocabulary that is not ``ignore_index``.
    """
    return _cross_entropy(
        vocab_parallel_logits,
        target,
        group=resolve_tensor_model_parallel_group(tp_group),
        label_smoothing=label_smoothing,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
        ignore_index=ignore_index,
        validate=validate,
    )
