"""Attention masks, ALiBi's slopes, and sinks."""

from __future__ import annotations

import functools
from enum import Enum

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import causal_lower_right

from shardwise.core.errors import ShardingError
from shardwise.core.initialization import CounterNormal
from shardwise.core.sequence_view import ContextShard
from shardwise.core.sharding import ParamLayout
from shardwise.kernels.planning import device_type_of, outside_of_plans
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.heads import HeadSplit, LocalHeads, split_heads
from shardwise.models.transformer.mlp import layer_arguments
from shardwise.nn.module import ShardedModule


class AttnMaskType(Enum):
    """Positions that attention forbids in addition to a mask. Names are those of Megatron."""

    causal = "causal"
    """A token sees only itself and earlier tokens."""
    padding_causal = "padding_causal"
    """Same as ``causal``; the mask hides padding."""
    padding = "padding"
    """Forbids nothing; the mask hides padding (BERT)."""
    arbitrary = "arbitrary"
    """Forbids nothing; the mask is arbitrary."""
    no_mask = "no_mask"
    """Forbids nothing."""
    causal_bottom_right = "causal_bottom_right"
    """Same as ``causal``. Queries are at the last of the keys' positions, even if there are fewer queries than keys."""

    @property
    def is_causal(self) -> bool:
        """True if a token does not see later tokens."""
        return self in (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class AttentionMask:
    """Restrictions and biases of the attention in one forward pass, in addition to those of each layer.

    It caches the bias tensor for all layers. Create a new object for each forward pass.

    Args:
        forbidden: bools, True where a token may not see another, broadcast to ``[b, heads/t, s, keys]``. The output for
            a token that sees nothing is 0.
        document_ids: ``[b, s]`` integers, for several texts packed into one row, without a cache: a token sees only
            tokens with the same number.
        alibi_slopes: ``[heads/t]``, decrease of this rank's scores per position of distance.
        key_positions: ``[b, keys]`` integers, positions for ALiBi's distances; each key's index if None.
        query_position: int64 ``[1]``, position of a single query whose keys are a whole cache; later positions are
            forbidden. ALiBi is the only other restriction that it supports.
        context: with context parallelism, the positions that this rank's queries have; masks and ids are of whole
            sequences.

    Attributes:
        heads: the heads that the mask is for (``of_heads``); None for all of this rank's.
        is_plain: True without masks, documents and ALiBi.

    Raises:
        ShardingError: ``forbidden`` is not bools.
    """

    def __init__(
        self,
        forbidden: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_positions: Tensor | None = None,
        query_position: Tensor | None = None,
        context: ContextShard | None = None,
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
        self.context = context
        self.heads: LocalHeads | None = None
        self.is_plain = forbidden is None and document_ids is None and alibi_slopes is None
        self._made: dict[object, Tensor] = {}
        self._of_heads: dict[LocalHeads, AttentionMask] = {}

    def of_heads(self, heads: LocalHeads, of: LocalHeads) -> AttentionMask:
        """Return the mask of whole sequences for some heads of a rank that has the heads ``of``.

        Raises:
            ShardingError: the mask has another number of heads.
        """
        if heads not in self._of_heads:
            forbidden, slopes, (first, last) = self.forbidden, self.alibi_slopes, heads.queries
            if forbidden is not None and forbidden.dim() > 2 and forbidden.size(-3) != 1:
                total = of.queries[1]
                if forbidden.size(-3) != total:
                    raise ShardingError(
                        f"attention_mask has shape {list(forbidden.shape)}; it must broadcast to [batch, query heads "
                        f"of this rank, queries, keys], and this rank has {total} query heads"
                    )
                forbidden = forbidden[..., first:last, :, :]
            mask = AttentionMask(
                forbidden,
                document_ids=self.document_ids,
                alibi_slopes=None if slopes is None else slopes[first:last],
                key_positions=self.key_positions,
            )
            mask.heads = heads
            self._of_heads[heads] = mask
        return self._of_heads[heads]

    def bias(
        self,
        query: Tensor,
        num_keys: int,
        *,
        causal: bool,
        window: tuple[int, int] | None,
        starts: tuple[int, int] | None = None,
        for_kernels: bool = False,
    ) -> tuple[Tensor | None, bool]:
        """Return ``attn_mask`` and ``is_causal`` of ``scaled_dot_product_attention``.

        Args:
            query: ``[b, heads/t, s, d]``.
            num_keys: number of keys.
            causal: whether keys after a token are forbidden.
            window: number of positions that a token sees before and after itself, -1 for no bound.
            starts: positions of the first query and of the first key; None if keys start at 0, and queries are at the
                last ``s`` of their positions.
            for_kernels: whether only PyTorch's kernels read the bias; on CUDA it may then be a ``CausalBias``.

        Returns:
            A bias of the query's dtype, -inf where attention is forbidden, broadcast to ``[b, heads/t, s, num_keys]``;
            None if ``is_causal`` is enough.

        Raises:
            ShardingError: the mask or ``document_ids`` have the wrong shape, or ``document_ids`` come with a cache.
        """
        new = query.size(2)
        first, first_key = starts or (num_keys - new, 0)
        last, last_key = first + new - 1, first_key + num_keys - 1
        before, after = (-1, -1) if window is None else window
        # A window that contains all positions restricts nothing.
        before = before if before < last - first_key else -1
        after = after if after < last_key - first and not causal else -1
        is_causal = causal and (first, last) == (first_key, last_key)
        is_plain = self.is_plain and before < 0 and after < 0
        if is_plain and (not causal or is_causal or first == last_key):
            return None, is_causal
        if is_plain and for_kernels and starts is not None and device_type_of(query) == "cuda":
            # Flash attention aligns the last query with the last key.
            with outside_of_plans():
                return causal_lower_right(new, num_keys), False
        key = (first, new, first_key, num_keys, causal, before, after, query.dtype)
        if key not in self._made:
            queries, keys = slice(first, last + 1), slice(first_key, last_key + 1)
            self._made[key] = self._make(query, queries, keys, causal, before, after)
        return self._made[key], False

    def _make(self, query: Tensor, queries: slice, keys: slice, causal: bool, before: int, after: int) -> Tensor:
        of_keys = torch.arange(keys.start, keys.stop, device=query.device)
        of_queries = torch.arange(queries.start, queries.stop, device=query.device)[:, None]
        forbidden = []
        if causal:
            forbidden.append(of_keys > of_queries)
        if before >= 0:
            forbidden.append(of_keys < of_queries - before)
        if after >= 0:
            forbidden.append(of_keys > of_queries + after)
        if self.document_ids is not None:
            ids = self._ids(query, keys)
            forbidden.append((ids[:, queries, None] != ids[:, None, keys]).unsqueeze(1))
        if self.forbidden is not None:
            forbidden.append(self._checked(query, queries, keys))
        # In the query's dtype. From bools, each layer would create such a tensor, and save it.
        bias = torch.zeros((), dtype=query.dtype, device=query.device)
        if self.alibi_slopes is not None:
            wide = torch.promote_types(query.dtype, torch.float32)
            slopes = self.alibi_slopes.to(query.device, wide)[:, None, None]
            distances = of_queries - of_keys
            if self.key_positions is not None:
                places = self.key_positions[:, None, :]
                distances = (places[..., queries].transpose(-1, -2) - places[..., keys]).unsqueeze(1)
            bias = (slopes * -distances.abs().to(wide)).to(query.dtype)
        if forbidden:
            bias = bias.masked_fill(functools.reduce(torch.logical_or, forbidden), -torch.inf)
        return bias

    def _checked(self, query: Tensor, queries: slice, keys: slice) -> Tensor:
        assert self.forbidden is not None
        of_all = (query.size(2), keys.stop) if self.context is None else (self.context.length,) * 2
        wanted = (*query.shape[:2], *of_all)
        sizes = self.forbidden.shape
        missing = len(wanted) - len(sizes)
        if missing < 0 or any(size not in (1, want) for size, want in zip(sizes, wanted[missing:], strict=True)):
            raise ShardingError(
                f"attention_mask has shape {list(sizes)}; it must broadcast to [batch, query heads of this rank, "
                f"queries, keys], here {list(wanted)}"
            )
        if self.context is None:
            return self.forbidden
        own = self.forbidden if sizes[-1] == 1 else self.forbidden[..., keys]
        return own if len(sizes) < 2 or sizes[-2] == 1 else own[..., queries, :]

    def _ids(self, query: Tensor, keys: slice) -> Tensor:
        ids = self.document_ids
        assert ids is not None
        length = keys.stop if self.context is None else self.context.length
        if ids.shape != (query.size(0), length) or (self.context is None and query.size(2) != length):
            raise ShardingError(
                f"document_ids have shape {list(ids.shape)}; attention is of {query.size(0)} sequences, with "
                f"{query.size(2)} queries on {length} keys, and needs a number for each of as many keys as queries"
            )
        return ids


def document_lengths(document_ids: Tensor) -> Tensor:
    """Return the number of tokens in each token's document, ``[b, s]``, from the documents' numbers ``[b, s]``.

    >>> document_lengths(torch.tensor([[0, 0, 1, 1, 1, -1]]))
    tensor([[2, 2, 3, 3, 3, 1]])
    """
    # By sorting, because a count of each number would need a synchronization for the size of the result.
    ids = document_ids.contiguous()
    ordered = ids.sort(dim=1).values
    return torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)


def document_ids_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the document of each token of one packed row, ``[1, length]``, for ``AttentionMask``.

    >>> document_ids_of(torch.tensor([0, 2, 5]), 6)
    tensor([[0, 0, 1, 1, 1, 2]])

    Args:
        cu_seqlens: ``[documents + 1]``, start of each document, and end of the last one. The rest of the row is
            padding, with a separate number.
        length: length of the row.
    """
    positions = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True).unsqueeze(0)


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the decrease of each head's scores per position, ``[num_heads]`` in fp64, on the CPU.

    For a power of two, ``2 ** (-8 i / num_heads)`` for ``i`` from 1. For another number, the slopes of the next smaller
    power of two, then every other slope of the next greater one, as in the authors' code and BLOOM.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]

    Source: Press et al. 2021 (arXiv:2108.12409).
    """
    smaller = 1 << (num_heads.bit_length() - 1)
    exponents = [-8 * i / smaller for i in range(1, smaller + 1)]
    exponents += [-8 * i / (2 * smaller) for i in range(1, 2 * (num_heads - smaller), 2)]
    return torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float64, device="cpu")


