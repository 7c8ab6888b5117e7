"""The input of every candidate, and the definition of a candidate."""

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
    """Sizes of a batch of tokens.

    Attributes:
        num_tokens: number of tokens in the batch.
        vocab_size: vocabulary size over all ranks.
        hidden_size: width of the output layer's input.

    Raises:
        ConfigError: a size is out of range.
    """

    num_tokens: int
    vocab_size: int
    hidden_size: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")

    def check_split(self, num_ranks: int) -> None:
        """Raise ConfigError unless the number of ranks divides the vocabulary, as DTensor's loss requires."""
        if self.vocab_size % num_ranks != 0:
            raise ConfigError(f"vocab_size {self.vocab_size} is not a multiple of the {num_ranks} ranks")


@dataclass(frozen=True)
class Problem:
    """One rank's part of the batch.

    Attributes:
        sizes: sizes of the whole batch.
        hidden: hidden states ``[n, h]``, the same on every rank.
        weight: weight of the output layer, ``[v/t, h]``.
        target: global ids ``[n]``, the same on every rank.
        start: first id of this rank.
    """

    sizes: LossSizes
    hidden: Tensor
    weight: Tensor
    target: Tensor
    start: int

    @classmethod
    def draw(cls, sizes: LossSizes, dtype: torch.dtype, rank: int, num_ranks: int, seed: int) -> Problem:
        """Draw random hidden states and weights; the logits have a standard deviation of 2."""
        start, stop = balanced_range(sizes.vocab_size, num_ranks, rank)
        common = torch.Generator().manual_seed(seed)
        hidden = torch.randn(sizes.num_tokens, sizes.hidden_size, generator=common)
        target = torch.randint(sizes.vocab_size, (sizes.num_tokens,), generator=common)
        own = torch.Generator().manual_seed(seed + 1 + rank)
        weight = torch.randn(stop - start, sizes.hidden_size, generator=own) * 2 * sizes.hidden_size**-0.5
        return cls(sizes, hidden.to(dtype), weight.to(dtype), target, start)


@dataclass(frozen=True)
class Candidate:
    """One implementation of the loss, summed over the tokens, and of its gradients.

    Attributes:
        step: runs forward and backward pass and returns the gradients of the logits, or of hidden states and weight;
            no gradients for a lower bound, which computes no loss.
        prepare: called before each step, not timed.
    """

    step: Callable[[], Sequence[Tensor]]
    prepare: Callable[[], object] = lambda: None
