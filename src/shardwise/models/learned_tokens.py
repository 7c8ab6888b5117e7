"""The tokens whose loss counts, so that the output layer computes no logits that nobody reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.loss.vocabulary import IGNORE_INDEX

# Taking rows out and putting their gradients back costs less than the products of a tenth of them.
_MOST = 0.9

LossOf = Callable[[Tensor, Tensor], Tensor]
"""From hidden states ``[s, b, h]`` and labels ``[b, s]`` the loss of each token, ``[b, s]``."""


def places_learned(labels: Tensor, vocab_size: int) -> Tensor | None:
    """Where the labels are that count, in ``labels.t().flatten()``.

    Args:
        labels: ``[b, s]``.
        vocab_size: of the whole vocabulary.

    Returns:
        ``[n]`` of at least one place; None where all tokens are to be computed: most of them count; some label is out
        of range, which the loss says with its place; or the host would have to wait for a GPU to know.
    """
    if labels.device.type != "cpu" or torch.compiler.is_compiling() or not labels.numel():
        return None
    flat = labels.t().flatten()
    counts = flat != IGNORE_INDEX
    if not torch.equal(counts, (flat >= 0) & (flat < vocab_size)):
        return None
    places = counts.nonzero().squeeze(1)
    if len(places) > _MOST * len(flat):
        return None
    # One that does not count stands for none at all, so that every rank's backward communicates as usual.
    return places if len(places) else places.new_zeros(1)


def loss_of_places(loss_of: LossOf, hidden: Tensor, labels: Tensor, places: Tensor) -> Tensor:
    """``loss_of(hidden, labels)`` where only the tokens at ``places`` have a loss other than 0.

    Args:
        loss_of: of any number of tokens.
        hidden: ``[s, b, h]``; not modified.
        labels: ``[b, s]``.
        places: of ``places_learned``.

    Returns:
        ``[b, s]``.
    """
    s, b, _ = hidden.shape
    rows = hidden.flatten(0, 1).index_select(0, places)
    some = loss_of(rows.unsqueeze(1), labels.t().flatten()[places].unsqueeze(0))
    return some.new_zeros(s * b).index_copy(0, places, some.squeeze(0)).view(s, b).t().contiguous()
