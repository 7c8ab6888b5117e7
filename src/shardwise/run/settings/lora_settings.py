"""What a fine-tuning run is told of its adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shardwise.core.errors import ConfigError
from shardwise.training.bounds import PROBABILITY, Checked, Range

if TYPE_CHECKING:
    from shardwise.models.adapters.config import LoraConfig


@dataclass(frozen=True)
class LoraSettings(Checked, prefix="--"):
    """Low-rank adapters.

    Attributes:
        lora_rank: train adapters of this rank and leave the model's weights; all weights are trained if not given.
        lora_alpha: strength of the adapters, whose product counts lora_alpha / lora_rank; twice the rank if not given.
        lora_dropout: probability of dropping an element of an adapter's input.
        lora_targets: layers that get adapters, by the folder's own names (q_proj, v_proj, embed_tokens, lm_head, ...);
            "all-linear" is all linear ones of the transformer layers.
        lora_target_pattern: a regular expression of the whole paths of the layers that get adapters, such as
            ".*layers\\.(2|3)\\..*proj", in place of lora_targets.
        lora_rank_pattern: other ranks for some layers, as NAME=RANK, where NAME may be a regular expression of the end
            of a path; the first that fits counts.
        lora_alpha_pattern: other strengths for some layers, as NAME=ALPHA.
        lora_bias: which biases of the model are trained too: none, all, or those of layers with adapters (lora_only).
        lora_modules_to_save: modules that are trained whole and saved with the adapters, by the folder's own names
            (lm_head, embed_tokens, norm, ...).
        lora_dora: learn the lengths of the weights' rows apart from their directions (DoRA).
        lora_from: start from the adapters of this folder, which say rank, strength and targets themselves.
        lora_rslora: divide the strength by the square root of the rank, so that high ranks learn as well.
        base_quantization: keep the frozen weights of linear layers in 8 bits (int8) or 4 (nf4); modules that are
            trained whole stay as they are.
        lora_merge: write the whole model with the adapters merged into its weights, in place of the adapters.
    """

    lora_rank: Annotated[int | None, Range(1, 65_536)] = None
    lora_alpha: Annotated[float | None, Range(-1e6, 1e6)] = None
    lora_dropout: Annotated[float, PROBABILITY] = 0.0
    lora_targets: tuple[str, ...] = ("all-linear",)
    lora_target_pattern: str | None = None
    lora_rank_pattern: tuple[str, ...] = ()
    lora_alpha_pattern: tuple[str, ...] = ()
    lora_bias: Literal["none", "all", "lora_only"] = "none"
    lora_modules_to_save: tuple[str, ...] = ()
    lora_dora: bool = False
    lora_from: str | None = None
    lora_rslora: bool = False
    base_quantization: Literal["none", "int8", "nf4"] = "none"
    lora_merge: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = [
            f"--{setting.name.replace('_', '-')}"
            for setting in dataclasses.fields(self)
            if setting.name not in ("lora_from", "lora_merge", "base_quantization")
            and getattr(self, setting.name) != setting.default
        ]
        if self.base_quantization != "none":
            flag = f"--base-quantization {self.base_quantization}"
            if not self.is_on:
                raise ConfigError(
                    f"{flag} without --lora-rank: a quantised base is frozen, so there would be nothing to train; give "
                    "a rank for adapters, or leave it out"
                )
            if self.lora_merge:
                raise ConfigError(
                    f"{flag} and --lora-merge exclude each other: adapters have no room in a quantised base; write the "
                    "adapters, and merge them into the base as it is: shardwise export-hf OUT --out MERGED --merge"
                )
        if self.lora_from is not None:
            if changed:
                raise ConfigError(
                    f"{', '.join(changed)} beside --lora-from, whose folder says what its adapters are; leave them out"
                )
            return
        if self.lora_rank is None:
            if changed := changed + (["--lora-merge"] if self.lora_merge else []):
                raise ConfigError(f"{', '.join(changed)} without --lora-rank: without a rank there are no adapters")
            return
        if not self.lora_targets:
            raise ConfigError("--lora-targets names no layer; name at least one, such as q_proj")
        if self.lora_target_pattern is not None and self.lora_targets != ("all-linear",):
            raise ConfigError(
                "--lora-targets and --lora-target-pattern both say which layers get adapters; leave one out"
            )
        self.config()

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained, and the model's weights left."""
        return self.lora_rank is not None or self.lora_from is not None

    def config(self) -> LoraConfig:
        """The adapters of a run that makes new ones.

        Raises:
            ConfigError: a value out of range, a pattern that is none.
        """
        # Not at the top: it would import PyTorch.
        from shardwise.models.adapters.config import LoraConfig

        assert self.lora_rank is not None
        return LoraConfig(
            r=self.lora_rank,
            lora_alpha=2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=self.lora_targets if self.lora_target_pattern is None else self.lora_target_pattern,
            use_rslora=self.lora_rslora,
            use_dora=self.lora_dora,
            rank_pattern=_numbers("--lora-rank-pattern", self.lora_rank_pattern, int),
            alpha_pattern=_numbers("--lora-alpha-pattern", self.lora_alpha_pattern, float),
            bias=self.lora_bias,
            modules_to_save=self.lora_modules_to_save,
        )

    def describe(self) -> str:
        """What is trained, in a few words."""
        if self.lora_from is not None:
            return f"the adapters of {self.lora_from}"
        if self.lora_rank is None:
            return "all weights"
        targets = self.lora_target_pattern or ", ".join(self.lora_targets)
        biases = {"none": (), "all": ("all biases",), "lora_only": ("their biases",)}[self.lora_bias]
        beside = ", ".join((*biases, *self.lora_modules_to_save))
        kind = "DoRA adapters" if self.lora_dora else "adapters"
        base = "" if self.base_quantization == "none" else f", on a base in {self.base_quantization}"
        return f"{kind} of rank {self.lora_rank} ({targets})" + (f", and {beside}" if beside else "") + base


def _numbers(flag: str, pairs: Sequence[str], kind: Callable[[str], Any]) -> dict[str, Any]:
    """``NAME=NUMBER`` of each."""
    numbers: dict[str, Any] = {}
    for pair in pairs:
        name, _, number = pair.rpartition("=")
        try:
            numbers[name] = kind(number)
        except ValueError:
            name = ""
        if not name:
            raise ConfigError(f"{flag} has {pair!r}; write a name and its number, such as q_proj=16")
    return numbers
