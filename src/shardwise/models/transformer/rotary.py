"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Rotated are pairs of elements of a head: ``i`` and ``i + d/2``, the half-split form of GPT-NeoX and Llama, or ``2i`` and
``2i + 1``, the interleaved form of the paper.
"""

from typing import Any, Self

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.kernels.elementwise import rotate
from shardwise.models.transformer.rotary_scaling import RotaryScaling
from shardwise.nn.module import FixedTensors, on_default_device

__all__ = ["RotaryEmbedding", "RotaryScaling", "apply_rotary"]


class RotaryEmbedding(FixedTensors):
    """Angles by position.

    Args:
        head_dim: width of a head.
        rotary_percent: share of the head that is rotated, from 0 to 1.
        rotary_base: base of the geometric sequence of wavelengths.
        rope_scaling: lowers the frequencies, for longer contexts.

    Attributes:
        inverse_frequencies: ``[d/2]`` in fp64, on the module's device; no buffer. What they are made of where
            ``depends_on_length``.
        depends_on_length: they depend on the sequence's length, beyond the context of the first training.

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
        self._scaling = rope_scaling
        # Frequencies that depend on the length are made in each forward.
        self.depends_on_length = rope_scaling is not None and rope_scaling.depends_on_length
        if rope_scaling is not None:
            frequencies = rope_scaling.scale(frequencies, rotary_base)
        self.inverse_frequencies = on_default_device(frequencies)
        self._factor = 1.0 if rope_scaling is None else rope_scaling.cos_sin_factor
        self._tables: dict[tuple[torch.device, torch.dtype, int], tuple[Tensor, Tensor]] = {}

    def forward(self, positions: Tensor, dtype: torch.dtype, *, length: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Cosine and sine for each position, times the factor of YaRN's or LongRoPE's scaling.

        Args:
            positions: ``[s]`` or ``[b, s]`` token positions.
            dtype: dtype of what will be rotated.
            length: number of positions of the whole sequence, a tensor ``[]`` of it, or ``[b, 1]`` or ``[b, s]`` of
                the text of each position; read where ``depends_on_length``.

        Returns:
            Two tensors ``[s, 1 or b, 1, d/2]``.
        """
        if positions.dim() == 1:
            positions = positions.unsqueeze(0)
        if self.inverse_frequencies.device != positions.device:
            # Once: a copy in every forward would let the host wait, and no CUDA graph could be captured.
            self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        frequencies = self.inverse_frequencies
        if self.depends_on_length:
            assert self._scaling is not None
            frequencies = self._scaling.at_length(frequencies, length)
            if frequencies.dim() > 1:
                frequencies = frequencies.transpose(0, 1).unsqueeze(2)
        angles = positions.t()[:, :, None, None].double() * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return cos.to(dtype), sin.to(dtype)

    def is_outgrown_at(self, length: int) -> bool:
        """See ``RotaryScaling.is_outgrown_at``."""
        return self._scaling is not None and self._scaling.is_outgrown_at(length)

    def tables(
        self, position_ids: Tensor | None, s: int, like: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the tokens of a batch, as ``forward`` returns them.

        Args:
            position_ids: ``[s]`` or ``[b, s]``; 0 to ``s - 1`` if None.
            s: length of the sequence.
            like: of the dtype and on the device of what will be rotated.
            lengths: ``[b, 1]`` or ``[b, s]``: how long the text of each token is; read where ``depends_on_length``. If
                None all are of one, which is as long as the largest position says.
        """
        if position_ids is None and (lengths is None or not self.depends_on_length):
            return self.first(s, like.dtype, like.device)
        positions = torch.arange(s, device=like.device) if position_ids is None else position_ids
        if lengths is None and self.depends_on_length:
            # The host does not wait for it.
            lengths = positions.max() + 1
        made: tuple[Tensor, Tensor] = self(positions, like.dtype, length=s if lengths is None else lengths)
        return made

    def first(self, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """What ``forward`` returns for the positions 0 to ``count - 1``, computed once and kept.

        Args:
            count: ``s``; of the longest so far the tables are kept.
            dtype: dtype of what will be rotated.
            device: of what will be rotated.
        """
        key = device, dtype, count if self.depends_on_length else 0
        kept = self._tables.get(key)
        if kept is None or kept[0].size(0) < count:
            # Of a model that generates first and is trained then, autograd must be able to keep them.
            with torch.inference_mode(False):
                kept = self(torch.arange(count, device=device), dtype, length=count)
            # The compiler makes what it traces anew, and a fake tensor is of its mode alone.
            if not torch.compiler.is_compiling() and type(kept[0]) is type(self.inverse_frequencies):
                self._tables[key] = kept
        cos, sin = kept
        return cos[:count], sin[:count]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """As PyTorch's; tables are computed anew where the module goes."""
        self._tables.clear()
        return super()._apply(fn, recurse)


def apply_rotary(
    input_: Tensor, rotary: tuple[Tensor, Tensor], *, interleaved: bool = False, at_any_size: bool = False
) -> Tensor:
    """Rotate queries or keys.

    Args:
        input_: ``[s, b, heads, d]``; not modified.
        rotary: cosine and sine from ``RotaryEmbedding``.
        interleaved: pairs are elements ``2i`` and ``2i + 1``, not ``i`` and ``i + d/2``.
        at_any_size: let the number of heads that are here not choose what computes.

    Returns:
        A new tensor of the same shape.
    """
    return rotate(input_, *rotary, interleaved=interleaved, at_any_size=at_any_size)
