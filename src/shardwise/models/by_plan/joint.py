"""One pass of a model of transformers over the next tokens of several sequences, each with a cache of its own."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.models.by_plan.model import PlannedCache, PlannedModel

# Name in transformers' table of attention functions, for the time of a pass.
_NAME = "shardwise_joint"
_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}


class _JointLayer:
    """The same layer of several caches, as a layer of one. ``update`` returns the new keys and values alone."""

    is_compileable = is_sliding = is_croppable = False

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self.new: tuple[Tensor, Tensor] | None = None
        self.whole: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        pairs = zip(keys.split(1), values.split(1), strict=True)
        self.whole = [layer.update(*pair) for layer, pair in zip(self._layers, pairs, strict=True)]
        self.new = keys, values
        return self.new

    def get_seq_length(self) -> int:
        lengths: list[int] = [layer.get_seq_length() for layer in self._layers]
        return max(lengths)


class _JointCache(PlannedCache):
    """What ``PlannedModel`` reads of a cache, for several caches."""

    def __init__(self, caches: Sequence[PlannedCache]) -> None:
        self.length = 0
        by_layer = zip(*(cache.states.layers for cache in caches), strict=True)
        self.layers = [_JointLayer(layers) for layers in by_layer]
        self.states = importlib.import_module("transformers").Cache(layers=self.layers)


def may_join(model: PlannedModel) -> bool:
    """True unless a layer keeps other states than the keys and values of single tokens; no communication.

    False also if what a token reads depends on the length of its text, which a short trial does not show: chunks of
    attention, which begin at multiples of a length, and rotary frequencies, which are those of the longest text.
    """
    layers = PlannedCache(model).states.layers
    is_known = bool(layers) and all(type(layer).__name__ in _LAYERS for layer in layers)
    config = model.whole.config.get_text_config()
    has_chunks = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    kinds = [getattr(module, "rope_type", None) for module in model.whole.modules()]
    kinds = [each for kind in kinds for each in (kind.values() if isinstance(kind, dict) else (kind,))]
    has_lengths = any(isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) for kind in kinds)
    return is_known and model.whole._supports_sdpa and not has_chunks and not has_lengths


@torch.no_grad()
def joins(model: PlannedModel) -> bool:
    """Try whether the logits of two sequences read together are those of each alone; every rank calls."""
    ids = torch.arange(6, device=next(model.parameters()).device).view(2, 3) % model.vocab_size
    alone, caches = [], []
    for row, length in zip(ids, (2, 3), strict=True):
        for rest in ([length], []):
            cache = PlannedCache(model)
            model.next_logits(row[None, :length], torch.arange(length, device=ids.device), cache=cache)
            if rest:
                alone.append(model.next_logits(row[None, :1], torch.tensor(rest, device=ids.device), cache=cache))
            else:
                caches.append(cache)
    try:
        together = next_logits(model, ids[:, 0].tolist(), caches)
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception:
        # Code that handles keys, values or masks otherwise, alike on every rank.
        return False
    expected = torch.cat(alone)
    bound = torch.finfo(expected.dtype).eps ** 0.5
    return bool((together - expected).norm() <= bound * expected.norm())


def next_logits(model: PlannedModel, ids: Sequence[int], caches: Sequence[PlannedCache]) -> Tensor:
    """Read one token of each sequence, and return the logits of the next, ``[n, v]``; every rank calls.

    Products are those of all sequences at once; each attends to the keys of its own cache, so none is padded.

    Raises:
        NotImplementedError: attention does not get the keys and values as they come from the cache.
    """
    joint, device = _JointCache(caches), next(model.parameters()).device
    positions = torch.tensor([[cache.length] for cache in caches], device=device)
    tokens = torch.tensor([[token] for token in ids], device=device)
    with _attention_by_sequence(model, joint):
        logits = model.next_logits(tokens, positions, cache=joint)
    if any(layer.new is not None for layer in joint.layers):
        raise NotImplementedError(f"{type(model.whole).__name__} has attention of its own")
    for cache in caches:
        cache.length += 1
    return logits


@contextlib.contextmanager
def _attention_by_sequence(model: PlannedModel, joint: _JointCache) -> Iterator[None]:
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    config = model.whole.config
    usual = config._attn_implementation

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        layer = next((each for each in joint.layers if each.new and each.new[0] is key and each.new[1] is value), None)
        if layer is None:
            raise NotImplementedError(f"{type(module).__name__} changes the keys and values of its cache")
        layer.new = None
        parts = zip(query.split(1), layer.whole, strict=True)
        return torch.cat([functions["sdpa"](module, own, *pair, None, **options)[0] for own, pair in parts]), None

    functions[_NAME], config._attn_implementation = attend, _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
        del functions[_NAME]
