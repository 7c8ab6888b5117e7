"""Attention masks and ALiBi's slopes: which tokens see which, and how far away they seem."""

import functools
from enum import Enum

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ShardingError
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.heads import split_heads


class AttnMaskType(Enum):
    """Positions that attention forbids without a mask; a mask forbids more. Names are those of Megatron."""

    causal = "causal"
    """A token sees itself and those before it."""
    padding_causal = "padding_causal"
    """The same; the mask is said to hide padding."""
    padding = "padding"
    """Nothing; the mask is said to hide padding (BERT)."""
    arbitrary = "arbitrary"
    """Nothing; the mask is all."""
    no_mask = "no_mask"
    """Nothing."""
    causal_bottom_right = "causal_bottom_right"
    """As ``causal``: queries are the last of the keys' positions, also where there are fewer of them."""

    @property
    def is_causal(self) -> bool:
        """Whether a token sees none after it."""
        return self in (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class AttentionMask:
    """Restrictions and biases of the attention of one forward pass, in addition to those of each layer.

    It keeps the tensor that it makes, so that all layers share one: make it anew for each forward pass.

    Args:
        forbidden: bools, True where a token may not see another, broadcast to ``[b, heads/t, s, keys]``. A token that
            sees nothing gets zeros.
        document_ids: ``[b, s]`` integers: tokens see those with their own number only. For several texts packed into
            one row; without a cache.
        alibi_slopes: ``[heads/t]``, this rank's: scores fall by so much per position of distance.
        key_positions: ``[b, keys]`` integers: the positions that ALiBi measures distances between; each key's place if
            None.
        query_position: int64 ``[1]`` of the one query, whose keys are a whole cache; what lies after it is forbidden.
            With ALiBi as the only other restriction.

    Raises:
        ShardingError: ``forbidden`` is not of bools.
    """

    def __init__(
        self,
        forbidden: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_positions: Tensor | None = None,
        query_position: Tensor | None = None,
    ) -> None:
        if forbidden is not None and forbidden.dtype != torch.bool:
            raise ShardingError(
                f"the attention mask is of {forbidden.dtype}; it must be of bools, True where attention is forbidden"
            )
        self.forbidden = forbidden
        self.document_ids = document_ids
        self.alibi_slopes = alibi_slopes
        self.key_positions = key_positions
        self.query_position = query_position
        self._is_plain = forbidden is None and document_ids is None and alibi_slopes is None
        self._made: dict[object, Tensor] = {}

    def bias(
        self, query: Tensor, num_keys: int, *, causal: bool, window: tuple[int, int] | None
    ) -> tuple[Tensor | None, bool]:
        """``attn_mask`` and ``is_causal`` of ``scaled_dot_product_attention``.

        Args:
            query: ``[b, heads/t, s, d]``, of the last ``s`` of ``num_keys`` positions.
            num_keys: number of positions of the keys.
            causal: forbid keys after a token.
            window: positions that a token sees before and after itself, -1 for no bound.

        Returns:
            A bias of the query's dtype, -inf where attention is forbidden, broadcast to ``[b, heads/t, s, num_keys]``;
            None if ``is_causal`` suffices.

        Raises:
            ShardingError: a mask of another shape; numbers of documents of another shape, or with a cache.
        """
        new = query.size(2)
        before, after = (-1, -1) if window is None else window
        # A window that contains all positions restricts nothing.
        before = before if before < num_keys - 1 else -1
        after = after if after < num_keys - 1 and not causal else -1
        if self._is_plain and before < 0 and after < 0 and (not causal or new in (1, num_keys)):
            return None, causal and new == num_keys
        key = (new, num_keys, causal, before, after, query.dtype)
        if key not in self._made:
            self._made[key] = self._make(query, num_keys, causal, before, after)
        return self._made[key], False

    def _make(self, query: Tensor, num_keys: int, causal: bool, before: int, after: int) -> Tensor:
        new, device = query.size(2), query.device
        keys = torch.arange(num_keys, device=device)
        # Queries are the last of the keys' positions.
        queries = keys[num_keys - new :, None]
        forbidden = []
        if causal:
            forbidden.append(keys > queries)
        if before >= 0:
            forbidden.append(keys < queries - before)
        if after >= 0:
            forbidden.append(keys > queries + after)
        if self.document_ids is not None:
            forbidden.append(self._other_document(query, num_keys))
        if self.forbidden is not None:
            forbidden.append(self._checked(query, num_keys))
        # Of the query's dtype: of bools each layer would make such a tensor, and keep it.
        bias = torch.zeros((), dtype=query.dtype, device=device)
        if self.alibi_slopes is not None:
            wide = torch.promote_types(query.dtype, torch.float32)
            slopes = self.alibi_slopes.to(device, wide)[:, None, None]
            distances = queries - keys
            if self.key_positions is not None:
                places = self.key_positions[:, None, None, :]
                distances = places[..., num_keys - new :].transpose(-1, -2) - places
            bias = (slopes * -distances.abs().to(wide)).to(query.dtype)
        if forbidden:
            bias = bias.masked_fill(functools.reduce(torch.logical_or, forbidden), -torch.inf)
        return bias

    def _checked(self, query: Tensor, num_keys: int) -> Tensor:
        assert self.forbidden is not None
        wanted = (*query.shape[:3], num_keys)
        sizes = self.forbidden.shape
        missing = len(wanted) - len(sizes)
        if missing < 0 or any(size not in (1, want) for size, want in zip(sizes, wanted[missing:], strict=True)):
            raise ShardingError(
                f"attention_mask has shape {list(sizes)}; it must broadcast to [batch, query heads of this rank, "
                f"queries, keys], here {list(wanted)}"
            )
        return self.forbidden

    def _other_document(self, query: Tensor, num_keys: int) -> Tensor:
        ids = self.document_ids
        assert ids is not None
        if ids.shape != (query.size(0), num_keys) or query.size(2) != num_keys:
            raise ShardingError(
                f"document_ids have shape {list(ids.shape)}; attention is of {query.size(0)} sequences, with "
                f"{query.size(2)} queries on {num_keys} keys, and needs a number for each of as many keys as queries"
            )
        return (ids[:, :, None] != ids[:, None, :]).unsqueeze(1)


def document_lengths(document_ids: Tensor) -> Tensor:
    """The number of tokens in each token's document, ``[b, s]``, from the documents' numbers ``[b, s]``.

    >>> document_lengths(torch.tensor([[0, 0, 1, 1, 1, -1]]))
    tensor([[2, 2, 3, 3, 3, 1]])
    """
    # By sorting, as a count of each number would need the host to know how many there are.
    ids = document_ids.contiguous()
    ordered = ids.sort(dim=1).values
    return torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)


