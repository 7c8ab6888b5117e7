"""Whether attention has the bits on which exact runs rely; see ``exact_check``.

Tried is what the model's own layers do between their linear layers, rotation included, forward and backward: of all
heads, twice, as what is not deterministic has no exact form; and of the heads of a rank, for each number of ranks that
the parts allow.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.random import seed_streams, streams
from shardwise.core.sharding import Interval, local_parts
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.heads import HeadSplit, split_heads
from shardwise.models.transformer.masks import AttentionMask, alibi_slopes
from shardwise.models.transformer.rotary import RotaryEmbedding
from shardwise.run.exact_trials.exact_trials import (
    OtherBits,
    Trials,
    compare,
    how_split,
    on_one_thread,
    on_several_threads,
    powers_of_two,
)

# Scores, of all samples and heads at a time; of more heads some are tried.
_MOST_SCORES = 1 << 26


@dataclass(frozen=True)
class _Rank:
    """What attention asks of its group, of which this process need not be a rank."""

    number: int
    ranks: int

    def rank(self) -> int:
        """Its place."""
        return self.number

    def size(self) -> int:
        """How many there are."""
        return self.ranks


def try_attention(
    trials: Trials, model: nn.Module, config: ModelConfig, *, batch: int, length: int, is_packed: bool
) -> None:
    """Try each kind of attention layer of a model.

    Args:
        trials: of the device.
        model: with its attention layers.
        config: the model's.
        batch: samples of a forward.
        length: tokens of a sample.
        is_packed: rows hold several samples, kept apart by a mask.
    """
    layers = {
        (layer.window_size, layer.rotates): layer for layer in model.modules() if isinstance(layer, SelfAttention)
    }
    before = streams().snapshot()
    try:
        for layer in layers.values():
            # Held-out text is measured without dropout, which may be another kernel's work.
            for has_dropout in {config.attention_dropout > 0, False}:
                trial = _Trial(trials, model, config, layer, batch, length, is_packed, has_dropout)
                trials.run(trial.run)
    finally:
        streams().restore(before)


@dataclass
class _Trial:
    trials: Trials
    model: nn.Module
    config: ModelConfig
    layer: SelfAttention
    batch: int
    length: int
    is_packed: bool
    has_dropout: bool

    def __post_init__(self) -> None:
        heads, groups, self._width = self.config.heads
        per_group = heads // groups
        while groups % 2 == 0 and groups > 2 and self.batch * groups * per_group * self.length**2 > _MOST_SCORES:
            groups //= 2
        self._heads, self._groups = groups * per_group, groups
        self._mixed = self.trials.numbers(self.length, self.batch, (per_group + 2) * groups * self._width)
        self._incoming = self.trials.numbers(self.length, self.batch, self._heads * self._width)
        rotary = next((module for module in self.model.modules() if isinstance(module, RotaryEmbedding)), None)
        self._rotary = None
        if rotary is not None and self.layer.rotates:
            self._rotary = rotary.first(self.length, self._mixed.dtype, self._mixed.device)
        self._has_alibi = any(getattr(module, "alibi_slopes", None) is not None for module in self.model.modules())

    def run(self, parts: int) -> None:
        one = split_heads(self._heads, self._groups, 1)
        whole = on_several_threads(partial(self._attended, one, 0))
        for found, expected in zip(on_several_threads(partial(self._attended, one, 0)), whole, strict=True):
            if not torch.equal(found, expected):
                raise OtherBits(f"{self} is not deterministic: a second run has other bits")
        for ranks, split in self._splits(parts):
            for rank in {0, ranks // 2, ranks - 1}:
                output, gradient = on_one_thread(partial(self._attended, split, rank))
                wanted = _columns(whole[0], [self._of_queries(split, rank)])
                compare(output, wanted, f"{self}, {how_split(ranks)},")
                wanted = _columns(whole[1], split.qkv_layout((), self._width).intervals[rank])
                compare(gradient, wanted, f"the gradient of {self}, {how_split(ranks)},")

    def __str__(self) -> str:
        more = [
            *([f"a window {self.layer.window_size}"] if self.layer.window_size is not None else ()),
            *(["documents"] if self.is_packed else ()),
            *(["dropout"] if self.has_dropout else ()),
        ]
        return f"attention of {self._heads} heads {self._width} wide{' with ' * bool(more)}{' and '.join(more)}"

    def _splits(self, parts: int) -> Iterator[tuple[int, HeadSplit]]:
        """Each number of ranks at which the heads are cut into parts."""
        for ranks in powers_of_two(min(parts, self._heads)):
            split = split_heads(self._heads, self._groups, ranks)
            layout = split.qkv_layout((), self._width)
            try:
                for rank in range(ranks):
                    local_parts(layout, rank, parts, what="attention")
            except ConfigError:
                # A run at that layout is refused.
                continue
            yield ranks, split

    def _of_queries(self, split: HeadSplit, rank: int) -> Interval:
        start, stop = split.queries[rank]
        return start * self._width, stop * self._width

    def _attended(self, split: HeadSplit, rank: int) -> tuple[Tensor, Tensor]:
        """Of a rank's heads the output, and the gradient of what the layer splits into queries, keys and values."""
        layer = self.layer.with_heads_of(split, cast(Any, _Rank(rank, len(split.queries))))
        layer.training = self.has_dropout
        start, stop = split.queries[rank]
        documents = None
        if self.is_packed:
            # Two of different lengths.
            places = torch.arange(self.length, device=self._mixed.device)
            documents = (places >= self.length // 3).long().expand(self.batch, -1)
        slopes = alibi_slopes(self._heads)[start:stop] if self._has_alibi else None
        mask = AttentionMask(document_ids=documents, alibi_slopes=slopes)
        # The numbers of all ranks are those of the whole, as in a run.
        seed_streams(0, rank, rng="global")
        with torch.enable_grad():
            mixed = _columns(self._mixed, split.qkv_layout((), self._width).intervals[rank]).requires_grad_()
            output = layer.attended(mixed, mask, self._rotary)
            (gradient,) = torch.autograd.grad(output, mixed, _columns(self._incoming, [self._of_queries(split, rank)]))
        return output.detach(), gradient


def _columns(tensor: Tensor, runs: Any) -> Tensor:
    return torch.cat([tensor[..., start:stop] for start, stop in runs], -1)
