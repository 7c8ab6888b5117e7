"""The dense language model that cases compare with: plain PyTorch, on one rank, in fp64."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""Label that has no loss."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cases' language model: Llama's layers, with RMSNorm, rotary positions, SwiGLU and no biases.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, ffn, vocab: numbers and widths; ``heads * head_dim`` is the width
            of attention, and ``kv_heads`` divides ``heads``.
        qk_norm: whether queries and keys have an RMSNorm of each head (Qwen 3).
        tied: whether the output layer has the embedding's weight.
        base: base of the rotary wavelengths.
        epsilon: constant of the norms.
    """

    layers: int = 2
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    ffn: int = 24
    vocab: int = 32
    qk_norm: bool = False
    tied: bool = False
    base: float = 10000.0
    epsilon: float = 1e-5

    def but(self, **changes: Any) -> "Sizes":
        """Return these sizes with changes."""
        return replace(self, **changes)


class DenseBlock(nn.Module):
    """One layer: attention and an MLP, each after a norm and added to its input."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        h, d = sizes.hidden, sizes.head_dim
        self.sizes = sizes
        self.norm1, self.norm2 = (nn.RMSNorm(h, eps=sizes.epsilon) for _ in range(2))
        self.q = nn.Linear(h, sizes.heads * d, bias=False)
        self.k, self.v = (nn.Linear(h, sizes.kv_heads * d, bias=False) for _ in range(2))
        self.o = nn.Linear(sizes.heads * d, h, bias=False)
        if sizes.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(d, eps=sizes.epsilon) for _ in range(2))
        self.gate, self.up = (nn.Linear(h, sizes.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.ffn, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, s, h]`` to ``[b, s, h]``. The number of heads comes from the projections' outputs."""
        x = x + self._attention(self.norm1(x))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.sizes.head_dim)) for layer in (self.q, self.k, self.v))
        if self.sizes.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._rotated(q), self._rotated(k)
        k, v = (each.repeat_interleave(q.size(2) // k.size(2), dim=2) for each in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.sizes.head_dim)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        out: Tensor = self.o(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))
        return out

    def _rotated(self, x: Tensor) -> Tensor:
        half = self.sizes.head_dim // 2
        frequency = self.sizes.base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x.size(1), dtype=torch.float64)[:, None, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DenseModel(nn.Module):
    """The language model; its ``state_dict`` has the protocol's names.

    Args:
        sizes: sizes of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(DenseBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=sizes.epsilon)
        if not sizes.tied:
            self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.double()

    def logits(self, ids: Tensor) -> Tensor:
        """Map ids ``[b, s]`` to logits ``[b, s, v]``."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        out: Tensor = F.linear(x, self.embedding.weight) if self.sizes.tied else self.head(x)
        return out

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Map ids and labels ``[b, s]`` to the loss of each label ``[b, s]``; 0 for an ignored one."""
        logits = self.logits(ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none").view_as(
            labels
        )


def dense_model(sizes: Sizes) -> DenseModel:
    """Return a model whose weights are large enough that a mistake in any of them shows."""
    model = DenseModel(sizes)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, dtype=torch.float64) * 0.4 + (1.0 if param.dim() == 1 else 0.0))
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters, by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients, by name; zeros for a parameter without one."""
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


Batch = tuple[Tensor, Tensor]
"""Ids and labels of a micro-batch, each ``[b, s]``."""


def batch(sizes: Sizes, b: int = 2, s: int = 8, *, ignored: int = 0) -> Batch:
    """Return ids and labels, the same on every rank; the first ``ignored`` labels of each row are ignored."""
    ids, labels = (torch.randint(sizes.vocab, (b, s)) for _ in range(2))
    labels[:, :ignored] = IGNORED
    return ids, labels


def backward_of_mean(model: nn.Module, batches: list[Batch]) -> Tensor:
    """Run forward and backward of the mean loss over the labels of all batches together; return that mean."""
    count = sum(int((labels != IGNORED).sum()) for _, labels in batches)
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels in batches:
        loss = model(ids, labels).sum() / count
        loss.backward()
        total += loss.detach()
    return total
