"""What every candidate starts from, and what a candidate is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import balanced_range

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class LossSizes:
    """One batch of tokens.

    Attributes:
        num_tokens: in the batch.
        vocab_size: of all ranks together.
        hidden_size: width of the output layer's input.

    Raises:
        ConfigError: a size that cannot be.
    """

    num_tokens: int
    vocab_size: int
    hidden_size: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")

    def check_split(self, num_ranks: int) -> None:
        """Raise ConfigError unless the ranks divide the vocabulary, as DTensor's loss needs it."""
        if self.vocab_size % num_ranks != 0:
            raise ConfigError(f"vocab_size {self.vocab_size} is not a multiple of the {num_ranks} ranks")


@dataclass(frozen=True)
class Problem:
    """One rank's part of the batch.

    Attributes:
        sizes: of the whole.
        hidden: ``[n, h]``, the same on every rank.
        weight: ``[v/t, h]``.
        target: ``[n]`` global ids, the same on every rank.
        start: first id of this rank.
    """

    sizes: LossSizes
    hidden: Tensor
    weight: Tensor
    target: Tensor
    start: int

    @classmethod
    def draw(cls, sizes: LossSizes, dtype: torch.dtype, rank: int, num_ranks: int, seed: int) -> Problem:
        """Random hidden states and weights, whose logits have a standard deviation of 2."""
        start, stop = balanced_range(sizes.vocab_size, num_ranks, rank)
        common = torch.Generator().manual_seed(seed)
        hidden = torch.randn(sizes.num_tokens, sizes.hidden_size, generator=common)
        target = torch.randint(sizes.vocab_size, (sizes.num_tokens,), generator=common)
        own = torch.Generator().manual_seed(seed + 1 + rank)
        weight = torch.randn(stop - start, sizes.hidden_size, generator=own) * 2 * sizes.hidden_size**-0.5
        return cls(sizes, hidden.to(dtype), weight.to(dtype), target, start)


@dataclass(frozen=True)
class Candidate:
    """One way to compute the loss, summed over the tokens, and its gradients.

    Attributes:
        step: forward and backward; returns the gradients, for the logits or for hidden states and weight. None of a
            limit, which computes no loss.
        prepare: what comes before a step and is not timed.
    """

    step: Callable[[], Sequence[Tensor]]
    prepare: Callable[[], object] = lambda: None
