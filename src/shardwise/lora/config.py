"""What adapters are: their rank, their strength, and which linear layers get one."""

import math
from dataclasses import dataclass

from shardwise.errors import ConfigError

ALL_LINEAR = "all-linear"
"""As a target: every linear layer of the transformer layers."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: beside each chosen weight ``W`` a product ``scaling * B A`` is learned, and ``W`` stays.

    Names and meanings are those of the ``peft`` library.

    Attributes:
        r: rank, the rows of ``A`` and the columns of ``B``.
        lora_alpha: strength of the product; see ``scaling``.
        lora_dropout: probability of dropping an element of the input of ``A``, in training.
        target_modules: the linear layers by their Hugging Face names, such as ``("q_proj", "v_proj")``; a name stands
            for all whose path ends with it. ``("all-linear",)`` is all of the transformer layers.
        use_rslora: divide the strength by ``sqrt(r)`` in place of ``r``.

    Raises:
        ConfigError: a value out of range.

    Source: Hu et al. 2021 (arXiv:2106.09685); Kalajdzievski 2023 (arXiv:2312.03732) for ``use_rslora``.
    """

    r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    use_rslora: bool = False

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ConfigError(f"the LoRA rank is {self.r}; it must be at least 1")
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"lora_dropout is {self.lora_dropout}; it must be at least 0 and under 1")
        if not math.isfinite(self.lora_alpha):
            raise ConfigError(f"lora_alpha is {self.lora_alpha}; it must be a number")
        if isinstance(self.target_modules, str) or not self.target_modules or not all(self.target_modules):
            raise ConfigError(
                f"the LoRA targets are {self.target_modules!r}; name at least one linear layer, such as ('q_proj',)"
            )

    @property
    def scaling(self) -> float:
        """Factor of ``B A x``."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)
