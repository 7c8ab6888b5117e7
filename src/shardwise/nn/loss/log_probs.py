"""Log-probabilities of given ids over a split vocabulary."""

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.nn.loss.cross_entropy import vocab_parallel_cross_entropy
from shardwise.nn.loss.vocabulary import IGNORE_INDEX


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
    """Log-probability of each given id, as a policy gradient needs it.

    Layout V -> I: one all-gather of 12 bytes per token and rank (24 for fp64 logits), none in the backward.

    Args:
        logits: ``[..., v/t]``, this rank's part of the vocabulary; not modified unless ``inplace_``.
        ids: ``[...]`` global ids, the same on every rank.
        group: the ranks that split the vocabulary.
        vocab_size: true size of the vocabulary.
        softcap: bound of the logits, ``softcap · tanh(x / softcap)``; none if None.
        temperature: divides the (capped) logits.
        padded_vocab_size: size that was split, where padding was added; padded columns take no probability.
        ignore_index: an id whose result is 0, without gradient.
        inplace_: the caller gives up ``logits``: their memory becomes the gradient's.
        validate: check that ids are in the vocabulary and, on a CPU, that they are the same on all ranks.

    Returns:
        ``[...]``, fp32 (fp64 for fp64 logits), the same on every rank.

    Raises:
        ConfigError: an option out of range.
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
