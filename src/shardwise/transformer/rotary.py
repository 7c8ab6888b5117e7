"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Rotated are pairs of elements of a head: ``i`` and ``i + d/2``, the half-split form of GPT-NeoX and Llama, or ``2i`` and
``2i + 1``, the interleaved form of the paper.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.errors import ConfigError
from shardwise.kernels.elementwise_cpu import rotate_halves
from shardwise.transformer.fixed import FixedTensors, on_default_device
from shardwise.transformer.rotary_scaling import RotaryScaling

__all__ = ["RotaryEmbedding", "RotaryScaling", "apply_rotary"]


class _Rotate(Function):
    """Rotate pairs by an angle; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(input_, cos, sin, interleaved, backwards=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grad_output, cos, sin, ctx.interleaved, backwards=True), None, None, None


def _rotate(input_: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, backwards: bool) -> Tensor:
    if not interleaved and (turned_halves := rotate_halves(input_, cos, sin, backwards=backwards)) is not None:
        return turned_halves
    if backwards:
        sin = -sin
    rotated = 2 * cos.size(-1)
    first, second = _pairs(input_, rotated, interleaved)
    if torch.compiler.is_compiling():
        # The compiler does not trace results that are written into parts of a tensor, and needs no such help.
        turned = (first * cos - second * sin, second * cos + first * sin)
        together = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
        return torch.cat((together, input_[..., rotated:]), dim=-1) if rotated < input_.size(-1) else together
    output = torch.empty(input_.shape, dtype=input_.dtype, device=input_.device)
    to_first, to_second = _pairs(output, rotated, interleaved)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    if rotated < input_.size(-1):
        output[..., rotated:] = input_[..., rotated:]
    return output


def _pairs(tensor: Tensor, rotated: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second element of each pair."""
    if interleaved:
        return tensor[..., 0:rotated:2], tensor[..., 1:rotated:2]
    return tensor[..., : rotated // 2], tensor[..., rotated // 2 : rotated]


class RotaryEmbedding(FixedTensors):
    """Angles by position.

    Args:
        head_dim: width of a head.
        rotary_percent: share of the head that is rotated, from 0 to 1.
        rotary_base: base of the geometric sequence of wavelengths.
        rope_scaling: lowers the frequencies, for longer contexts.

    Attributes:
        inverse_frequencies: ``[d/2]`` in fp64, on the module's device; no buffer.

    Raises:
        ConfigError: ``rotary_percent`` is not from 0 to 1, or ``rotary_base`` is not over 1.
    """

    _fixed = ("inverse_frequencies",)

    def __init__(
        self,
        head_dim: int,
        rotary_percent: float = 1.0,
        rotary_base: float = 10000.0,
        rope_scaling: RotaryScaling | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= rotary_percent <= 1 or not rotary_base > 1:
            raise ConfigError(
                f"rotary_percent {rotary_percent} must be from 0 to 1, and rotary_base {rotary_base} over 1"
            )
        rotated = int(head_dim * rotary_percent) // 2 * 2
        # fp64: positions times frequencies lose digits in fp32 long before the context ends.
        frequencies = rotary_base ** -(torch.arange(0, rotated, 2, dtype=torch.float64, device="cpu") / rotated)
        if rope_scaling is not None:
            frequencies = rope_scaling.scale(frequencies, rotary_base)
        self.inverse_frequencies = on_default_device(frequencies)
        self._factor = 1.0 if rope_scaling is None else rope_scaling.cos_sin_factor

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine for each position, times the factor of YaRN's scaling.

        Args:
            positions: ``[s]`` or ``[b, s]`` token positions.
            dtype: dtype of what will be rotated.

        Returns:
            Two tensors ``[s, 1 or b, 1, d/2]``.
        """
        if positions.dim() == 1:
            positions = positions.unsqueeze(0)
        angles = positions.t()[:, :, None, None].double() * self.inverse_frequencies.to(positions.device)
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return cos.to(dtype), sin.to(dtype)


def apply_rotary(input_: Tensor, rotary: tuple[Tensor, Tensor], *, interleaved: bool = False) -> Tensor:
    """Rotate queries or keys.

    Args:
        input_: ``[s, b, heads, d]``; not modified.
        rotary: cosine and sine from ``RotaryEmbedding``.
        interleaved: pairs are elements ``2i`` and ``2i + 1``, not ``i`` and ``i + d/2``.

    Returns:
        A new tensor of the same shape.
    """
    result: Tensor = _Rotate.apply(input_, *rotary, interleaved)
    return result
