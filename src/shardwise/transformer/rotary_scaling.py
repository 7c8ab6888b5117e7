"""Rotary frequencies for contexts longer than the one that a model was first trained on."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardwise.errors import ConfigError

RotaryScalingKind = Literal["linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RotaryScaling:
    """How the frequencies of a ``RotaryEmbedding`` are lowered. Field names and meaning are those of Hugging Face.

    Attributes:
        kind: ``"linear"`` divides every frequency by ``factor`` (Chen et al. 2023, arXiv:2306.15595). ``"llama3"`` and
            ``"yarn"`` divide those that turn seldom over the original context, leave those that turn often, and blend
            in between: by the number of turns (Llama 3.1), or by the frequency's index (Peng et al. 2023,
            arXiv:2309.00071).
        factor: of the context's growth.
        original_max_position_embeddings: context of the first training; not read by ``"linear"``.
        low_freq_factor, high_freq_factor: ``"llama3"``: turns up to which a frequency is divided, and from which it is
            left.
        beta_slow, beta_fast: ``"yarn"``: the same.
        attention_factor: ``"yarn"``: factor of cosine and sine, and so the square root of that of the scores; from
            ``mscale`` and ``mscale_all_dim``, or from ``factor``, if None.
        mscale, mscale_all_dim: ``"yarn"``: weights of ``log(factor)`` above and below the line of the attention factor.
        truncate: ``"yarn"``: round the indices where the blend begins and ends outwards.

    Raises:
        ConfigError: a value out of range, or two that contradict each other.
    """

    kind: RotaryScalingKind
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "yarn"):
            raise ConfigError(f"kind of rotary scaling is {self.kind!r}; it must be 'linear', 'llama3' or 'yarn'")
        if not 1 <= self.factor < math.inf:
            raise ConfigError(f"factor of rotary scaling is {self.factor}; it must be at least 1")
        if self.kind == "linear":
            return
        context = self.original_max_position_embeddings
        if context is None or context < 1:
            raise ConfigError(
                f"rotary scaling of kind {self.kind!r} needs original_max_position_embeddings, the context of the "
                f"first training, of at least 1; got {context}"
            )
        names = ("low_freq_factor", "high_freq_factor") if self.kind == "llama3" else ("beta_slow", "beta_fast")
        low, high = (getattr(self, name) for name in names)
        if not 0 < low < high:
            raise ConfigError(f"{names[0]} {low} and {names[1]} {high} of rotary scaling must be over 0 and ascending")

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        """The lowered frequencies.

        Args:
            frequencies: ``[d/2]`` angles per position, ``base ** (-2i/d)``; not modified.
            base: of their geometric sequence.
        """
        lowered = frequencies / self.factor
        if self.kind == "linear":
            return lowered
        kept = (
            self._share_kept_by_turns(frequencies)
            if self.kind == "llama3"
            else self._share_kept_by_index(frequencies, base)
        )
        return lowered + (frequencies - lowered) * kept

    @property
    def cos_sin_factor(self) -> float:
        """What cosine and sine are multiplied by; 1 but for YaRN."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    def _share_kept_by_turns(self, frequencies: Tensor) -> Tensor:
        assert self.original_max_position_embeddings is not None
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        return ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)

    def _share_kept_by_index(self, frequencies: Tensor, base: float) -> Tensor:
        d = 2 * frequencies.numel()
        first, last = self._index_of_turns(self.beta_fast, d, base), self._index_of_turns(self.beta_slow, d, base)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, d - 1)
        # Hugging Face uses this width where the blend would have none.
        width = (last - first) or 0.001
        index = torch.arange(frequencies.numel(), dtype=frequencies.dtype, device=frequencies.device)
        return 1 - ((index - first) / width).clamp(0, 1)

    def _index_of_turns(self, turns: float, d: int, base: float) -> float:
        """The index, not a whole number, of the frequency that turns so often over the original context."""
        assert self.original_max_position_embeddings is not None
        return d * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))
