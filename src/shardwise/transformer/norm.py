"""The norms of a transformer, PyTorch's own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config import TransformerConfig


class ZeroCenteredLayerNorm(nn.LayerNorm):
    """LayerNorm that keeps its weight minus 1."""

    def reset_parameters(self) -> None:
        """The whole weight is 1, the bias 0."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input_: Tensor) -> Tensor:
        """``[..., n]`` to the same."""
        return F.layer_norm(input_, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """RMSNorm that keeps its weight minus 1."""

    def reset_parameters(self) -> None:
        """The whole weight is 1."""
        nn.init.zeros_(self.weight)

    def forward(self, input_: Tensor) -> Tensor:
        """``[..., n]`` to the same."""
        return F.rms_norm(input_, self.normalized_shape, self.weight + 1, self.eps)


_NORMS: dict[tuple[str, bool], type[nn.LayerNorm] | type[nn.RMSNorm]] = {
    ("LayerNorm", False): nn.LayerNorm,
    ("LayerNorm", True): ZeroCenteredLayerNorm,
    ("RMSNorm", False): nn.RMSNorm,
    ("RMSNorm", True): ZeroCenteredRMSNorm,
}


def make_norm(config: TransformerConfig, width: int | None = None) -> nn.Module:
    """The norm that ``config`` names.

    Every rank holds its parameters whole. With sequence parallelism each rank sees only a part of the tokens, so their
    gradients are partial sums (``param.sequence_parallel``).

    Args:
        config: kind, epsilon, dtype and sequence parallelism.
        width: of what is normalised; ``hidden_size`` if None.
    """
    kind = _NORMS[config.normalization, config.layernorm_zero_centered_gamma]
    norm = kind(width or config.hidden_size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
