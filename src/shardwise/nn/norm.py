"""The norms of a transformer: PyTorch's modules, with ``kernels.norms`` for RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import Interval
from shardwise.kernels.norms import add_rms_norm, rms_norm

Normalization = Literal["LayerNorm", "RMSNorm"]


class ZeroCenteredLayerNorm(nn.LayerNorm):
    """LayerNorm that stores its weight minus 1."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input_: Tensor) -> Tensor:
        return F.layer_norm(input_, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm over the last dimension (``kernels.norms``)."""

    def forward(self, input_: Tensor) -> Tensor:
        return rms_norm(input_, self.weight, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm that stores its weight minus 1."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, input_: Tensor) -> Tensor:
        return rms_norm(input_, self.weight + 1, self.eps)


class HeadsRMSNorm(nn.Module):
    """RMSNorm over all heads of a token together, where each rank of a group holds some heads.

    The mean square is over all heads, so the ranks sum their squares over the group. Every rank holds the whole weight
    and uses the part of its heads, so gradients are partial sums.

    Args:
        width: width of all heads together.
        heads: this rank's heads, as an interval of all heads.
        num_counted: number of this rank's heads, at the end of its interval, that no earlier rank holds.
        head_dim: width of a head.
        eps, zero_centered: constant added to the mean square; whether the weight is stored minus 1.

    Attributes:
        weight: ``[width]``.
    """

    def __init__(
        self,
        width: int,
        heads: Interval,
        num_counted: int,
        head_dim: int,
        *,
        eps: float,
        zero_centered: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.heads, self.num_counted, self.head_dim = heads, num_counted, head_dim
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def squares(self, input_: Tensor) -> Tensor:
        """Return this rank's part ``[s, b]`` of the sum of squares of all ``[s, b, heads, d]``, in fp32 or fp64."""
        return self.squares_of(input_[:, :, input_.size(2) - self.num_counted :])

    def squares_of(self, heads: Tensor) -> Tensor:
        """Sum the squares of ``[s, b, heads, d]`` to ``[s, b]``, in fp32 or fp64."""
        return _wide(heads).square().sum(dim=(2, 3))

    def forward(self, input_: Tensor, squares: Tensor) -> Tensor:
        """Normalize ``[s, b, heads, d]`` by ``squares``, ``[s, b]``, the sum of squares over all heads."""
        return self.norm_some(input_, squares, self.weight, self.heads)

    def norm_some(self, input_: Tensor, squares: Tensor, weight: Tensor, heads: Interval) -> Tensor:
        """Apply ``forward`` to the interval ``heads`` with the given ``weight``, ``[width]``."""
        start, stop = (self.head_dim * head for head in heads)
        weight = weight[start:stop].view(-1, self.head_dim)
        scale = torch.rsqrt(squares / self.weight.size(0) + self.eps)[:, :, None, None]
        wide = _wide(weight)
        return (_wide(input_) * scale * (wide + 1 if self.zero_centered else wide)).to(input_.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


NORMS: dict[tuple[Normalization, bool], type[nn.LayerNorm] | type[RMSNorm]] = {
    ("LayerNorm", False): nn.LayerNorm,
    ("LayerNorm", True): ZeroCenteredLayerNorm,
    ("RMSNorm", False): RMSNorm,
    ("RMSNorm", True): ZeroCenteredRMSNorm,
}


@dataclass(frozen=True, eq=False)
class NormFunction:
    """A norm as a function of its parameters, for a layer that applies the norm of another layer.

    Attributes:
        weight: ``[n]``.
        bias: ``[n]``; None for RMSNorm.
        eps: constant added to the variance.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered: whether ``weight`` is stored minus 1.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    normalization: Normalization
    zero_centered: bool = False

    @classmethod
    def of(cls, norm: nn.Module) -> NormFunction:
        """Return the function of a norm module, with the module's own parameters.

        Raises:
            ConfigError: the class of ``norm`` is not in ``NORMS``.
        """
        for (normalization, zero_centered), kind in NORMS.items():
            if _kind_of(norm) is kind:
                return cls(norm.weight, getattr(norm, "bias", None), norm.eps, normalization, zero_centered)  # type: ignore[arg-type]
        raise ConfigError(f"{type(norm).__name__} is not one of the norms in shardwise.nn.norm.NORMS")

    @property
    def whole_weight(self) -> Tensor:
        """The factor of the normalized values, ``[n]``."""
        return self.weight + 1 if self.zero_centered else self.weight

    def __call__(self, input_: Tensor) -> Tensor:
        """Normalize ``[..., n]`` over the last dimension."""
        if self.normalization == "RMSNorm":
            return rms_norm(input_, self.whole_weight, self.eps)
        return F.layer_norm(input_, self.weight.shape, self.whole_weight, self.bias, self.eps)


def add_and_norm(norm: nn.Module, residual: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``residual + added`` and its norm. An RMSNorm uses one fused kernel for both if there is one.

    Args:
        norm: any norm. An RMSNorm of ``NORMS`` is not called as a module, unless it has hooks.
        residual: ``[..., n]``.
        added: ``[..., n]``.
    """
    if _kind_of(norm) in (RMSNorm, ZeroCenteredRMSNorm) and not _has_hooks(norm):
        function = NormFunction.of(norm)
        return add_rms_norm(residual, added, function.whole_weight, function.eps)
    total = residual + added
    return total, norm(total)


def _kind_of(norm: nn.Module) -> type:
    """Return the class of a norm; a subclass that computes the same names its base class as ``kind``."""
    kind: type = vars(type(norm)).get("kind", type(norm))
    return kind


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return any(getattr(module, f"_{kind}_hooks") for kind in kinds)
