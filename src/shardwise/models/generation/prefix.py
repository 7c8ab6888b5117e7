"""Keys and values that are kept from one generation to the next, so that a conversation is not read anew each turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from shardwise.models.generation.cache import PreallocatedCache
from shardwise.models.gpt import GPT


class PrefixCache:
    """The key-value cache of the text that a model read last, for prompts that begin as that text does.

    For ``generate``, which reads the prompt from where it parts from the text before. Each rank of the model's
    tensor-parallel group makes one. It is of the weights as they are: take another when they have changed.

    Args:
        model: that reads.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        self._cache: PreallocatedCache | None = None
        self._token_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are kept."""
        return len(self._token_ids)

    def shared(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens need not be read, since the text before began with them; never all of them."""
        if self.model.depends_on_length:
            # The keys were rotated for a text of another length.
            return 0
        pairs = zip(self._token_ids, token_ids[:-1], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def take(self, token_ids: Sequence[int], capacity: int) -> PreallocatedCache:
        """The cache of the first ``shared(token_ids)`` of the tokens, with room for ``capacity`` at least.

        Whoever fills it says so with ``keep``.

        Args:
            token_ids: of the text to read.
            capacity: tokens that it has to hold, at most the model's ``max_sequence_length``.
        """
        length, old = self.shared(token_ids), self._cache
        self._token_ids = []
        if old is not None and old.capacity >= capacity:
            old.truncate(length)
            return old
        if old is not None:
            # A conversation grows turn by turn: copying is rare if the room doubles.
            capacity = max(capacity, min(2 * old.capacity, self.model.max_sequence_length))
        new = PreallocatedCache.for_model(self.model, batch_size=1, capacity=capacity)
        if old is not None and length > 0:
            for number in range(1, self.model.config.num_layers + 1):
                key, value = old.whole_layer(number)
                new.append(number, key[:, :, :length], value[:, :, :length])
        self._cache = new
        return new

    def keep(self, token_ids: Sequence[int]) -> None:
        """Say of which tokens the cache that was taken holds keys and values: as many of the first as it has."""
        assert self._cache is not None
        self._token_ids = list(token_ids[: self._cache.length])
