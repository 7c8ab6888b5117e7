"""Common input of all variants of the training step: sizes, weights, batch, and the optimizer's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError

Weights = dict[str, Tensor]
"""Whole weights under the names of ``DenseLlama``."""

Step = Callable[[], tuple[Tensor, Tensor]]
"""One training step; returns the loss and the gradient norm before clipping."""

NORM_EPSILON = 1e-5
ROTARY_BASE = 10000.0

# Low, so that a run does not memorize its single batch: probabilities near 0 would become denormal and slow.
LEARNING_RATE = 1e-5
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
ADAM_EPSILON = 1e-8
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a model and its batch.

    Attributes:
        hidden_size: width of the residual stream.
        num_layers: number of transformer layers.
        num_heads: number of attention heads.
        ffn_hidden_size: width of the MLP.
        vocab_size: number of token ids.
        sequence_length: tokens in a sample.
        batch_size: samples in a step.
        tie_embeddings: whether the output layer uses the embedding's weight.

    Raises:
        ConfigError: a size is out of range.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_hidden_size: int
    vocab_size: int
    sequence_length: int
    batch_size: int
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "tie_embeddings" and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.hidden_size % (2 * self.num_heads) != 0:
            raise ConfigError(
                f"hidden_size {self.hidden_size} over num_heads {self.num_heads} must be an even whole number: "
                "rotary positions turn pairs"
            )

    def check_split(self, num_ranks: int) -> None:
        """Raise ConfigError unless the number of ranks divides all sizes that are split."""
        for name in ("num_heads", "ffn_hidden_size", "vocab_size", "sequence_length"):
            if getattr(self, name) % num_ranks != 0:
                raise ConfigError(f"{name} {getattr(self, name)} is not a multiple of the {num_ranks} ranks")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class Problem:
    """The input of every variant; bit for bit the same in every process.

    Attributes:
        sizes: sizes of the whole model.
        weights: whole weights.
        ids: token ids ``[b, s]``, the same batch in every step.
        labels: ids to predict, ``[b, s]``.
    """

    sizes: LlamaSizes
    weights: Weights
    ids: Tensor
    labels: Tensor

    @classmethod
    def draw(cls, sizes: LlamaSizes, seed: int) -> Problem:
        """Draw random weights and tokens."""
        generator = torch.Generator().manual_seed(seed)
        weights = _draw_weights(sizes, generator)
        tokens = torch.randint(sizes.vocab_size, (sizes.batch_size, sizes.sequence_length + 1), generator=generator)
        return cls(sizes, weights, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def fuse_qkv(parts: Sequence[Tensor], head_dim: int) -> Tensor:
    """Fuse the weights of queries, keys and values: the rows of each head are adjacent, in this order."""
    return torch.stack([part.unflatten(0, (-1, head_dim)) for part in parts], dim=1).flatten(0, 2)


def halves(weight: Tensor, sizes: LlamaSizes) -> Tensor:
    """Reorder the rows of each head: adjacent pairs become pairs half a head apart, as most models rotate them."""
    return weight.view(sizes.num_heads, sizes.head_dim // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def _draw_weights(sizes: LlamaSizes, generator: torch.Generator) -> Weights:
    h, f = sizes.hidden_size, sizes.ffn_hidden_size
    weights: Weights = {}

    def add(name: str, *shape: int) -> None:
        # Large enough that attention is not uniform; otherwise an error in it would not show in the loss.
        weights[name] = torch.randn(shape, generator=generator) * h**-0.5

    def add_norm(name: str) -> None:
        # Norm weights of 1 would hide a norm that was not copied.
        weights[name] = 1.0 + 0.1 * torch.randn(h, generator=generator)

    add("tok_embeddings.weight", sizes.vocab_size, h)
    for i in range(sizes.num_layers):
        layer = f"layers.{i}."
        add_norm(layer + "attention_norm.weight")
        for name in ("wq", "wk", "wv", "wo"):
            add(f"{layer}attention.{name}.weight", h, h)
        add_norm(layer + "ffn_norm.weight")
        for name, shape in (("w1", (f, h)), ("w3", (f, h)), ("w2", (h, f))):
            add(f"{layer}feed_forward.{name}.weight", *shape)
    add_norm("norm.weight")
    if not sizes.tie_embeddings:
        add("output.weight", sizes.vocab_size, h)
    return weights
