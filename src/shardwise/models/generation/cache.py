"""Key-value caches, for one generation or across several, and views of models with inference layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Literal, TypeVar

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sharding.balanced import is_sharded
from shardwise.models.by_plan.model import PlannedCache, PlannedModel
from shardwise.models.gpt import GPT
from shardwise.models.transformer.block import layers_of_this_stage
from shardwise.models.transformer.heads import Heads, split_heads
from shardwise.models.transformer.inference_block import InferenceBlock
from shardwise.nn.inference import InferenceRowLinear, sharing
from shardwise.nn.linear import LinearParallelism

CausalModel = GPT | PlannedModel
"""A model that continues texts."""


def layer_sizes(
    model: GPT, rank: int | None = None, layers: Sequence[int] | None = None
) -> dict[int, tuple[int, int, int]]:
    """Return, by the number of each layer, the number of key-value heads of a rank, and their two widths.

    Args:
        model: the model, or one pipeline stage of it.
        rank: rank of the model's tensor-parallel group; this one if None.
        layers: layers, counted from 0 over the model; those of this rank's stage if None.
    """
    config, group = model.config, model.tp_group
    rank = group.rank() if rank is None else rank

    def sizes(heads: Heads) -> tuple[int, int, int]:
        start, stop = split_heads(heads.queries, heads.groups, group.size()).groups[rank]
        return stop - start, heads.width, config.value_width if heads == config.heads else heads.width

    layers = layers_of_this_stage(config, model.pp_group, model.vp_stage) if layers is None else layers
    return {number + 1: sizes(config.heads_of(number + 1)) for number in layers}


def kind_of_cache(model: GPT) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and the device of a model's keys and values, and of its hidden states between stages."""
    weight = next(model.parameters())
    # A fully sharded weight may be stored in fp32. It is gathered in the layers' compute dtype.
    return model.config.params_dtype if is_sharded(weight) else weight.dtype, weight.device


