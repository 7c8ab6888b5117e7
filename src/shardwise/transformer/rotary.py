"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split form of GPT-NeoX and Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _Rotate(Function):
    """Rotate pairs ``(x[i], x[i + d/2])`` by an angle; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(input_, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grad_output, cos, -sin), None, None


def _rotate(input_: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.size(-1)
    first, second, rest = input_.split((half, half, input_.size(-1) - 2 * half), dim=-1)
    output = torch.empty(input_.shape, dtype=input_.dtype, device=input_.device)
    torch.mul(first, cos, out=output[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=output[..., half : 2 * half]).addcmul_(first, sin)
    if rest.size(-1):
        output[..., 2 * half :] = rest
    return output


class RotaryEmbedding(nn.Module):
    """Angles by position, and their application.

    Args:
        head_dim: width of a head.
        rotary_percent: share of the head that is rotated, from 0 to 1.
        rotary_base: base of the geometric sequence of wavelengths.
    """

    def __init__(self, head_dim: int, rotary_percent: float = 1.0, rotary_base: float = 10000.0) -> None:
        super().__init__()
        rotated = int(head_dim * rotary_percent) // 2 * 2
        # fp64: positions times frequencies lose digits in fp32 long before the context ends.
        self.inverse_frequencies = rotary_base ** -(
            torch.arange(0, rotated, 2, dtype=torch.float64, device="cpu") / rotated
        )

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine for each position.

        Args:
            positions: ``[s]`` or ``[b, s]`` token positions.
            dtype: dtype of what will be rotated.

        Returns:
            Two tensors ``[s, 1 or b, 1, d/2]``.
        """
        if positions.dim() == 1:
            positions = positions.unsqueeze(0)
        angles = positions.t()[:, :, None, None].double() * self.inverse_frequencies.to(positions.device)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(input_: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys.

    Args:
        input_: ``[s, b, heads, d]``; not modified.
        rotary: cosine and sine from ``RotaryEmbedding``.

    Returns:
        A new tensor of the same shape.
    """
    result: Tensor = _Rotate.apply(input_, *rotary)
    return result
