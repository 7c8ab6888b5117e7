"""Checks of values, in one place; each costs a look at the data, so each can be turned off."""

import torch
from torch import Tensor

from shardwise.errors import VocabularyError


def validation_applies() -> bool:
    """Whether values can be looked at now: not while compiling, nor while a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def check_ids(ids: Tensor, vocab_size: int, *, what: str, ignore_index: int | None = None) -> None:
    """Raise VocabularyError for ids that are no integers or, where ``validation_applies``, outside the vocabulary.

    Args:
        ids: integer tensor of any shape.
        vocab_size: ids run from 0 to ``vocab_size - 1``.
        what: what the ids are, for the message.
        ignore_index: one more id that is allowed.
    """
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise VocabularyError(f"{what} of shape {list(ids.shape)} is of {ids.dtype}; ids are of an integer dtype")
    if ids.numel() == 0 or not validation_applies():
        return
    wrong = (ids < 0) | (ids >= vocab_size)
    if ignore_index is not None:
        wrong &= ids != ignore_index
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        allowed = "" if ignore_index is None else f" (and is not ignore_index {ignore_index})"
        raise VocabularyError(
            f"{what} {int(ids[where])} at position {list(where)} is outside the vocabulary of {vocab_size} ids{allowed}"
        )
