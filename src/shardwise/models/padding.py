"""Padding masks ``[b, s]``, as users of ``transformers`` hold them: 1 or True for each token, 0 for padding."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.core.errors import ShardingError


def is_token(attention_mask: Tensor, b: int, s: int) -> Tensor:
    """The mask as bools, True for each token.

    Raises:
        ShardingError: its shape is not ``[b, s]``.
    """
    if attention_mask.shape != (b, s):
        raise ShardingError(
            f"the attention mask has shape {list(attention_mask.shape)}; it must be [{b}, {s}], 1 for each real "
            "token and 0 for padding"
        )
    return attention_mask != 0


def forbidden_keys(tokens: Tensor) -> Tensor:
    """``[b, s]``, True for tokens, to ``[b, 1, 1, s]``, True for keys that nobody may see."""
    return tokens.logical_not()[:, None, None, :]


def positions_of(tokens: Tensor) -> Tensor:
    """``[b, s]``: for each token how many tokens are before it; -1 for padding."""
    return (tokens.cumsum(dim=1) * tokens) - 1


class TokensFirst:
    """Moves the tokens of each row to its front, in their order, and what is computed of them back.

    Behind all tokens of its row, padding is seen by no token under causal attention: no mask is needed, which would be
    of ``[b, 1, s, s]``, and attention may use any kernel.

    Args:
        tokens: ``[b, s]`` bools, True for tokens.

    Attributes:
        order: ``[b, s]``: where each element was.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.order = tokens.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        self._back = self.order.argsort(dim=1)

    def move(self, rows: Tensor) -> Tensor:
        """``[b, s]`` in the new order."""
        return rows.gather(1, self.order)

    def place_of(self, places: Tensor) -> Tensor:
        """``[b]``, a place in each row, to where it is in the new order."""
        return self._back.gather(1, places.unsqueeze(1)).squeeze(1)

    def move_back(self, rows: Tensor) -> Tensor:
        """``[b, s]`` in the order of the input."""
        return rows.gather(1, self._back)

    def move_sequence_back(self, sequence: Tensor) -> Tensor:
        """``[s, b, n]`` in the order of the input."""
        return sequence.gather(0, self._back.t().unsqueeze(-1).expand_as(sequence))
