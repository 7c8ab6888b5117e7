"""Settings of adapters: rank, strength, adapted layers, and parameters that are trained in addition."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from shardwise.core.errors import ConfigError
from shardwise.models.adapters.patterns import check_pattern, matches

ALL_LINEAR = "all-linear"
"""Target that stands for every linear layer of the transformer layers."""

Biases = Literal["none", "all", "lora_only"]


# Largest number of float16, in which a product of adapters may be scaled.
_LARGEST_ALPHA = 65504.0


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: each chosen weight ``W`` is frozen, and a product ``scaling * B A`` is learned and added.

    Names and meanings are those of the ``peft`` library.

    Attributes:
        r: rank: number of rows of ``A`` and columns of ``B``.
        lora_alpha: strength of the product; see ``scaling``.
        lora_dropout: probability of dropping an element of the input of ``A``, in training.
        target_modules: Hugging Face names of the layers, such as ``("q_proj", "v_proj", "embed_tokens")``; a name
            matches all paths that end with it. ``("all-linear",)`` is all linear layers of the transformer layers. A
            string instead of a tuple is a regular expression that matches whole paths.
        use_rslora: whether to divide the strength by ``sqrt(r)`` instead of ``r``.
        use_dora: whether to learn the length of each row of the weight separately from its direction. The layer's
            weight is ``m * (W + scaling * B A) / n``, where ``n`` is the length of each row of the sum. ``m`` is
            learned and starts as the row lengths of ``W``. The backward treats ``n`` as a constant, as in ``peft``.
        rank_pattern: ranks that override ``r``, by a name or regular expression for the end of a path; the first match
            counts.
        alpha_pattern: strengths that override ``lora_alpha``, in the same form.
        bias: biases of the model that are also trained: none, all, or those of layers with adapters.
        modules_to_save: modules that are trained in full, by the ends of their Hugging Face paths, such as
            ``("lm_head", "embed_tokens")``. A named tied weight is untied.
        layers_to_transform: numbers of the transformer layers that get adapters, from 0; None or empty means all. A
            target that is a whole path matches in any layer; the embedding and the output layer get no adapter.
        layers_pattern: names of the list of layers that the numbers refer to, such as ``("layers",)``, each a regular
            expression; empty means any list.
        exclude_modules: layers that get no adapter, in the form of ``target_modules``.
        target_parameters: parameters of experts and routers that get adapters, by the ends of their names in
            ``transformers``, such as ``("experts.gate_up_proj", "experts.down_proj", "gate.weight")``, in all layers.
        trainable_token_indices: ids whose rows of the embedding are trained while all other rows stay, or such ids by
            the end of a path, for the output layer too: ``{"embed_tokens": (7, 8), "lm_head": (7, 8)}``. A tied output
            layer has the rows of the embedding.

    Raises:
        ConfigError: a value is out of range, a regular expression is invalid, or fields that select layers conflict.

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
    target_parameters: tuple[str, ...] = ()
    trainable_token_indices: Mapping[str, tuple[int, ...]] | tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for rank in (self.r, *self.rank_pattern.values()):
            if rank < 1:
                raise ConfigError(f"the LoRA rank is {rank}; it must be at least 1")
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"lora_dropout is {self.lora_dropout}; it must be at least 0 and under 1")
        alphas = {"lora_alpha": self.lora_alpha} | {f"the alpha of {name}": a for name, a in self.alpha_pattern.items()}
        for name, alpha in alphas.items():
            if not abs(alpha) <= _LARGEST_ALPHA:
                raise ConfigError(f"{name} is {alpha}; it must be from {-_LARGEST_ALPHA} to {_LARGEST_ALPHA}")
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
        if not (self.target_modules or self.target_parameters) or not all(self.target_modules):
            raise ConfigError(
                f"the LoRA targets are {self.target_modules!r}; name at least one linear layer, such as ('q_proj',)"
            )
        if isinstance(self.target_parameters, str) or not all(self.target_parameters):
            raise ConfigError(f"target_parameters is {self.target_parameters!r}; it must be a tuple of names")
        if self.target_parameters:
            self.check_parameters()
        if self.bias not in get_args(Biases):
            raise ConfigError(f"the biases to train are {self.bias!r}; use one of {', '.join(get_args(Biases))}")
        if isinstance(self.modules_to_save, str) or not all(self.modules_to_save):
            raise ConfigError(f"modules_to_save is {self.modules_to_save!r}; it must be a tuple of names")
        given = self.trainable_token_indices
        for name, ids in given.items() if isinstance(given, Mapping) else (("the embedding", given),):
            if not ids and given:
                raise ConfigError(f"trainable_token_indices has no ids of {name}; name some, or leave it out")
            wrong = next((each for each in ids if each < 0 or ids.count(each) > 1), None)
            if wrong is not None:
                raise ConfigError(
                    f"trainable_token_indices of {name} has {wrong}{'' if wrong < 0 else ' twice'}; ids are 0 or more, "
                    "each once"
                )
        whole = [each for each in (self.target_modules, self.exclude_modules) if isinstance(each, str)]
        for pattern in (*whole, *self.rank_pattern, *self.alpha_pattern, *self.layers_pattern):
            check_pattern(pattern if pattern in whole else f"({pattern})")

    @property
    def scaling(self) -> float:
        """Factor of ``B A x``."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def chooses(self, path: str, *, in_layers: bool = True) -> bool:
        """Return whether the layer at ``path`` gets an adapter; ``in_layers``: it is linear, in a transformer layer."""
        if _names(self.exclude_modules, path, "exclude_modules"):
            return False
        if isinstance(self.target_modules, str) or path in self.target_modules:
            return _names(self.target_modules, path, "target_modules")
        is_target = (in_layers and ALL_LINEAR in self.target_modules) or _names(
            self.target_modules, path, "target_modules"
        )
        return is_target and (not self.layers_to_transform or self.layer_of(path) in self.layers_to_transform)

    def chooses_parameter(self, name: str) -> bool:
        """Return whether the parameter of a router or of experts gets an adapter."""
        return _names(self.target_parameters, name, "target_parameters")

    def check_parameters(self) -> None:
        """Raise ConfigError if experts and routers cannot have such adapters."""
        for name, is_set in (("lora_dropout", self.lora_dropout > 0), ("use_dora", self.use_dora)):
            if is_set:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, which adapters of experts and routers do not have in peft; "
                    "leave it out, or name other layers in target_modules (all-linear means experts too)"
                )

    def layer_of(self, path: str) -> int | None:
        """Return the number of the transformer layer of a path, by ``layers_pattern``; None if it is not in one."""
        numbers = list(re.finditer(r"(?<=\.)\d+(?=\.)", path))
        for pattern in self.layers_pattern:
            for number in numbers:
                if matches(pattern, path[: number.start() - 1], "layers_pattern", at_end=True):
                    return int(number[0])
        # The layers of a model are its first list.
        lists = (each for each in numbers if "." in path[: each.start() - 1])
        return None if self.layers_pattern else next((int(each[0]) for each in lists), None)

    @property
    def choice(self) -> str:
        """The fields that select the layers with adapters, and their values, for messages."""
        of_layers = ("layers_to_transform", "layers_pattern", "exclude_modules", "modules_to_save")
        names = ("target_modules", "target_parameters", *of_layers)
        return ", ".join(f"{name} {value!r:.200}" for name in names if (value := getattr(self, name)))

    def saves(self, path: str) -> bool:
        """Return whether the module at ``path``, or a module that contains it, is trained in full."""
        within = [path[:end] for end in (*(dot.start() for dot in re.finditer(r"\.", path)), len(path))]
        return any(module.endswith(name) for module in within for name in self.modules_to_save)

    def trains(self, path: str) -> bool:
        """Return whether the module at ``path`` or some of its rows are trained, not only an adapter of it."""
        given = self.trainable_token_indices
        names = tuple(given) if isinstance(given, Mapping) else ()
        return self.saves(path) or _names(names, path, "trainable_token_indices")

    def at(self, path: str) -> LoraConfig:
        """Return the configuration of the adapter at ``path``, with the patterns applied and removed."""
        rank = self.rank_pattern.get(_pattern_of(self.rank_pattern, path, "rank_pattern") or "", self.r)
        alpha = self.alpha_pattern.get(_pattern_of(self.alpha_pattern, path, "alpha_pattern") or "", self.lora_alpha)
        return dataclasses.replace(self, r=rank, lora_alpha=alpha, rank_pattern={}, alpha_pattern={})


def _names(modules: tuple[str, ...] | str, path: str, field: str) -> bool:
    """Return whether a regular expression matches a whole path, or the path ends with one of several names."""
    if isinstance(modules, str):
        return bool(modules) and matches(modules, path, field)
    return any(f".{path}".endswith(f".{name}") for name in modules)


def _pattern_of(patterns: Iterable[str], path: str, field: str) -> str | None:
    return next((pattern for pattern in patterns if matches(pattern, path, field, at_end=True)), None)
