"""A Llama-like model in plain PyTorch, for every baseline.

The modules and their names follow torchtitan. Rotary positions multiply complex numbers, also as in torchtitan, which
is the fastest way in plain PyTorch on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steps.problem import NORM_EPSILON, ROTARY_BASE, LlamaSizes, Weights, fuse_qkv


class _Rotary:
    """Rotates pairs of adjacent channels by position times frequency."""

    def __init__(self, sizes: LlamaSizes, sequence_dim: int) -> None:
        exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.float64) / sizes.head_dim
        angles = torch.outer(torch.arange(sizes.sequence_length, dtype=torch.float64), ROTARY_BASE**-exponents)
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64).unsqueeze(1)
        self.turns = turns.unsqueeze(1 - sequence_dim)

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``[b, s, heads, d]`` or ``[s, b, heads, d]`` to the same shape."""
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.turns).flatten(-2)


class _Attention(nn.Module):
    def __init__(self, sizes: LlamaSizes, rotary: _Rotary, shards: int, sequence_dim: int, fused: bool) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.rotary = rotary
        self.fused = fused
        # [b, s, heads, d] or [s, b, heads, d] -> [b, heads, s, d] and back, as views.
        self.to_heads, self.from_heads = ((0, 2, 1, 3),) * 2 if sequence_dim == 1 else ((1, 2, 0, 3), (2, 0, 1, 3))
        width = sizes.hidden_size // shards
        if fused:
            self.wqkv = nn.Linear(sizes.hidden_size, 3 * width, bias=False)
        else:
            self.wq = nn.Linear(sizes.hidden_size, width, bias=False)
            self.wk = nn.Linear(sizes.hidden_size, width, bias=False)
            self.wv = nn.Linear(sizes.hidden_size, width, bias=False)
        self.wo = nn.Linear(width, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            q, k, v = self.wqkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        else:
            q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv))
        q, k, v = (y.permute(self.to_heads) for y in (self.rotary(q), self.rotary(k), v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.wo(context.permute(self.from_heads).flatten(2))
        return output


class _FeedForward(nn.Module):
    def __init__(self, sizes: LlamaSizes, shards: int, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        width = sizes.ffn_hidden_size // shards
        if fused:
            self.w13 = nn.Linear(sizes.hidden_size, 2 * width, bias=False)
        else:
            self.w1 = nn.Linear(sizes.hidden_size, width, bias=False)
            self.w3 = nn.Linear(sizes.hidden_size, width, bias=False)
        self.w2 = nn.Linear(width, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1) if self.fused else (self.w1(x), self.w3(x))
        output: Tensor = self.w2(F.silu(gate) * up)
        return output


class _Layer(nn.Module):
    def __init__(self, sizes: LlamaSizes, rotary: _Rotary, shards: int, sequence_dim: int, fused: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden_size, eps=NORM_EPSILON)
        self.attention = _Attention(sizes, rotary, shards, sequence_dim, fused)
        self.ffn_norm = nn.RMSNorm(sizes.hidden_size, eps=NORM_EPSILON)
        self.feed_forward = _FeedForward(sizes, shards, fused)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return output


class DenseLlama(nn.Module):
    """The model.

    Args:
        sizes: sizes of the whole model.
        shards: factor by which the modules are narrower, for a rank that holds one shard of each weight.
        sequence_dim: 1 for hidden states ``[b, s, h]``, 0 for ``[s, b, h]``.
        fused: use one linear layer instead of three for queries, keys and values, and one instead of two for gate and
            up.
    """

    def __init__(self, sizes: LlamaSizes, *, shards: int = 1, sequence_dim: int = 1, fused: bool = False) -> None:
        super().__init__()
        self.sizes = sizes
        self.fused = fused
        rotary = _Rotary(sizes, sequence_dim)
        self.tok_embeddings = nn.Embedding(sizes.vocab_size // shards, sizes.hidden_size)
        self.layers = nn.ModuleList(_Layer(sizes, rotary, shards, sequence_dim, fused) for _ in range(sizes.num_layers))
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=NORM_EPSILON)
        self.output = nn.Linear(sizes.hidden_size, sizes.vocab_size // shards, bias=False)
        self.tie()

    def tie(self) -> None:
        """Make the output layer use the embedding's parameter if weights are tied; call again after replacing it."""
        if self.sizes.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Compute logits ``[b, s, v]`` from ids ``[b, s]``, or ``[s, b, v]`` from ``[s, b]``."""
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.output(self.norm(x))
        return logits

    @torch.no_grad()
    def load(self, weights: Weights, *, num_ranks: int = 1) -> DenseLlama:
        """Copy whole weights into the unsplit model, and return it.

        Args:
            weights: whole weights, as in ``Problem``.
            num_ranks: number of ranks that will split a fused gate and up, in which each rank's parts are adjacent.
        """
        targets = dict(self.named_parameters())
        for name, whole in _fused(weights, self.sizes.head_dim, num_ranks) if self.fused else weights.items():
            targets.pop(name).copy_(whole)
        assert not targets, f"no weights for {sorted(targets)}"
        return self


def _fused(weights: Weights, head_dim: int, num_ranks: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under the names of ``DenseLlama(fused=True)``."""
    for name, whole in weights.items():
        if name.endswith("wq.weight"):
            parts = [weights[name.replace("wq", linear)] for linear in ("wq", "wk", "wv")]
            yield name.replace("wq", "wqkv"), fuse_qkv(parts, head_dim)
        elif name.endswith("w1.weight"):
            gates, ups = whole.chunk(num_ranks), weights[name.replace("w1", "w3")].chunk(num_ranks)
            yield name.replace("w1", "w13"), torch.cat([part for pair in zip(gates, ups, strict=True) for part in pair])
        elif not name.endswith(("wk.weight", "wv.weight", "w3.weight")):
            yield name, whole
