"""The input of a model's forward pass, made once from its arguments.

Padding masks ``[b, s]`` follow ``transformers``: 1 or True for each token, 0 for padding.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sequence_view import SequenceView
from shardwise.models.transformer.core_attention import KeyValueCache, RowCache
from shardwise.models.transformer.masks import AttentionMask, document_lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelInput:
    """The input of a forward pass except hidden states. Nothing in it needs a gradient.

    Attributes:
        view: positions of this rank.
        num_samples: number of sequences, ``b``.
        ids: ``[b, s]``, or None on a stage that does not read them.
        positions: ``[s]`` or ``[b, s]``; None means 0 to ``s - 1``.
        labels: ``[b, s]``, those of this rank's positions, or None.
        tokens: ``[b, keys]`` bools, True for tokens; None without a padding mask.
        forbidden: bools of more dimensions, True where attention is forbidden, or None.
        documents: ``[b, s]``, the number of each token's document, or None.
        lengths: ``[b]``, number of tokens of each row before its padding, or None.
        cache: keys and values of earlier tokens, or None.
        moved: the move of each row's tokens to its front (``tokens_first``), or None.
    """

    view: SequenceView
    num_samples: int
    ids: Tensor | None
    positions: Tensor | None
    labels: Tensor | None
    tokens: Tensor | None = None
    forbidden: Tensor | None = None
    documents: Tensor | None = None
    lengths: Tensor | None = None
    cache: KeyValueCache | RowCache | None = None
    moved: TokensFirst | None = None

    @classmethod
    def of(
        cls,
        view: SequenceView,
        num_samples: int,
        ids: Tensor | None,
        positions: Tensor | None,
        mask: Tensor | None,
        labels: Tensor | None,
        *,
        skips_padding: bool = False,
        lengths: Tensor | None = None,
        cache: KeyValueCache | RowCache | None = None,
        **others: Any,
    ) -> ModelInput:
        """Create the input from the arguments of ``GPT.forward``.

        Args:
            view, num_samples, ids, positions, lengths, cache, others: see the class.
            mask: ``tokens`` or ``forbidden``.
            labels: ``[b, s]``, of whole sequences.
            skips_padding: whether default positions do not count padding.

        Raises:
            ShardingError: the mask, ``lengths`` or the labels have the wrong shape.
            ConfigError: a cache is given with context parallelism.
        """
        b, s = num_samples, view.whole_length
        if view.context is not None and cache is not None:
            raise ConfigError("generation has no context parallelism; build the model without Groups.cp")
        if mask is not None and mask.dim() == 2:
            others["tokens"] = is_token(mask, b, s + getattr(cache, "length", 0))
            if positions is None and skips_padding:
                positions = positions_of(others["tokens"])[:, -s:]
        else:
            others["forbidden"] = mask
        if view.context is not None and labels is not None:
            labels = view.context.own(labels, dim=1)
        if lengths is not None and lengths.shape != (b,):
            raise ShardingError(f"lengths have shape {list(lengths.shape)}; they must be [{b}], one for each row")
        values = {"ids": ids, "positions": positions, "labels": labels, "lengths": lengths, "cache": cache, **others}
        return cls(view=view, num_samples=b, **values)

    def tokens_first(self) -> ModelInput:
        """Move the tokens of each row to its front, if there is a padding mask and nothing depends on their places."""
        if self.tokens is None or self.cache is not None or self.documents is not None or self.view.context is not None:
            return self
        moved = TokensFirst(self.tokens)
        own = None if self.positions is None else self.positions.expand(self.num_samples, -1)
        return dataclasses.replace(
            self,
            moved=moved,
            ids=None if self.ids is None else moved.move(self.ids),
            positions=moved.order if own is None else moved.move(own),
            labels=None if self.labels is None else moved.move(self.labels),
            tokens=moved.move(self.tokens),
        )

    def attention_mask(self, slopes: Tensor | None, *, counts_tokens: bool) -> AttentionMask:
        """Return the mask of all layers.

        Args:
            slopes: ``[heads/t]``, ALiBi's slopes, or None.
            counts_tokens: whether ALiBi's distances do not count padding.
        """
        # Behind all tokens, padding needs no mask.
        hidden = self.tokens if self.moved is None else None
        return AttentionMask(
            self.forbidden if hidden is None else hidden.logical_not()[:, None, None, :],
            document_ids=self.documents,
            alibi_slopes=slopes,
            key_positions=None if hidden is None or slopes is None or not counts_tokens else positions_of(hidden),
            query_position=getattr(self.cache, "query_position", None),
            context=self.view.context,
        )

    def known_tokens(self, device: torch.device) -> Tensor | None:
        """Return where there are tokens instead of padding, ``[b, s]`` bools; None if nothing says so."""
        found = self.tokens
        if found is None and self.documents is not None:
            found = self.documents >= 0
        elif found is None and self.lengths is not None:
            found = torch.arange(self.view.whole_length, device=self.lengths.device) < self.lengths.unsqueeze(1)
        return None if found is None else found.to(device)

    def text_lengths(self, device: torch.device) -> Tensor | None:
        """Return the length of each token's text, ``[b, 1]`` or ``[b, s]``; None for the batch's length."""
        if isinstance(self.cache, RowCache):
            return self.cache.text_lengths
        if self.lengths is not None:
            return self.lengths.unsqueeze(1)
        if self.documents is None or self.documents.shape != (self.num_samples, self.view.whole_length):
            # Attention raises an error for a wrong shape.
            return None
        return document_lengths(self.documents).to(device)


def check_tensors(input_ids: Any, labels: Any = None, **others: Any) -> None:
    """Check that inputs are tensors or None, that there is at least one token, and that each token has a label.

    Raises:
        ShardingError: an input has the wrong type or shape. The message names the input and the expected value.
    """
    for name, value in {"input_ids": input_ids, "labels": labels, **others}.items():
        if value is not None and not isinstance(value, Tensor):
            raise ShardingError(
                f"{name} is of type {type(value).__name__}; pass a torch.Tensor, such as torch.tensor({name})"
            )
    if input_ids is None:
        return
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ShardingError(
            f"input_ids has shape {list(input_ids.shape)}; it must be [b, s], with at least one sequence of at "
            "least one token"
        )
    if labels is not None and labels.shape != input_ids.shape:
        raise ShardingError(
            f"labels has shape {list(labels.shape)}, and input_ids {list(input_ids.shape)}; each token has one label"
        )


def is_token(mask: Tensor, b: int, s: int) -> Tensor:
    """Convert a padding mask to bools, True for each token.

    Raises:
        ShardingError: the shape is not ``[b, s]``.
    """
    if mask.shape != (b, s):
        raise ShardingError(
            f"the attention mask has shape {list(mask.shape)}; it must be [{b}, {s}], 1 for each real token and 0 for "
            "padding"
        )
    return mask != 0


def positions_of(tokens: Tensor) -> Tensor:
    """Return the number of tokens before each token, ``[b, s]``; -1 for padding."""
    return (tokens.cumsum(dim=1) * tokens) - 1


class TokensFirst:
    """Moves the tokens of each row to its front, in order, and results for them back.

    Under causal attention no token sees padding that is at the end of its row. Attention then needs no mask of shape
    ``[b, 1, s, s]``, and may use any kernel.

    Args:
        tokens: ``[b, s]`` bools, True for tokens.

    Attributes:
        order: ``[b, s]``, the original index of each element.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.order = tokens.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        self._back = self.order.argsort(dim=1)

    def move(self, rows: Tensor) -> Tensor:
        """Reorder ``[b, s]`` to the new order."""
        return rows.gather(1, self.order)

    def move_back(self, rows: Tensor) -> Tensor:
        """Reorder ``[b, s]`` to the original order."""
        return rows.gather(1, self._back)

    def move_sequence_back(self, sequence: Tensor) -> Tensor:
        """Reorder ``[s, b, n]`` to the original order."""
        return sequence.gather(0, self._back.t().unsqueeze(-1).expand_as(sequence))
