"""Keys and values of many sequences in pages, and a pass over the new tokens of several of them.

A page holds the keys and values of ``page_size`` successive tokens, in every layer. A sequence takes a page when it
needs one and gives all of them back at its end, so that it wastes less than a page. Sequences that begin with the same
tokens share the full pages of these, which are not written any more. A page is free when no sequence has it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.models.generation.cache import kind_of_cache, layer_sizes
from shardwise.models.gpt import GPT
from shardwise.models.transformer.core_attention import RowCache
from shardwise.models.transformer.masks import AttentionMask

Attend = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]
_Key = tuple[int, tuple[int, ...]]


class PagedCache:
    """Keys and values of the heads of one rank, in pages that sequences share.

    Args:
        sizes: by the number of each layer the number of key-value heads on this rank, and the widths of keys and of
            values.
        num_pages, page_size: number of pages, and of tokens in each.
        dtype, device: dtype and device of keys and values; the default device if None.

    Attributes:
        num_free: number of pages that no sequence has.

    Raises:
        ConfigError: a number is under 1.
    """

    def __init__(
        self,
        sizes: Mapping[int, tuple[int, int, int]],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        for name, number in {"num_pages": num_pages, "page_size": page_size}.items():
            if number < 1:
                raise ConfigError(f"{name} of a paged cache is {number}; it must be at least 1")
        self.page_size, self.num_pages = page_size, num_pages
        # Page 0 belongs to no sequence. It stays zero, because shorter sequences read it where longer ones have tokens.
        slots = (1 + num_pages) * page_size
        self._layers = {
            number: tuple(torch.zeros(slots, groups, width, dtype=dtype, device=device) for width in widths)
            for number, (groups, *widths) in sizes.items()
        }
        self._free = list(range(1, num_pages + 1))
        self._num_holders = [0] * (1 + num_pages)
        # Full pages by the page before them, or 0, and their tokens. A sequence that has a page also has the pages
        # before it, so an entry is valid while its page is taken.
        self._full: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}

    @classmethod
    def for_model(cls, model: GPT, *, num_pages: int, page_size: int) -> PagedCache:
        """Create an empty cache for this rank's part of ``model``, with its dtype and device."""
        dtype, device = kind_of_cache(model)
        return cls(layer_sizes(model), num_pages=num_pages, page_size=page_size, dtype=dtype, device=device)

    @property
    def num_free(self) -> int:
        """Number of pages that no sequence has."""
        return len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache on this rank, full or empty."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    def num_pages_for(self, length: int) -> int:
        """Return the number of pages of a sequence of some length."""
        return -(-length // self.page_size)

    def extend_(self, pages: list[int], length: int, *, spare: int = 0) -> bool:
        """Add pages to those of a sequence until they hold ``length`` tokens; return False if too few are free.

        If pages are added, ``spare`` ones stay free.
        """
        missing = self.num_pages_for(length) - len(pages)
        if missing > 0 and missing + spare > len(self._free):
            return False
        for _ in range(missing):
            # The lowest free pages often follow each other, and attention then needs no copy of them.
            pages.append(heapq.heappop(self._free))
            self._num_holders[pages[-1]] = 1
        return True

    def share_(self, pages: list[int], ids: Sequence[int]) -> int:
        """Give a sequence without pages the full pages of its first tokens ``ids``; return the number of tokens."""
        for number in range(len(ids) // self.page_size):
            page = self._full.get(self._key(pages, ids, number))
            if page is None:
                break
            self._num_holders[page] += 1
            pages.append(page)
        return len(pages) * self.page_size

    def offer_(self, pages: Sequence[int], ids: Sequence[int], start: int, stop: int) -> None:
        """Let others share the pages of a sequence ``ids`` that its tokens from ``start`` to ``stop`` fill."""
        for number in range(start // self.page_size, stop // self.page_size):
            key = self._key(pages, ids, number)
            if self._full.setdefault(key, pages[number]) == pages[number]:
                self._keys[pages[number]] = key

    def _key(self, pages: Sequence[int], ids: Sequence[int], number: int) -> _Key:
        size = self.page_size
        return (pages[number - 1] if number > 0 else 0, tuple(ids[number * size : (number + 1) * size]))

    def release_(self, pages: list[int]) -> None:
        """Take all pages from a sequence."""
        for page in pages:
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                heapq.heappush(self._free, page)
                if page in self._keys:
                    del self._full[self._keys.pop(page)]
        pages.clear()

    def layer(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer as ``[slots, groups/t, width]``; a page is successive slots."""
        keys, values = self._layers[layer_number]
        return keys, values

    @property
    def device(self) -> torch.device:
        """The device of keys and values."""
        return next(iter(self._layers.values()))[0].device


class Chunk(NamedTuple):
    """New tokens of a sequence.

    Attributes:
        ids: the tokens.
        start: number of earlier tokens, whose keys and values are cached.
        pages: pages of the sequence, which have room for the new tokens.
        text_length: number of tokens of the sequence that are known.
    """

    ids: Sequence[int]
    start: int
    pages: Sequence[int]
    text_length: int

    @property
    def stop(self) -> int:
        """Number of cached tokens after the pass."""
        return self.start + len(self.ids)


class _Part:
    """Successive rows that are computed together: one chunk, or single tokens of several sequences."""

    def __init__(self, chunks: Sequence[Chunk], first: int, cache: PagedCache, device: torch.device) -> None:
        chunk, size = chunks[0], cache.page_size
        self.is_batch, self.is_first = len(chunks) > 1, chunk.start == 0 and len(chunks) == 1
        self.rows = slice(first, first + sum(len(each.ids) for each in chunks))
        self.slots: slice | Tensor
        self._forbidden: Tensor | None = None
        self._mask: AttentionMask | None = None
        if not self.is_batch:
            pages = chunk.pages[: cache.num_pages_for(chunk.stop)]
            if pages[-1] - pages[0] == len(pages) - 1 and all(b > a for a, b in pairwise(pages)):
                self.slots = slice(pages[0] * size, pages[0] * size + chunk.stop)
            else:
                table = torch.tensor(pages, device=device)
                self.slots = (table[:, None] * size + torch.arange(size, device=device)).flatten()[: chunk.stop]
            return
        # Shorter sequences begin later, so that all queries are at the end of the keys.
        lengths, longest = [each.stop for each in chunks], max(each.stop for each in chunks)
        most = cache.num_pages_for(longest)
        rows = [[*each.pages[:most], *[0] * (most - len(each.pages))] for each in chunks]
        places = torch.arange(longest, device=device) - torch.tensor(
            [[longest - length] for length in lengths], device=device
        )
        known = places.clamp(min=0)
        slots = torch.tensor(rows, device=device).gather(1, known // size) * size + known % size
        self.slots = slots
        if min(lengths) < longest:
            self.slots = slots.masked_fill(places < 0, 0)
            self._forbidden = (places < 0)[:, None, None, :]

    def mask(self, slopes: Tensor | None) -> AttentionMask:
        """Return the mask, made once for all layers."""
        if self._mask is None:
            self._mask = AttentionMask(self._forbidden, alibi_slopes=slopes)
        return self._mask


class RaggedPass(RowCache):
    """A pass over new tokens of several sequences, one chunk after the other in one row.

    Args:
        cache: cache of the sequences.
        chunks: the new tokens. Successive chunks of one token are computed together if their sequences are about
            equally long, so they should be sorted by length.
        rows: rows whose logits are needed.
        together: whether single tokens of several sequences are computed together. Otherwise the attention of each
            sequence is called alone, with keys from its first token on.

    Attributes:
        ids: ``[1, total]``, the tokens.
        positions: ``[total]``, their positions in their sequences.
    """

    def __init__(
        self, cache: PagedCache, chunks: Sequence[Chunk], rows: Sequence[int], *, together: bool = True
    ) -> None:
        self._cache, size, device = cache, cache.page_size, cache.device
        places = [(chunk, place) for chunk in chunks for place in range(chunk.start, chunk.stop)]
        self.ids = torch.tensor([[token for chunk in chunks for token in chunk.ids]], device=device)
        self.positions = torch.tensor([place for _, place in places], device=device)
        self.text_lengths = torch.tensor([[chunk.text_length for chunk, _ in places]], device=device)
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self._slots = torch.tensor(
            [chunk.pages[place // size] * size + place % size for chunk, place in places], device=device
        )

        def kind_of(chunk: Chunk) -> int:
            # At least half of the keys that a sequence reads are then its own.
            return cache.num_pages_for(chunk.stop).bit_length() if together and len(chunk.ids) == 1 else -1

        self._parts: list[_Part] = []
        first = 0
        for kind, several in groupby(chunks, kind_of):
            for each in [[chunk] for chunk in several] if kind < 0 else [list(several)]:
                self._parts.append(_Part(each, first, cache, device))
                first = self._parts[-1].rows.stop

    def attend(
        self,
        layer_number: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        attend: Attend,
    ) -> Tensor:
        keys, values = self._cache.layer(layer_number)
        keys.index_copy_(0, self._slots, key[0].transpose(0, 1).to(keys.dtype))
        values.index_copy_(0, self._slots, value[0].transpose(0, 1).to(values.dtype))
        results = []
        for part in self._parts:
            own, of_part = query[:, :, part.rows], part.mask(mask.alibi_slopes)
            if part.is_batch:
                # [1, heads, n, d] -> [n, heads, 1, d], and [n, keys, groups, d] -> [n, groups, keys, d].
                seen = [each[part.slots].transpose(1, 2) for each in (keys, values)]
                results.append(attend(own.permute(2, 1, 0, 3), seen[0], seen[1], of_part).permute(2, 1, 0, 3))
            elif part.is_first:
                results.append(attend(own, key[:, :, part.rows], value[:, :, part.rows], of_part))
            else:
                seen = [each[part.slots].transpose(0, 1).unsqueeze(0) for each in (keys, values)]
                results.append(attend(own, seen[0], seen[1], of_part))
        return results[0] if len(results) == 1 else torch.cat(results, dim=2)
