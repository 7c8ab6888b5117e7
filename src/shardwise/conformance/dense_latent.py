"""Rotary positions and the projections of latent attention, for the dense model that cases compare with."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Yarn:
    """YaRN's scaling of wavelengths as in DeepSeek's models, with bounds of 1 and 32 turns.

    Attributes:
        factor, trained_length: growth of the context, and its length before.
        mscale, mscale_all_dim: the scores have the factor ``score_factor``, and cosine and sine that of ``mscale``
            divided by that of ``mscale_all_dim``.
    """

    factor: float
    trained_length: int
    mscale: float
    mscale_all_dim: float

    @property
    def score_factor(self) -> float:
        """Factor of all scores."""
        return self._magnitude(self.mscale_all_dim) ** 2

    @property
    def rotary_factor(self) -> float:
        """Factor of cosine and sine."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    def scaled(self, frequency: Tensor, base: float) -> Tensor:
        """Return the scaled frequencies, from ``[d/2]``."""
        half = len(frequency)

        def index(turns: float) -> float:
            return half * math.log(self.trained_length / (turns * 2 * math.pi)) / math.log(base)

        first, last = max(math.floor(index(32)), 0), min(math.ceil(index(1)), 2 * half - 1)
        lowered = ((torch.arange(half, dtype=torch.float64) - first) / max(last - first, 0.001)).clamp(0, 1)
        return frequency * (1 - lowered + lowered / self.factor)

    def _magnitude(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of ``width`` elements of each head; other attributes as of ``Sizes``."""

    width: int
    base: float
    trained_length: int | None
    yarn: Yarn | None

    def angles(self, s: int, documents: Tensor | None) -> Tensor:
        """Return the angles of ``s`` positions, ``[1 or b, s, 1, width/2]``."""
        half = self.width // 2
        exponent = -torch.arange(half, dtype=torch.float64) / half
        frequency = self.base**exponent
        if self.yarn is not None:
            frequency = self.yarn.scaled(frequency, self.base)
        positions = torch.arange(s, dtype=torch.float64)[:, None, None]
        if self.trained_length is None:
            return (positions * frequency).unsqueeze(0)
        same = torch.full((1, s), s) if documents is None else (documents[:, :, None] == documents[:, None]).sum(-1)
        growth = (2 * same.double() / self.trained_length - 1).clamp(min=1) ** (half / (half - 1))
        return positions * ((self.base * growth)[:, :, None, None] ** exponent)

    def turned(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return ``[b, s, heads, width]`` rotated."""
        factor = 1.0 if self.yarn is None else self.yarn.rotary_factor
        cos, sin = (factor * angles.cos()).to(x.dtype), (factor * angles.sin()).to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention.

    ``rank`` is that of the latent of keys and values, ``rotated`` that of the rotated part of a query and of the part
    that all keys of a token share, ``value`` that of a head's value, and ``query_rank`` that of the latent of queries,
    None if they are a projection of the hidden states.
    """

    rank: int
    rotated: int
    value: int
    query_rank: int | None = None


class LatentProjections(nn.Module):
    """Queries, keys and values of latent attention. The norms of latents have an epsilon of 1e-6.

    ``plain`` is the width of the part of a head's query and key that is not rotated.
    """

    def __init__(self, latent: Latent, hidden: int, heads: int, plain: int) -> None:
        super().__init__()
        self.latent, self.heads, self.plain = latent, heads, plain
        width = plain + latent.rotated
        if latent.query_rank is None:
            self.q = nn.Linear(hidden, heads * width, bias=False)
        else:
            self.q_down = nn.Linear(hidden, latent.query_rank, bias=False)
            self.q_norm = nn.RMSNorm(latent.query_rank, eps=1e-6)
            self.q_up = nn.Linear(latent.query_rank, heads * width, bias=False)
        self.kv_down = nn.Linear(hidden, latent.rank + latent.rotated, bias=False)
        self.kv_norm = nn.RMSNorm(latent.rank, eps=1e-6)
        self.kv_up = nn.Linear(latent.rank, heads * (plain + latent.value), bias=False)

    def forward(self, x: Tensor, rotation: Rotation, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys ``[b, s, heads, plain + rotated]``, and values, from ``[b, s, hidden]``."""
        q = self.q(x) if self.latent.query_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        q_plain, q_rotated = q.unflatten(-1, (self.heads, -1)).split([self.plain, self.latent.rotated], -1)
        latent, shared = self.kv_down(x).split([self.latent.rank, self.latent.rotated], -1)
        k_plain, v = (
            self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.heads, -1)).split([self.plain, self.latent.value], -1)
        )
        shared = rotation.turned(shared.unsqueeze(2), angles).expand(-1, -1, self.heads, -1)
        return torch.cat([q_plain, rotation.turned(q_rotated, angles)], -1), torch.cat([k_plain, shared], -1), v