def document_ids_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """The document of each token of one packed row, ``[1, length]``, for ``AttentionMask``.

    >>> document_ids_of(torch.tensor([0, 2, 5]), 6)
    tensor([[0, 0, 1, 1, 1, 2]])

    Args:
        cu_seqlens: ``[documents + 1]``, where each begins, and where the last one ends; the rest is padding, and counts
            as a document.
        length: of the row.
    """
    positions = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True).unsqueeze(0)


def alibi_slopes(num_heads: int) -> Tensor:
    """How much each head's scores fall per position, ``[num_heads]`` in fp64, on the CPU.

    For a power of two, ``2 ** (-8 i / num_heads)`` for ``i`` from 1. For another number, those of the next smaller
    power of two, then every other one of the next greater, as in the authors' code and BLOOM.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]

    Source: Press et al. 2021 (arXiv:2108.12409).
    """
    smaller = 1 << (num_heads.bit_length() - 1)
    exponents = [-8 * i / smaller for i in range(1, smaller + 1)]
    exponents += [-8 * i / (2 * smaller) for i in range(1, 2 * (num_heads - smaller), 2)]
    return torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float64, device="cpu")


def local_alibi_slopes(config: ModelConfig, tp_group: ProcessGroup) -> Tensor:
    """The slopes of this rank's query heads, for ``AttentionMask``: ``[heads/t]`` in fp64, on the CPU."""
    num_heads, num_groups, _ = config.heads
    start, stop = split_heads(num_heads, num_groups, tp_group.size()).queries[tp_group.rank()]
    return alibi_slopes(num_heads)[start:stop]