class PreallocatedCache:
    """A key-value cache of fixed capacity for the heads of one rank.

    A ``models.transformer.core_attention.KeyValueCache``. A forward pass appends to each layer once.
    ``truncate(cache.length)`` undoes a pass that failed part-way.

    Args:
        num_layers: number of layers.
        num_groups, head_dim: number of key-value heads on this rank, and the width of their keys.
        batch_size, capacity: number of sequences, and maximum number of tokens in each.
        value_dim: width of the values; ``head_dim`` if None.
        dtype, device: dtype and device of keys and values; the default device if None.
        others: by number, ``num_groups``, ``head_dim`` and ``value_dim`` of layers with others.
        first_layer: number of the first layer, over 1 on a later pipeline stage.

    Raises:
        ConfigError: a size is under 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_groups: int,
        head_dim: int,
        *,
        batch_size: int,
        capacity: int,
        value_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device | None = None,
        others: Mapping[int, tuple[int, int, int]] | None = None,
        first_layer: int = 1,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_groups": num_groups,
            "head_dim": head_dim,
            "batch_size": batch_size,
            "capacity": capacity,
            "value_dim": head_dim if value_dim is None else value_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{name} of a key-value cache is {size}; it must be at least 1")
        self.capacity, self._first_layer = capacity, first_layer
        own = num_groups, head_dim, sizes["value_dim"]
        # For each layer keys and values, [b, groups/t, capacity, d].
        self._layers: list[tuple[Tensor, Tensor]] = []
        for number in range(first_layer, first_layer + num_layers):
            groups, *widths = (others or {}).get(number, own)
            keys, values = (
                torch.empty(batch_size, groups, capacity, width, dtype=dtype, device=device) for width in widths
            )
            self._layers.append((keys, values))
        self._lengths = [0] * num_layers

    @classmethod
    def for_model(cls, model: GPT, *, batch_size: int, capacity: int) -> PreallocatedCache:
        """Create an empty cache for this rank's part of ``model``, with its dtype and device.

        The model's attention must be that of ``attention_of``, or hold the same heads on each rank.
        """
        sizes = layer_sizes(model)
        first = min(sizes)
        num_groups, head_dim, value_dim = own = sizes[first]
        dtype, device = kind_of_cache(model)
        return cls(
            len(sizes),
            num_groups,
            head_dim,
            batch_size=batch_size,
            capacity=capacity,
            value_dim=value_dim,
            dtype=dtype,
            device=device,
            others={number: each for number, each in sizes.items() if each != own},
            first_layer=first,
        )

    @property
    def length(self) -> int:
        """Number of tokens that every layer holds; grows when the last layer of a pass has appended."""
        return min(self._lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache on this rank, full or empty."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers)

    def append(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens, ``[b, groups/t, new, d]``, to a layer, by its number in the model.

        Returns:
            Keys and values of all tokens so far, ``[b, groups/t, all, d]``: views of the cache, which a later
            ``truncate`` and ``append`` may overwrite.

        Raises:
            ShardingError: there is no such layer, the shape is wrong, there are more tokens than the capacity, or a
                layer appends twice before all others appended once.
        """
        place = layer_number - self._first_layer
        if not 0 <= place < len(self._layers):
            raise ShardingError(
                f"layer {layer_number} is not one of the {len(self._layers)} layers of the key-value cache"
            )
        keys, values = self.whole_layer(layer_number)
        (b, groups, _, d), value_d = keys.shape, values.size(-1)
        new = key.size(2) if key.dim() == 4 else 0
        if key.shape != (b, groups, new, d) or value.shape != (b, groups, new, value_d):
            raise ShardingError(
                f"the key-value cache holds [{b}, {groups}, tokens, {d}] per layer, with values {value_d} wide; layer "
                f"{layer_number} appends a key of shape {list(key.shape)} and a value of shape {list(value.shape)}"
            )
        start = self._lengths[place]
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
        keys[:, :, start:stop] = key.detach()
        values[:, :, start:stop] = value.detach()
        self._lengths[place] = stop
        return keys[:, :, :stop], values[:, :, :stop]

    def whole_layer(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Return the full buffers of keys and values of a layer, as views ``[b, groups/t, capacity, d]``."""
        return self._layers[layer_number - self._first_layer]

    def extend(self, count: int) -> None:
        """Increase the length by ``count`` tokens that were written to ``whole_layer`` of every layer.

        Raises:
            ShardingError: they exceed the capacity.
        """
        if self.length + count > self.capacity:
            raise ShardingError(
                f"the key-value cache holds {self.capacity} tokens per sequence; {count} more than {self.length} do "
                f"not fit; make it with a capacity of at least {self.length + count}"
            )
        self._lengths = [self.length + count] * len(self._lengths)

    def kept(self, length: int) -> int:
        """Return how many of the first ``length`` tokens can be kept: all."""
        return length

    def truncate(self, length: int) -> None:
        """Drop all but the first ``length`` tokens; 0 empties the cache.

        Raises:
            ShardingError: there are fewer tokens.
        """
        if not 0 <= length <= self.length:
            raise ShardingError(f"cannot truncate a key-value cache of {self.length} tokens to {length}")
        self._lengths = [length] * len(self._lengths)


Cache = PreallocatedCache | PlannedCache
"""The state of earlier tokens that a model keeps."""


def new_cache(model: CausalModel, *, batch_size: int, capacity: int) -> Cache:
    """Create an empty cache for this rank's part of ``model``; see ``PreallocatedCache``."""
    if isinstance(model, PlannedModel):
        return PlannedCache(model)
    return PreallocatedCache.for_model(model, batch_size=batch_size, capacity=capacity)


class PrefixCache:
    """The key-value cache of a model's previous text, for prompts that share a prefix with it.

    ``generate`` processes only the tokens of a prompt after the shared prefix. Each rank of the model's tensor-parallel
    group creates one. Create a new one when weights have changed.
    """

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self._cache: Cache | None = None
        self._token_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose keys and values are cached."""
        return len(self._token_ids)

    def shared(self, token_ids: Sequence[int]) -> int:
        """Return the length of the prefix that ``token_ids`` share with the cache; at most all tokens but the last."""
        if self.model.depends_on_length:
            # The cached keys were rotated for another text length.
            return 0
        pairs = zip(self._token_ids, token_ids[:-1], strict=False)
        number = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return number if self._cache is None else self._cache.kept(number)

    def take(self, token_ids: Sequence[int], capacity: int) -> Cache:
        """Return a cache of the first ``shared(token_ids)`` tokens, with a capacity of at least ``capacity`` tokens.

        Call ``keep`` after filling it.
        """
        length, old = self.shared(token_ids), self._cache
        self._token_ids = []
        if old is not None and old.capacity >= capacity:
            old.truncate(length)
            return old
        if old is not None:
            # A conversation grows turn by turn. Doubling the capacity makes copies rare.
            capacity = max(capacity, min(2 * old.capacity, self.model.max_sequence_length))
        new = new_cache(self.model, batch_size=1, capacity=capacity)
        if old is not None and length > 0:
            assert isinstance(old, PreallocatedCache)
            assert isinstance(new, PreallocatedCache)
            for number in range(1, self.model.config.num_layers + 1):
                key, value = old.whole_layer(number)
                new.append(number, key[:, :, :length], value[:, :, :length])
        self._cache = new
        return new

    def keep(self, token_ids: Sequence[int]) -> None:
        """Record the tokens of the cache from ``take``: the first ``token_ids``, as many as it holds."""
        assert self._cache is not None
        self._token_ids = list(token_ids[: self._cache.length])


M = TypeVar("M", bound=GPT)
C = TypeVar("C", bound=CausalModel)


def inference_view(model: M, *, fused: bool) -> M:
    """Return a model on inference layers that computes ``model`` in evaluation mode, without gradient.

    It shares the current parameters of ``model``, under the same names, so in-place changes affect both. Create a new
    view after parameters were replaced, for example by ``load_state_dict(assign=True)``.

    Args:
        model: the model; not modified.
        fused: whether to use one exchange per half block (``shardwise.nn.inference``), with or without sequence
            parallelism; no effect on one rank.

    Raises:
        ConfigError: layers have adapters or custom parts, or are not pre-norm; or, with ``fused``, the model is one of
            several pipeline stages, or has no norm after the last layer.
    """
    if fused and model.groups.num_stages > 1:
        # On every stage, before the block of one of them refuses.
        raise ConfigError(
            "fused layers need the whole model on each rank, and this is one of several pipeline stages; take layers "
            "'auto', or no stages"
        )
    return with_block(model, InferenceBlock.of(model.decoder, fused=fused))


def with_block(model: M, block: InferenceBlock) -> M:
    """Return the view of ``inference_view`` with a given ``block``, which was created from the model's block."""
    if not block.fused:
        return sharing(model, type(model), decoder=block)
    # The output of a fused block is already whole.
    output_layer = sharing(
        model.output_layer, type(model.output_layer), parallelism=LinearParallelism.COLUMN, sequence_parallel=False
    )
    return sharing(model, type(model), decoder=block, output_layer=output_layer, sequence_parallel=False)


def on_layers(model: C, layers: Literal["auto", "training", "inference", "fused"]) -> tuple[C, str]:
    """Return the model on the requested layers, and a description of the choice for the user.

    Args:
        model: the model; not modified.
        layers: ``"training"``; ``"inference"``, with the communication of training; ``"fused"``, inference layers with
            fused communication; or ``"auto"``, ``"inference"`` if the model supports it, else ``"training"``. Without
            sequence parallelism ``"inference"`` has the same collectives and fewer operations than ``"training"``;
            ``"fused"`` has more operations on a CPU.

    Raises:
        ConfigError: the model does not support the requested layers.
    """
    if isinstance(model, PlannedModel):
        if layers not in ("auto", "training"):
            raise ConfigError(f"layers {layers!r} is for models with a table of Shardwise; leave it out")
        return model, "those of transformers"
    if layers == "training":
        return model, "those of training, as asked for"
    if model.config.exact_parts is not None:
        if layers != "auto":
            raise ConfigError(f"layers {layers!r} cannot be used with --exact, whose layers are those of training")
        return model, "those of training, exact"
    try:
        view = inference_view(model, fused=layers == "fused")
    except ConfigError as error:
        if layers != "auto":
            raise
        # Without what to do about it: nothing need be done.
        return model, f"those of training, since {str(error).partition(';')[0]}"
    if layers == "auto":
        return view, "those for inference, which are faster than those of training"
    row = next(module for module in view.modules() if isinstance(module, InferenceRowLinear))
    return view, f"those for inference, as asked for; exchange of a half block: {row.exchange}"
