"""The dense language model that cases compare with: plain PyTorch, on one rank, in fp64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.conformance.dense_comparison import summed
from shardwise.conformance.dense_latent import Latent, LatentProjections, Rotation, Yarn
from shardwise.core.topology import Groups

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
        window: number of positions that a token sees in the first of every two layers, itself included; None for all.
        sinks: whether each query head has a logit in the denominator of its softmax, for no key (GPT-OSS).
        latent: widths of latent attention (DeepSeek), with ``head_dim`` for the parts that are not rotated and as many
            key-value heads as heads; None for ordinary attention.
        trained_length: longest text for which the base of the wavelengths is ``base``; for a text or document that is
            ``n`` times as long, it is larger by ``(2 n - 1) ** (d / (d - 2))`` ("dynamic" scaling by 2). None for all.
        yarn: scaling of the wavelengths (YaRN), or None.
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
    window: int | None = None
    sinks: bool = False
    latent: Latent | None = None
    trained_length: int | None = None
    yarn: Yarn | None = None

    def but(self, **changes: Any) -> "Sizes":
        """Return these sizes with changes."""
        return replace(self, **changes)

    @property
    def rotation(self) -> Rotation:
        """The rotation of queries and keys."""
        width = self.head_dim if self.latent is None else self.latent.rotated
        return Rotation(width, self.base, self.trained_length, self.yarn)


class DenseBlock(nn.Module):
    """One layer: attention and an MLP, each after a norm and added to its input."""

    def __init__(self, sizes: Sizes, number: int) -> None:
        super().__init__()
        h, d = sizes.hidden, sizes.head_dim
        self.sizes = sizes
        self.window = sizes.window if number % 2 == 0 else None
        self.norm1, self.norm2 = (nn.RMSNorm(h, eps=sizes.epsilon) for _ in range(2))
        if sizes.latent is None:
            self.q = nn.Linear(h, sizes.heads * d, bias=False)
            self.k, self.v = (nn.Linear(h, sizes.kv_heads * d, bias=False) for _ in range(2))
            self.o = nn.Linear(sizes.heads * d, h, bias=False)
        else:
            self.latent = LatentProjections(sizes.latent, h, sizes.heads, d)
            self.o = nn.Linear(sizes.heads * sizes.latent.value, h, bias=False)
        if sizes.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(d, eps=sizes.epsilon) for _ in range(2))
        if sizes.sinks:
            self.sinks = nn.Parameter(torch.empty(sizes.heads))
        self.gate, self.up = (nn.Linear(h, sizes.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.ffn, h, bias=False)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map ``[b, s, h]`` to ``[b, s, h]``. The number of heads comes from the projections' outputs.

        ``documents`` ``[b, s]`` are as of ``DenseModel``.
        """
        x = x + self._attention(self.norm1(x), documents)
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out

    def _attention(self, x: Tensor, documents: Tensor | None) -> Tensor:
        q, k, v = self._heads(x, documents)
        k, v = (each.repeat_interleave(q.size(2) // k.size(2), dim=2) for each in (k, v))
        out: Tensor = self.o(self.attended(q, k, v, documents).flatten(2))
        return out

    def attended(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Return the outputs of the heads ``[b, s, heads, width]`` for queries, keys and values of that shape."""
        s = q.size(1)
        factor = 1.0 if self.sizes.yarn is None else self.sizes.yarn.score_factor
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (factor / math.sqrt(q.size(-1)))
        scores = scores.masked_fill(self._forbidden(s, documents, scores.device), -torch.inf)
        if self.sizes.sinks:
            scores = torch.cat([scores, self.sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = scores.softmax(-1)[..., :s]
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    def angles(self, s: int, documents: Tensor | None) -> Tensor:
        """Return the rotary angles of ``s`` tokens, as of ``Rotation``."""
        return self.sizes.rotation.angles(s, documents)

    def _heads(self, x: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, ``[b, s, heads, width]``."""
        rotation = self.sizes.rotation
        if self.sizes.latent is not None:
            result: tuple[Tensor, Tensor, Tensor] = self.latent(x, rotation, self.angles(x.size(1), documents))
            return result
        q, k, v = (layer(x).unflatten(-1, (-1, self.sizes.head_dim)) for layer in (self.q, self.k, self.v))
        if self.sizes.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        # The projections may have gathered the sequence.
        angles = self.angles(q.size(1), documents)
        return rotation.turned(q, angles), rotation.turned(k, angles), v

    def _forbidden(self, s: int, documents: Tensor | None, device: torch.device) -> Tensor:
        """Return which keys each query may not see, broadcast to ``[b, heads, s, s]``."""
        positions = torch.arange(s, device=device)
        before = positions[:, None] - positions
        forbidden = before < 0
        if self.window is not None:
            forbidden = forbidden | (before >= self.window)
        if documents is not None:
            forbidden = forbidden | (documents[:, None, :, None] != documents[:, None, None, :])
        return forbidden


class DenseModel(nn.Module):
    """The language model; its ``state_dict`` has the protocol's names, and ``block`` makes the layer of a number."""

    def __init__(self, sizes: Sizes, block: Callable[[Sizes, int], DenseBlock] = DenseBlock) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(block(sizes, number) for number in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=sizes.epsilon)
        if not sizes.tied:
            self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.double()

    def logits(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map ids ``[b, s]`` to logits ``[b, s, v]``."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, documents)
        x = self.norm(x)
        out: Tensor = F.linear(x, self.embedding.weight) if self.sizes.tied else self.head(x)
        return out

    def forward(self, ids: Tensor, labels: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map ids and labels ``[b, s]`` to the loss of each label ``[b, s]``; 0 for an ignored one.

        A token sees only tokens with the same number in ``documents`` ``[b, s]``, if these are given.
        """
        logits = self.logits(ids, documents)
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
    """Return copies of the parameters and buffers, by name."""
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


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


def num_labels(batches: Sequence[Batch], groups: Groups) -> Tensor:
    """Return the number of labels of all data-parallel ranks; context-parallel ranks have the same batches."""
    assert groups.dp is not None
    own = sum(int((labels != IGNORED).sum()) for _, labels in batches)
    _, num_ranks = groups.data.samples
    return summed(torch.tensor(own, dtype=torch.float64), groups.dp) * (num_ranks / groups.dp.size())


def backward_of_mean(model: nn.Module, batches: Sequence[Batch], count: Tensor | None = None) -> Tensor:
    """Run forward and backward of the mean loss over the labels of all batches together; return that mean.

    If other ranks have labels too, ``count`` is the number to divide by, and this rank's term of the mean is returned.
    """
    if count is None:
        count = torch.tensor(sum(int((labels != IGNORED).sum()) for _, labels in batches))
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels in batches:
        output = model(ids, labels)
        losses = output[0] if isinstance(output, tuple) else output
        loss = losses.sum() / count
        loss.backward()
        total += loss.detach()
    return total
