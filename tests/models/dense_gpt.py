"""The oracle: a dense GPT in plain PyTorch, which shares no code with the library.

It reads a dictionary of whole weights under the names that the library's model gives them, and computes with explicit
matrix products and an explicit softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class DenseGPT:
    """Sizes and kinds of the model; ``weights`` come with each call, so that gradients are easy to ask for."""

    num_layers: int
    num_heads: int
    num_groups: int
    head_dim: int
    rms_norm: bool
    gated: bool
    rope: bool
    tied: bool
    epsilon: float = 1e-5
    rotary_base: float = 10000.0
    # Llama 3's lowered frequencies: factor, low_freq_factor, high_freq_factor, original context.
    llama3: tuple[float, float, float, int] | None = None
    alibi: bool = False

    def logits(self, weights: Weights, ids: Tensor) -> Tensor:
        """``[b, s]`` ids to ``[b, s, v]``."""
        x = weights["embedding.word_embeddings.weight"][ids]
        if "embedding.position_embeddings.weight" in weights:
            x = x + weights["embedding.position_embeddings.weight"][: ids.shape[1]]
        if "embedding.layernorm.weight" in weights:
            x = self._norm(weights, "embedding.layernorm.", x)
        for i in range(self.num_layers):
            p = f"decoder.layers.{i}."
            x = x + self._attention(weights, p + "self_attention.", self._norm(weights, p + "input_layernorm.", x))
            x = x + self._mlp(weights, p + "mlp.", self._norm(weights, p + "pre_mlp_layernorm.", x))
        if "decoder.final_layernorm.weight" in weights:
            x = self._norm(weights, "decoder.final_layernorm.", x)
        return x @ weights["embedding.word_embeddings.weight" if self.tied else "output_layer.weight"].T

    def loss(self, weights: Weights, ids: Tensor, labels: Tensor) -> Tensor:
        """``[b, s]`` cross entropy of each token; a label of -100 costs nothing."""
        log_p = self.logits(weights, ids).log_softmax(-1)
        picked = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return torch.where(labels == -100, torch.zeros_like(picked), -picked)

    def _norm(self, weights: Weights, p: str, x: Tensor) -> Tensor:
        if self.rms_norm:
            return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.epsilon) * weights[p + "weight"]
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.sqrt((centred * centred).mean(-1, keepdim=True) + self.epsilon)
        return centred / scale * weights[p + "weight"] + weights[p + "bias"]

    def _linear(self, weights: Weights, p: str, x: Tensor) -> Tensor:
        y = x @ weights[p + "weight"].T
        return y + weights[p + "bias"] if p + "bias" in weights else y

    def _attention(self, weights: Weights, p: str, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        per_group = self.num_heads // self.num_groups
        mixed = self._linear(weights, p + "linear_qkv.", x)
        mixed = mixed.reshape(b, s, self.num_groups, per_group + 2, self.head_dim)
        q = mixed[..., :per_group, :].reshape(b, s, self.num_heads, self.head_dim)
        k = mixed[..., per_group, :].repeat_interleave(per_group, dim=2)
        v = mixed[..., per_group + 1, :].repeat_interleave(per_group, dim=2)
        if self.rope:
            q, k = self._rotate(q), self._rotate(k)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.head_dim)
        if self.alibi:
            scores = scores + self._alibi(s)
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf)
        context = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return self._linear(weights, p + "linear_proj.", context.reshape(b, s, -1))

    def _rotate(self, x: Tensor) -> Tensor:
        """Each pair (i, i + d/2) as a complex number, turned by position times frequency."""
        half = self.head_dim // 2
        frequency = torch.tensor([self._frequency(i) for i in range(half)], dtype=torch.float64)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None, :]
        return torch.cat([turned.real, turned.imag], dim=-1)

    def _frequency(self, i: int) -> float:
        frequency = self.rotary_base ** (-2 * i / self.head_dim)
        if self.llama3 is None:
            return frequency
        factor, low, high, context = self.llama3
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            return frequency
        if wavelength > context / low:
            return frequency / factor
        smooth = (context / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / factor + smooth * frequency

    def _alibi(self, s: int) -> Tensor:
        """``[heads, s, s]``: BLOOM's slopes, for any number of heads, times the position of the key."""
        power = 2 ** math.floor(math.log2(self.num_heads))
        slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        base = 2 ** (-4 / power)
        slopes += [base ** (2 * i + 1) for i in range(self.num_heads - power)]
        return torch.tensor(slopes, dtype=torch.float64)[:, None, None] * torch.arange(s, dtype=torch.float64)

    def _mlp(self, weights: Weights, p: str, x: Tensor) -> Tensor:
        y = self._linear(weights, p + "linear_fc1.", x)
        if self.gated:
            gate, up = y[..., : y.shape[-1] // 2], y[..., y.shape[-1] // 2 :]
            y = gate * torch.sigmoid(gate) * up
        else:
            y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
        return self._linear(weights, p + "linear_fc2.", y)
