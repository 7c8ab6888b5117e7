"""Key-value caches, for one generation and from one to the next, and trained models on layers for inference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, TypeVar

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sharding.balanced import is_sharded
from shardwise.models.gpt import GPT
from shardwise.models.transformer.heads import split_heads
from shardwise.models.transformer.inference_block import InferenceBlock
from shardwise.nn.inference import InferenceRowLinear, sharing
from shardwise.nn.linear import LinearParallelism


class PreallocatedCache:
    """A key-value cache of fixed capacity for the heads of one rank; a ``models.transformer.attention.KeyValueCache``.

    A forward pass appends to each layer once. A pass that failed half-way is undone by ``truncate(cache.length)``.

    Args:
        num_layers: number of layers, which append as 1 to ``num_layers``.
        num_groups, head_dim: key-value heads of this rank, and their width.
        batch_size, capacity: number of sequences, and of tokens that it can hold of each.
        dtype, device: of keys and values; the default device if None.

    Raises:
        ConfigError: a size under 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_groups: int,
        head_dim: int,
        *,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_groups": num_groups,
            "head_dim": head_dim,
            "batch_size": batch_size,
            "capacity": capacity,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{name} of a key-value cache is {size}; it must be at least 1")
        self.capacity = capacity
        # [layers, key or value, b, groups/t, capacity, d]
        self._store = torch.empty(num_layers, 2, batch_size, num_groups, capacity, head_dim, dtype=dtype, device=device)
        self._lengths = [0] * num_layers

    @classmethod
    def for_model(cls, model: GPT, *, batch_size: int, capacity: int) -> PreallocatedCache:
        """An empty cache for this rank's part of ``model``, in its dtype and on its device.

        The model's attention is ``SelfAttention`` or holds the same heads on each rank.
        """
        num_heads, num_groups, head_dim = model.config.heads
        start, stop = split_heads(num_heads, num_groups, model.tp_group.size()).groups[model.tp_group.rank()]
        weight = model.embedding.word_embeddings.weight
        return cls(
            model.config.num_layers,
            stop - start,
            head_dim,
            batch_size=batch_size,
            capacity=capacity,
            # Rows that ranks share out may be in fp32, and are gathered in the dtype that layers compute in.
            dtype=model.config.params_dtype if is_sharded(weight) else weight.dtype,
            device=weight.device,
        )

    @property
    def length(self) -> int:
        """Tokens that every layer holds: it grows when the last layer of a pass has appended."""
        return min(self._lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes that the cache takes on this rank, full or empty."""
        return self._store.numel() * self._store.element_size()

    def append(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values of new tokens, ``[b, groups/t, new, d]``, to the layer of this number, from 1.

        Returns:
            Keys and values of all tokens so far, ``[b, groups/t, all, d]``: views of the cache, which the next
            ``truncate`` and ``append`` may overwrite.

        Raises:
            ShardingError: no such layer, a shape that does not fit, more tokens than the capacity, or a layer that
                appends twice before all others did once.
        """
        num_layers, _, b, groups, _, d = self._store.shape
        if not 1 <= layer_number <= num_layers:
            raise ShardingError(f"layer {layer_number} is not one of the {num_layers} layers of the key-value cache")
        new = key.size(2) if key.dim() == 4 else 0
        if key.shape != (b, groups, new, d) or value.shape != key.shape:
            raise ShardingError(
                f"the key-value cache holds [{b}, {groups}, tokens, {d}] per layer; layer {layer_number} appends a key "
                f"of shape {list(key.shape)} and a value of shape {list(value.shape)}"
            )
        start = self._lengths[layer_number - 1]
        if start != self.length:
            raise ShardingError(
                f"layer {layer_number} has {start} tokens in the key-value cache and another layer {self.length}: "
                f"each layer appends once per forward pass; truncate({self.length}) undoes a pass that failed"
            )
        stop = start + new
        if stop > self.capacity:
            raise ShardingError(
                f"the key-value cache holds {self.capacity} tokens per sequence; layer {layer_number} appends {new} to "
                f"{start}; make it with a capacity of at least {stop}"
            )
        keys, values = self._store[layer_number - 1]
        keys[:, :, start:stop] = key.detach()
        values[:, :, start:stop] = value.detach()
        self._lengths[layer_number - 1] = stop
        return keys[:, :, :stop], values[:, :, :stop]

    def whole_layer(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, from 1, ``[b, groups/t, capacity, d]``: views of all that it can hold."""
        keys, values = self._store[layer_number - 1]
        return keys, values

    def extend(self, count: int) -> None:
        """Count ``count`` tokens that were written into ``whole_layer`` of every layer.

        Raises:
            ShardingError: there is no room for them.
        """
        if self.length + count > self.capacity:
            raise ShardingError(
                f"the key-value cache holds {self.capacity} tokens per sequence; {count} more than {self.length} do "
                f"not fit; make it with a capacity of at least {self.length + count}"
            )
        self._lengths = [self.length + count] * len(self._lengths)

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens; 0 empties the cache.

        Raises:
            ShardingError: there are not that many tokens.
        """
        if not 0 <= length <= self.length:
            raise ShardingError(f"cannot truncate a key-value cache of {self.length} tokens to {length}")
        self._lengths = [length] * len(self._lengths)


class PrefixCache:
    """The key-value cache of the text that a model read last, for prompts that begin as that text does.

    ``generate`` reads only the tokens of a prompt that differ from it. Each rank of the model's tensor-parallel group
    makes one. Make another when weights have changed.
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
        """The cache of the first ``shared(token_ids)`` of the tokens, with room for ``capacity`` tokens at least.

        Call ``keep`` once it is filled.
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
        """Note the tokens of the cache that was taken: as many of ``token_ids`` as it holds."""
        assert self._cache is not None
        self._token_ids = list(token_ids[: self._cache.length])


M = TypeVar("M", bound=GPT)


def inference_view(model: M, *, fused: bool) -> M:
    """The model that computes what ``model`` does in evaluation mode, without gradient, on layers for inference.

    It has the parameters that ``model`` has now, under the same names: what is written into them is seen by both. Take
    another after parameters were replaced, as by ``load_state_dict(assign=True)``.

    Args:
        model: not modified.
        fused: one exchange per half block (``shardwise.nn.inference``), for models with sequence parallelism and
            without; on one rank there is nothing to fuse.

    Raises:
        ConfigError: layers with adapters, with parts of a program's own, not pre-norm; or with ``fused`` one of several
            pipeline stages, or no norm after the last layer.
    """
    return with_block(model, InferenceBlock.of(model.decoder, fused=fused))


def with_block(model: M, block: InferenceBlock) -> M:
    """The model with ``block``, which was made of the model's block; else as ``inference_view``."""
    if not block.fused:
        return sharing(model, type(model), decoder=block)
    # The block's output is whole already.
    output_layer = sharing(
        model.output_layer, type(model.output_layer), parallelism=LinearParallelism.COLUMN, sequence_parallel=False
    )
    return sharing(model, type(model), decoder=block, output_layer=output_layer, sequence_parallel=False)


def on_layers(model: M, layers: Literal["auto", "training", "inference", "fused"]) -> tuple[M, str]:
    """The model on the layers that are asked for, and which they are, for people.

    Args:
        model: not modified.
        layers: those of training; those for inference, with the same communication or ``"fused"``; or ``"auto"``, those
            for inference unfused where the model can have them. Of a model that is not split along the sequence these
            take the same collectives and fewer operations; fused on a CPU there are more operations.

    Raises:
        ConfigError: the model cannot have those that are asked for by name.
    """
    if layers == "training":
        return model, "those of training, as asked for"
    try:
        view = inference_view(model, fused=layers == "fused")
    except ConfigError as error:
        if layers != "auto":
            raise
        return model, f"those of training, since {error}"
    if layers == "auto":
        return view, "those for inference, which are faster than those of training"
    row = next(module for module in view.modules() if isinstance(module, InferenceRowLinear))
    return view, f"those for inference, as asked for; exchange of a half block: {row.exchange}"
