"""Settings of adapters: rank, strength, the layers that get one, and parameters that are trained next to them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from shardwise.core.errors import ConfigError

ALL_LINEAR = "all-linear"
"""As a target: every linear layer of the transformer layers."""

Biases = Literal["none", "all", "lora_only"]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: next to each chosen weight ``W`` a product ``scaling * B A`` is learned, and ``W`` stays.

    Names and meanings are those of the ``peft`` library.

    Attributes:
        r: rank, the rows of ``A`` and the columns of ``B``.
        lora_alpha: strength of the product; see ``scaling``.
        lora_dropout: probability of dropping an element of the input of ``A``, in training.
        target_modules: the layers by their Hugging Face names, such as ``("q_proj", "v_proj", "embed_tokens")``; a name
            stands for all whose path ends with it. ``("all-linear",)`` is all linear ones of the transformer layers. A
            string that is not in a tuple is a regular expression of whole paths.
        use_rslora: divide the strength by ``sqrt(r)`` instead of ``r``.
        use_dora: learn the length of each row of the weight apart from its direction: the layer's weight is
            ``m * (W + scaling * B A) / n``, where ``n`` is the length of each row of the sum and ``m`` is learned, and
            starts as that of ``W``. ``n`` counts as a constant in the backward, as in ``peft``.
        rank_pattern: other ranks, by a name or a regular expression of the end of a path; the first that fits counts.
        alpha_pattern: other strengths, the same way.
        bias: which biases of the model are trained too: none, all, or those of layers with adapters.
        modules_to_save: modules that are trained whole, by the ends of their Hugging Face paths, such as ``("lm_head",
            "embed_tokens")``; a tied weight that is named is untied.
        layers_to_transform: numbers of the transformer layers that get adapters, from 0; None or empty: all. A target
            that is a whole path counts in any layer, and the embedding and the output layer get none.
        layers_pattern: the names of the list of layers whose numbers count, such as ``("layers",)``, each a regular
            expression; empty: any list.
        exclude_modules: layers that get no adapter, in the manner of ``target_modules``.

    Raises:
        ConfigError: a value out of range, a wrong regular expression, or layers next to one.

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
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] | str = ()

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
        if isinstance(self.target_modules, str) and (self.layers_to_transform is not None or self.layers_pattern):
            name = "layers_pattern" if self.layers_to_transform is None else "layers_to_transform"
            raise ConfigError(
                f"{name} is {getattr(self, name)!r} and target_modules is {self.target_modules!r}, which chooses "
                "layers too; leave one of them out, or make target_modules a list of names"
            )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ConfigError(
                f"layers_pattern is {self.layers_pattern!r} without layers_to_transform; give the layers' numbers"
            )
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
        whole = [each for each in (self.target_modules, self.exclude_modules) if isinstance(each, str)]
        for pattern in (*whole, *self.rank_pattern, *self.alpha_pattern, *self.layers_pattern):
            try:
                re.compile(pattern if pattern in whole else f"({pattern})")
            except re.error as error:
                raise ConfigError(f"{pattern!r} is no regular expression: {error}") from error

    @property
    def scaling(self) -> float:
        """Factor of ``B A x``."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def chooses(self, path: str, *, in_layers: bool = True) -> bool:
        """Whether the layer of that path gets an adapter; ``in_layers`` if it is a linear one of a layer."""
        if _names(self.exclude_modules, path):
            return False
        if isinstance(self.target_modules, str) or path in self.target_modules:
            return _names(self.target_modules, path)
        is_target = (in_layers and ALL_LINEAR in self.target_modules) or _names(self.target_modules, path)
        return is_target and (not self.layers_to_transform or self.layer_of(path) in self.layers_to_transform)

    def layer_of(self, path: str) -> int | None:
        """The number of the transformer layer that a path is in, by ``layers_pattern``; None if it is in none."""
        lists = [rf"(?:^|.*?\.){pattern}" for pattern in self.layers_pattern] or [r".*?\.[^.]*"]
        found = (re.match(rf"{each}\.(\d+)\.", path) for each in lists)
        return next((int(match[match.re.groups]) for match in found if match is not None), None)

    @property
    def choice(self) -> str:
        """The fields that say which layers get adapters, with their values."""
        names = ("target_modules", "layers_to_transform", "layers_pattern", "exclude_modules", "modules_to_save")
        return ", ".join(f"{name} {value!r:.200}" for name in names if (value := getattr(self, name)))

    def saves(self, path: str) -> bool:
        """Whether a module of that path, or one that it is in, is trained whole."""
        within = [path[:end] for end in (*(dot.start() for dot in re.finditer(r"\.", path)), len(path))]
        return any(module.endswith(name) for module in within for name in self.modules_to_save)

    def at(self, path: str) -> LoraConfig:
        """The configuration of the adapter at ``path``: with its own rank and strength, and without patterns."""
        rank = self.rank_pattern.get(_pattern_of(self.rank_pattern, path) or "", self.r)
        alpha = self.alpha_pattern.get(_pattern_of(self.alpha_pattern, path) or "", self.lora_alpha)
        return dataclasses.replace(self, r=rank, lora_alpha=alpha, rank_pattern={}, alpha_pattern={})


def _names(modules: tuple[str, ...] | str, path: str) -> bool:
    """Whether a regular expression is all of a path, or the path ends with one of several names."""
    if isinstance(modules, str):
        return bool(modules) and re.fullmatch(modules, path) is not None
    return any(f".{path}".endswith(f".{name}") for name in modules)


def _pattern_of(patterns: Iterable[str], path: str) -> str | None:
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", path)), None)
