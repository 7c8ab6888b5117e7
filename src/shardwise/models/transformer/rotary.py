"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Pairs of elements of a head are rotated: ``i`` and ``i + d/2``, the half-split form of GPT-NeoX and Llama, or ``2i`` and
``2i + 1``, the interleaved form of the paper. ``RotaryScaling`` extends the context beyond that of the pre-training.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError

# MPS has no fp64, and a tensor on the meta device has no values.
_WITHOUT_FP64 = ("mps", "meta")


class FixedTensors(nn.Module):
    """A module whose tensors named in ``_fixed`` move with it between devices, but never change dtype or values.

    If they were buffers, ``module.bfloat16()`` would round them, and ``to_empty`` would lose their values.
    """

    _fixed: tuple[str, ...] = ()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name in self._fixed:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, _on(fn(tensor).device, tensor))
        return self


def on_default_device(tensor: Tensor) -> Tensor:
    """Move an fp64 tensor to PyTorch's default device, or leave it in place if that device does not support fp64."""
    return _on(torch.get_default_device(), tensor)


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if device.type in _WITHOUT_FP64 else tensor.to(device)


RotaryScalingKind = Literal["linear", "proportional", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RotaryScaling:
    """Reduction of the frequencies of a ``RotaryEmbedding``. Field names and meaning are those of Hugging Face.

    Attributes:
        kind: ``"linear"`` divides every frequency by ``factor`` (Chen et al. 2023, arXiv:2306.15595). ``"llama3"`` and
            ``"yarn"`` divide low frequencies (few turns over the original context), keep high ones, and interpolate in
            between: by the number of turns (Llama 3.1), or by the frequency's index (Peng et al. 2023,
            arXiv:2309.00071). ``"dynamic"`` raises the base with the length of a sequence beyond the original context
            (Peng et al., appendix B.2). ``"longrope"`` has a separate divisor for each frequency, with one list of
            divisors for sequences within the original context and one for longer ones (Ding et al. 2024,
            arXiv:2402.13753; Phi-3). ``"proportional"`` is ``"linear"`` for the first ``partial_rotary_factor`` of the
            frequencies; pairs of the other ones do not rotate (Gemma 4).
        factor: growth factor of the context.
        original_max_position_embeddings: context of the pre-training; not used by ``"linear"`` and ``"proportional"``.
        short_factor, long_factor: for ``"longrope"``, divisors of the frequencies.
        low_freq_factor, high_freq_factor: for ``"llama3"``, numbers of turns below which a frequency is divided, and
            above which it is kept.
        beta_slow, beta_fast: the same for ``"yarn"``.
        attention_factor: for ``"yarn"`` and ``"longrope"``, factor of cosine and sine, and so the square root of the
            factor of the scores; None means that ``mscale`` and ``mscale_all_dim``, or ``factor``, determine it.
        mscale, mscale_all_dim: for ``"yarn"``, weights of ``log(factor)`` in numerator and denominator of the attention
            factor.
        truncate: for ``"yarn"``, whether to round the bounds of the interpolated indices outwards.
        llama_4_scaling_beta: for ``"yarn"``, growth of the queries beyond the original context: those of position ``p``
            are multiplied by ``1 + beta * log(1 + floor(p / original_max_position_embeddings))`` (Ministral 3).

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """

    kind: RotaryScalingKind
    factor: float = 1.0
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
    llama_4_scaling_beta: float = 0.0
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(RotaryScalingKind):
            kinds = ", ".join(get_args(RotaryScalingKind))
            raise ConfigError(f"kind of rotary scaling is {self.kind!r}; it must be one of {kinds}")
        if not 1 <= self.factor < math.inf:
            raise ConfigError(f"factor of rotary scaling is {self.factor}; it must be at least 1")
        beta = self.llama_4_scaling_beta
        if not 0 <= beta < math.inf or (beta > 0 and self.kind != "yarn"):
            raise ConfigError(
                f"llama_4_scaling_beta of rotary scaling of kind {self.kind!r} is {beta}; it must be at least 0, and 0 "
                "for kinds other than 'yarn'"
            )
        if not 0 < self.partial_rotary_factor <= 1 or (self.partial_rotary_factor < 1 and self.kind != "proportional"):
            raise ConfigError(
                f"partial_rotary_factor of rotary scaling of kind {self.kind!r} is {self.partial_rotary_factor}; it "
                "must be over 0 and at most 1, and 1 for kinds other than 'proportional'"
            )
        if self.kind in ("linear", "proportional"):
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
        """True if the frequencies depend on the length of the sequence."""
        return self.kind in ("dynamic", "longrope")

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        """Scale the frequencies ``[d/2]``, ``base ** (-2i/d)``; if they depend on the length, prepare ``at_length``.

        Raises:
            ConfigError: a list of divisors does not have the length of the frequencies.
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
        if self.kind == "proportional":
            lowered[int(self.partial_rotary_factor * frequencies.numel()) :] = 0.0
            return lowered
        kept = (
            self._share_kept_by_turns(frequencies)
            if self.kind == "llama3"
            else self._share_kept_by_index(frequencies, base)
        )
        return lowered + (frequencies - lowered) * kept

    def is_outgrown_at(self, length: int) -> bool:
        """Return whether ``"longrope"`` switches to ``long_factor`` at this length, which makes cached keys invalid.

        With ``"dynamic"`` each new token has other frequencies, but cached keys keep theirs, as in ``transformers``.
        """
        return self.kind == "longrope" and length - 1 == self.original_max_position_embeddings

    def changes_between(self, shorter: int, longer: int) -> bool:
        """Return whether the frequencies of a text of one length are others than those at the other length."""
        context = self.original_max_position_embeddings
        if not self.depends_on_length or context is None:
            return False
        return shorter < longer and (longer > context if self.kind == "dynamic" else shorter <= context < longer)

    def at_length(self, frequencies: Tensor, length: int | Tensor) -> Tensor:
        """Return the frequencies ``[..., d/2]`` for sequences of the given length, if they depend on it.

        Args:
            frequencies: result of ``scale``, on any device.
            length: number of positions of the sequence; a tensor ``[...]`` for several sequences, or to avoid a
                synchronization if the host does not know the length.
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
    def score_factor(self) -> float:
        """DeepSeek's factor of the attention scores with ``"yarn"``, in addition to ``cos_sin_factor`` squared."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.kind == "yarn" and self.mscale_all_dim else 1.0

    @property
    def cos_sin_factor(self) -> float:
        """Factor of cosine and sine; 1 except for YaRN and LongRoPE."""
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
        # Hugging Face uses this width if the interpolated range is empty.
        width = (last - first) or 0.001
        index = torch.arange(frequencies.numel(), dtype=frequencies.dtype, device=frequencies.device)
        return 1 - ((index - first) / width).clamp(0, 1)

    def _index_of_turns(self, turns: float, d: int, base: float) -> float:
        """Return the fractional index of the frequency with this number of turns over the original context."""
        assert self.original_max_position_embeddings is not None
        return d * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))


class RotaryEmbedding(FixedTensors):
    """Rotary angles by position.

    Args:
        head_dim: width of a head.
        rotary_percent: share of the head that is rotated, from 0 to 1.
        rotary_base: base of the geometric sequence of wavelengths.
        rope_scaling: scaling of the frequencies for longer contexts.

    Attributes:
        inverse_frequencies: ``[d/2]`` in fp64, on the module's device; not a buffer. With ``depends_on_length``, the
            input of ``RotaryScaling.at_length``.
        depends_on_length: whether frequencies depend on the sequence's length, beyond the original context.

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
        # fp64, because in fp32 positions times frequencies lose digits long before the end of the context.
        frequencies = rotary_base ** -(torch.arange(0, rotated, 2, dtype=torch.float64, device="cpu") / rotated)
        self._scaling = rope_scaling
        # Each forward computes frequencies that depend on the length.
        self.depends_on_length = rope_scaling is not None and rope_scaling.depends_on_length
        if rope_scaling is not None:
            frequencies = rope_scaling.scale(frequencies, rotary_base)
        self.inverse_frequencies = on_default_device(frequencies)
        self._factor = 1.0 if rope_scaling is None else rope_scaling.cos_sin_factor
        self._tables: dict[tuple[torch.device, torch.dtype, int], tuple[Tensor, Tensor]] = {}

    def forward(self, positions: Tensor, dtype: torch.dtype, *, length: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Compute cosine and sine for each position, times the factor of YaRN's or LongRoPE's scaling.

        Args:
            positions: ``[s]`` or ``[b, s]`` token positions.
            dtype: dtype of the result.
            length: number of positions in the whole sequence, as an int or a tensor ``[]``; or ``[b, 1]`` or ``[b, s]``
                for the text of each position. Used with ``depends_on_length``.

        Returns:
            Two tensors ``[s, 1 or b, 1, d/2]``.
        """
        if positions.dim() == 1:
            positions = positions.unsqueeze(0)
        if self.inverse_frequencies.device != positions.device:
            # Keep the copy. A copy in every forward would synchronize, and prevent the capture of a CUDA graph.
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
        """Return whether there is a scaling that changes at this length; see ``RotaryScaling.is_outgrown_at``."""
        return self._scaling is not None and self._scaling.is_outgrown_at(length)

    def tables(
        self, position_ids: Tensor | None, s: int, like: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the result of ``forward`` for the tokens of a batch.

        Args:
            position_ids: ``[s]`` or ``[b, s]``; 0 to ``s - 1`` if None.
            s: length of the sequence.
            like: tensor with the dtype and device of the result.
            lengths: ``[b, 1]`` or ``[b, s]``, length of each token's text; used with ``depends_on_length``. None means
                one length for all, the largest position plus 1.
        """
        if position_ids is None and (lengths is None or not self.depends_on_length):
            return self.first(s, like.dtype, like.device)
        positions = torch.arange(s, device=like.device) if position_ids is None else position_ids
        if lengths is None and self.depends_on_length:
            # A tensor, to avoid a synchronization.
            lengths = positions.max() + 1
        made: tuple[Tensor, Tensor] = self(positions, like.dtype, length=s if lengths is None else lengths)
        return made

    def query_scale(self, position_ids: Tensor | None, s: int, like: Tensor) -> Tensor | None:
        """Return the factor of each token's queries, ``[s, 1 or b, 1, 1]``; None if it is 1 everywhere.

        Arguments are those of ``tables``; see ``RotaryScaling.llama_4_scaling_beta``.
        """
        scaling = self._scaling
        if scaling is None or scaling.llama_4_scaling_beta == 0:
            return None
        assert scaling.original_max_position_embeddings is not None
        positions = torch.arange(s, device=like.device) if position_ids is None else position_ids
        contexts = (positions // scaling.original_max_position_embeddings).view(-1, s).t()[:, :, None, None]
        return (1 + scaling.llama_4_scaling_beta * contexts.double().log1p()).to(like.dtype)

    def first(self, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the result of ``forward`` for the positions 0 to ``count - 1``; caches the largest tables."""
        key = device, dtype, count if self.depends_on_length else 0
        kept = self._tables.get(key)
        if kept is None or kept[0].size(0) < count:
            # A model may generate first and train later, and autograd cannot save inference tensors.
            with torch.inference_mode(False):
                kept = self(torch.arange(count, device=device), dtype, length=count)
            # Compiled code computes the tables itself, and a fake tensor is valid only in its mode.
            if not torch.compiler.is_compiling() and type(kept[0]) is type(self.inverse_frequencies):
                self._tables[key] = kept
        cos, sin = kept
        return cos[:count], sin[:count]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._tables.clear()
        return super()._apply(fn, recurse)
