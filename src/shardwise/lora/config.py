"""What adapters are: their rank, their strength, which layers get one, and what is trained beside them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from shardwise.errors import ConfigError

ALL_LINEAR = "all-linear"
"""As a target: every linear layer of the transformer layers."""

Biases = Literal["none", "all", "lora_only"]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: beside each chosen weight ``W`` a product ``scaling * B A`` is learned, and ``W`` stays.

    Names and meanings are those of the ``peft`` library.

    Attributes:
        r: rank, the rows of ``A`` and the columns of ``B``.
        lora_alpha: strength of the product; see ``scaling``.
        lora_dropout: probability of dropping an element of the input of ``A``, in training.
        target_modules: the layers by their Hugging Face names, such as ``("q_proj", "v_proj", "embed_tokens")``; a name
            stands for all whose path ends with it. ``("all-linear",)`` is all linear ones of the transformer layers. A
            string that is not in a tuple is a regular expression of whole paths.
        use_rslora: divide the strength by ``sqrt(r)`` in place of ``r``.
        use_dora: learn the length of each row of the weight apart from its direction: the layer's weight is
            ``m * (W + scaling * B A) / n``, where ``n`` is the length of each row of the sum and ``m`` is learned, and
            starts as that of ``W``. ``n`` counts as a constant in the backward, as in ``peft``.
        rank_pattern: other ranks, by a name or a regular expression of the end of a path; the first that fits counts.
        alpha_pattern: other strengths, likewise.
        bias: which biases of the model are trained too: none, all, or those of layers with adapters.
        modules_to_save: modules that are trained whole, by the ends of their Hugging Face paths, such as ``("lm_head",
            "embed_tokens")``; of a tied weight the one that is named becomes one of its own.

    Raises:
        ConfigError: a value out of range, or a regular expression that is none.

    Source: Hu et al. 2021 (arXiv:2106.09685); Kalajdzievski 2023 (arXiv:2312.03732) for ``use_rslora``; Liu et al. 2024
    (arXiv:2402.09353), section 4, for ``use_dora``.
    """

    r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | str = (ALL_LINEAR,)
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    bias: Biases = "none"
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for rank in (self.r, *self.rank_pattern.values()):
            if rank < 1:
                raise ConfigError(f"the LoRA rank is {rank}; it must be at least 1")
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"lora_dropout is {self.lora_dropout}; it must be at least 0 and under 1")
        alphas = {"lora_alpha": self.lora_alpha} | {f"the alpha of {name}": a for name, a in self.alpha_pattern.items()}
        for name, alpha in alphas.items():
            if not math.isfinite(alpha):
                raise ConfigError(f"{name} is {alpha}; it must be a finite number")
        if self.target_modules == ALL_LINEAR:
            object.__setattr__(self, "target_modules", (ALL_LINEAR,))
        if not self.target_modules or not all(self.target_modules):
            raise ConfigError(
                f"the LoRA targets are {self.target_modules!r}; name at least one linear layer, such as ('q_proj',)"
            )
        if self.bias not in get_args(Biases):
            raise ConfigError(f"the biases to train are {self.bias!r}; use one of {', '.join(get_args(Biases))}")
        if isinstance(self.modules_to_save, str) or not all(self.modules_to_save):
            raise ConfigError(f"modules_to_save is {self.modules_to_save!r}; it must be a tuple of names")
        targets = [self.target_modules] if isinstance(self.target_modules, str) else []
        for pattern in (*targets, *self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"{pattern!r} is no regular expression: {error}") from error

    @property
    def scaling(self) -> float:
        """Factor of ``B A x``."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def chooses(self, path: str, *, in_layers: bool = True) -> bool:
        """Whether the layer of that path gets an adapter; ``in_layers`` if it is a linear one of a layer."""
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, path) is not None
        return any(
            in_layers if target == ALL_LINEAR else f".{path}".endswith(f".{target}") for target in self.target_modules
        )

    def saves(self, path: str) -> bool:
        """Whether a module of that path, or one that it is in, is trained whole."""
        within = [path[:end] for end in (*(dot.start() for dot in re.finditer(r"\.", path)), len(path))]
        return any(module.endswith(name) for module in within for name in self.modules_to_save)

    def at(self, path: str) -> LoraConfig:
        """The configuration of the adapter at ``path``: with its own rank and strength, and without patterns."""
        rank = self.rank_pattern.get(_pattern_of(self.rank_pattern, path) or "", self.r)
        alpha = self.alpha_pattern.get(_pattern_of(self.alpha_pattern, path) or "", self.lora_alpha)
        return dataclasses.replace(self, r=rank, lora_alpha=alpha, rank_pattern={}, alpha_pattern={})


def _pattern_of(patterns: Iterable[str], path: str) -> str | None:
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", path)), None)
