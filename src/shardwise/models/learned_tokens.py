"""The tokens whose loss counts, so that the output layer computes no logits that nobody reads."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.nn import viewless
from shardwise.nn.loss.vocabulary import IGNORE_INDEX

# Taking rows out and putting their gradients back costs less than the products of a tenth of them.
_MOST = 0.9


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


def tokens_at(places: Tensor, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens at ``places``, as one sample.

    Args:
        places: ``[n]``, of ``places_learned``.
        hidden: ``[s, b, h]``; not modified.
        labels: ``[b, s]``.

    Returns:
        Hidden states ``[n, 1, h]`` and labels ``[1, n]``.
    """
    return hidden.flatten(0, 1).index_select(0, places).unsqueeze(1), labels.t().flatten()[places].unsqueeze(0)


def losses_at(places: Tensor, losses: Tensor, shape: torch.Size) -> Tensor:
    """Losses ``[1, n]`` at ``places`` of ``shape``, ``[b, s]``, and 0 elsewhere."""
    b, s = shape
    return viewless(losses.new_zeros(s * b).index_copy(0, places, losses.squeeze(0)).view(s, b).t().contiguous())
