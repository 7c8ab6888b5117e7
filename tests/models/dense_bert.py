"""The oracle: a dense BERT in plain PyTorch, which shares no code with the library.

It reads a dictionary of whole weights under the names that the library's model gives them, and has the norms that are
in it: those of a layer come after its additions (BERT's own) or before attention and MLP (Megatron's).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class DenseBert:
    """Sizes of the model; ``weights`` come with each call, so that gradients are easy to ask for."""

    num_layers: int
    num_heads: int
    head_dim: int
    epsilon: float = 1e-5

    def __call__(self, weights: Weights, ids: Tensor, real: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        """``[b, s]`` ids, 1 for real tokens, and token types, to logits ``[b, s, v]`` and ``[b, 2]``."""
        b, s = ids.shape
        x = weights["embedding.word_embeddings.weight"][ids] + weights["embedding.tokentype_embeddings.weight"][kinds]
        x = x + weights["embedding.position_embeddings.weight"][:s]
        x = self._norm(weights, "embedding.layernorm.", x)
        for i in range(self.num_layers):
            p = f"encoder.layers.{i}."
            y = self._norm(weights, p + "input_layernorm.", x)
            qkv = self._linear(weights, p + "self_attention.linear_qkv.", y)
            q, k, v = qkv.reshape(b, s, self.num_heads, 3, self.head_dim).unbind(3)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.head_dim)
            share = (scores.exp() * real[:, None, None, :]) / (scores.exp() * real[:, None, None, :]).sum(-1, True)
            y = torch.einsum("bhqk,bkhd->bqhd", share, v).reshape(b, s, -1)
            x = x + self._linear(weights, p + "self_attention.linear_proj.", y)
            x = self._norm(weights, p + "post_self_attn_layernorm.", x)
            y = self._norm(weights, p + "pre_mlp_layernorm.", x)
            y = self._linear(weights, p + "mlp.linear_fc2.", gelu(self._linear(weights, p + "mlp.linear_fc1.", y)))
            x = self._norm(weights, p + "post_mlp_layernorm.", x + y)
        x = self._norm(weights, "encoder.final_layernorm.", x)
        sentence = torch.tanh(self._linear(weights, "pooler.dense.", x[:, 0]))
        x = self._norm(weights, "lm_head.layernorm.", gelu(self._linear(weights, "lm_head.dense.", x)))
        table = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
        return x @ table.T + weights["output_layer.bias"], self._linear(weights, "binary_head.", sentence)

    def _norm(self, weights: Weights, p: str, x: Tensor) -> Tensor:
        if p + "weight" not in weights:
            return x
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.sqrt((centred * centred).mean(-1, keepdim=True) + self.epsilon)
        return centred / scale * weights[p + "weight"] + weights[p + "bias"]

    def _linear(self, weights: Weights, p: str, x: Tensor) -> Tensor:
        return x @ weights[p + "weight"].T + weights[p + "bias"]


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def masked_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """``[b, s]`` cross entropy of each token; a label of -100 costs nothing."""
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels == -100, torch.zeros_like(picked), -picked)