def local_alibi_slopes(config: ModelConfig, tp_group: ProcessGroup) -> Tensor:
    """Return the slopes of this rank's query heads, for ``AttentionMask``: ``[heads/t]`` in fp64, on the CPU."""
    num_heads, num_groups, _ = config.heads
    start, stop = split_heads(num_heads, num_groups, tp_group.size()).queries[tp_group.rank()]
    return alibi_slopes(num_heads)[start:stop]


class AttentionSinks(ShardedModule):
    """A learned logit of each query head that takes a share of the attention weights, and has no value.

    Args:
        config: config of the model.
        split: the heads of each rank.
        group: tensor-parallel group.

    Attributes:
        logits: ``[heads/t]``, normally distributed at first.

    Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925).
    """

    logits: Tensor

    def __init__(self, config: ModelConfig, split: HeadSplit, group: ProcessGroup) -> None:
        super().__init__(**layer_arguments(config, group=group, linear=False))
        layout = ParamLayout.of_intervals((config.num_attention_heads,), 0, [[own] for own in split.queries])
        # Other methods of a config may need matrices.
        self._make_parameter("logits", layout, CounterNormal(config.init_method_std))

    def forward(self, scores: Tensor, dtype: torch.dtype, heads: LocalHeads) -> Tensor:
        """Return the weights of the keys in ``dtype``, from scores ``[b, heads, s, keys]`` of ``heads``."""
        sinks = self.logits[slice(*heads.queries)].to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(dim=-1, dtype=dtype)[..., :-1]
