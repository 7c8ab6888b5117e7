"""Rotary frequencies for contexts longer than the one that a model was first trained on."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError

RotaryScalingKind = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RotaryScaling:
    """How the frequencies of a ``RotaryEmbedding`` are lowered. Field names and meaning are those of Hugging Face.

    Attributes:
        kind: ``"linear"`` divides every frequency by ``factor`` (Chen et al. 2023, arXiv:2306.15595). ``"llama3"`` and
            ``"yarn"`` divide those that turn seldom over the original context, leave those that turn often, and blend
            in between: by the number of turns (Llama 3.1), or by the frequency's index (Peng et al. 2023,
            arXiv:2309.00071). ``"dynamic"`` raises the base with the length of a sequence beyond the original context
            (there too, appendix B.2), and ``"longrope"`` divides each frequency by a number of its own, one list of
            them for sequences within the original context and one for longer ones (Ding et al. 2024,
            arXiv:2402.13753; Phi-3).
        factor: of the context's growth.
        original_max_position_embeddings: context of the first training; not read by ``"linear"``.
        short_factor, long_factor: ``"longrope"``: the divisors, one for each frequency.
        low_freq_factor, high_freq_factor: ``"llama3"``: turns up to which a frequency is divided, and from which it is
            left.
        beta_slow, beta_fast: ``"yarn"``: the same.
        attention_factor: ``"yarn"`` and ``"longrope"``: factor of cosine and sine, and so the square root of that of
            the scores; from ``mscale`` and ``mscale_all_dim``, or from ``factor``, if None.
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
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(RotaryScalingKind):
            kinds = ", ".join(get_args(RotaryScalingKind))
            raise ConfigError(f"kind of rotary scaling is {self.kind!r}; it must be one of {kinds}")
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
        if self.kind == "longrope":
            self._check_lists()
        if self.kind in ("longrope", "dynamic"):
            return
        names = ("low_freq_factor", "high_freq_factor") if self.kind == "llama3" else ("beta_slow", "beta_fast")
        low, high = (getattr(self, name) for name in names)
        if not 0 < low < high:
            raise ConfigError(f"{names[0]} {low} and {names[1]} {high} of rotary scaling must be over 0 and ascending")

    def _check_lists(self) -> None:
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if not values or not all(isinstance(each, int | float) and 0 < each < math.inf for each in values):
                raise ConfigError(f"{name} of rotary scaling is {values!r}; it must be numbers over 0, for longrope")

    @property
    def depends_on_length(self) -> bool:
        """Whether sequences longer than the original context have other frequencies than shorter ones."""
        return self.kind in ("dynamic", "longrope")

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        """The lowered frequencies; where they depend on the length, what ``at_length`` makes them of.

        Args:
            frequencies: ``[d/2]`` angles per position, ``base ** (-2i/d)``; not modified.
            base: of their geometric sequence.

        Raises:
            ConfigError: lists of divisors of another length than the frequencies.
        """
        if self.kind == "dynamic":
            return frequencies
        if self.kind == "longrope":
            assert self.short_factor is not None
            assert self.long_factor is not None
            for divisors in (self.short_factor, self.long_factor):
                if len(divisors) != frequencies.numel():
                    raise ConfigError(
                        f"rotary scaling has {len(divisors)} factors, and {frequencies.numel()} frequencies are rotated"
                    )
            both = (self.short_factor, self.long_factor)
            return frequencies / torch.tensor(both, dtype=frequencies.dtype, device=frequencies.device)
        lowered = frequencies / self.factor
        if self.kind == "linear":
            return lowered
        kept = (
            self._share_kept_by_turns(frequencies)
            if self.kind == "llama3"
            else self._share_kept_by_index(frequencies, base)
        )
        return lowered + (frequencies - lowered) * kept

    def is_outgrown_at(self, length: int) -> bool:
        """Whether the token that makes a text ``length`` tokens long changes the frequencies of all before it.

        A key-value cache of these is then of no use. True where ``"longrope"`` goes over to its other list. With
        ``"dynamic"`` each further token has frequencies of its own, and keys in a cache keep theirs, as in
        ``transformers``.
        """
        return self.kind == "longrope" and length - 1 == self.original_max_position_embeddings

    def at_length(self, frequencies: Tensor, length: int | Tensor) -> Tensor:
        """The frequencies ``[..., d/2]`` of sequences, where they depend on the length.

        Args:
            frequencies: what ``scale`` returned, on any device.
            length: number of positions of the sequence; a tensor ``[...]`` for several, or if the host does not know
                it, which then does not wait for it.
        """
        context = self.original_max_position_embeddings
        assert context is not None
        if isinstance(length, Tensor):
            length = length.unsqueeze(-1)
        if self.kind == "longrope":
            if isinstance(length, Tensor):
                return torch.where(length > context, frequencies[1], frequencies[0])
            return frequencies[int(length > context)]
        growth = (
            (length.double() / context).clamp(min=1.0) if isinstance(length, Tensor) else max(1.0, length / context)
        )
        # Raising the base by f ** (d / (d - 2)) multiplies frequency i by f ** (-2i / (d - 2)).
        count = frequencies.numel()
        index = torch.arange(count, dtype=frequencies.dtype, device=frequencies.device)
        return frequencies * (self.factor * growth - (self.factor - 1)) ** (-index / max(count - 1, 1))

    @property
    def cos_sin_factor(self) -> float:
        """What cosine and sine are multiplied by; 1 but for YaRN and LongRoPE."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            assert self.original_max_position_embeddings is not None
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))
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
