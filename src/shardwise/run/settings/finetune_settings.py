"""Settings of runs that start from a pretrained model: adapters, preferences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from shardwise.core.errors import ConfigError
from shardwise.run.settings.run_settings import RunSettings
from shardwise.training.bounds import PROBABILITY, SEQUENCE, STEPS, Checked, Folder, Range, refuse, require
from shardwise.training.step_settings import DECAY, RATE, OptimizerSettings, TrainingSettings

if TYPE_CHECKING:
    from shardwise.models.adapters.config import LoraConfig

_BASE = Folder("", "no model to start from; name its Hugging Face folder, MODEL_DIR, directly after the command")
# Defaults of a fine-tuning run.
_STEPS, FINETUNE_BATCH = 200, 8
_LEARNING_RATE, _LORA_LEARNING_RATE = 2e-5, 2e-4


@dataclass(frozen=True)
class LoraSettings(Checked, prefix="--"):
    """Low-rank adapters.

    Attributes:
        lora_rank: train adapters of this rank instead of the model's weights; if not given, all weights are trained.
        lora_alpha: strength of the adapters, whose product is scaled by lora_alpha / lora_rank; if not given, 2 x
            lora_rank.
        lora_dropout: probability of dropping an element of an adapter's input.
        lora_targets: layers with adapters, by their names in the folder (q_proj, v_proj, embed_tokens, lm_head, ...).
            With "all-linear", all linear layers of the transformer layers, as in peft with experts and routers of
            models that had them as linear layers in transformers 4.
        lora_target_pattern: instead of lora_targets, a regular expression that matches the whole paths of the layers
            that get adapters, such as ".*layers\\.(2|3)\\..*proj".
        lora_target_parameters: parameters of experts and routers that get adapters too, by the ends of their names in
            transformers (experts.gate_up_proj, experts.down_proj, gate.weight).
        lora_rank_pattern: other ranks for some layers, as NAME=RANK, where NAME may be a regular expression for the end
            of a path; the first match counts.
        lora_alpha_pattern: other strengths for some layers, as NAME=ALPHA.
        lora_bias: biases of the model to train: none, all, or only the biases of layers with adapters (lora_only).
        lora_modules_to_save: modules that are trained whole and saved with the adapters, by their names in the
            folder (lm_head, embed_tokens, norm, ...).
        lora_dora: learn the norms of the weights' rows separately from their directions (DoRA).
        lora_from: start from the adapters in this folder, which determine rank, strength and targets.
        lora_rslora: divide the strength by the square root of the rank, not by the rank, so that high ranks also learn.
        train_new_tokens: train the rows of the embedding and the output layer of tokens that were added, next to the
            adapters; all other rows are frozen (peft's trainable_token_indices).
        base_quantization: store the frozen weights of linear layers in 8 bits (int8) or 4 bits (nf4); modules that are
            trained whole keep their dtype.
        lora_merge: write the whole model with the adapters merged into its weights, instead of the adapters.
    """

    lora_rank: Annotated[int | None, Range(1, 65_536)] = None
    lora_alpha: Annotated[float | None, Range(-1e6, 1e6)] = None
    lora_dropout: Annotated[float, PROBABILITY] = 0.0
    lora_targets: tuple[str, ...] = ("all-linear",)
    lora_target_pattern: str | None = None
    lora_target_parameters: tuple[str, ...] = ()
    lora_rank_pattern: tuple[str, ...] = ()
    lora_alpha_pattern: tuple[str, ...] = ()
    lora_bias: Literal["none", "all", "lora_only"] = "none"
    lora_modules_to_save: tuple[str, ...] = ()
    lora_dora: bool = False
    lora_from: str | None = None
    lora_rslora: bool = False
    train_new_tokens: bool = False
    base_quantization: Literal["none", "int8", "nf4"] = "none"
    lora_merge: bool = False

    def _check_together(self) -> None:
        of_any = ("--lora-from", "--lora-merge", "--base-quantization")
        changed = [flag for flag, _ in self.changed() if flag not in of_any]
        if self.base_quantization != "none":
            flag = f"--base-quantization {self.base_quantization}"
            if not self.is_on:
                raise ConfigError(
                    f"{flag} without --lora-rank: a quantised base is frozen, so there would be nothing to train; give "
                    "a rank for adapters, or leave it out"
                )
            if self.lora_merge:
                raise ConfigError(
                    f"{flag} cannot be used with --lora-merge: adapters have no room in a quantised base; write the "
                    "adapters, and merge them into the original base: shardwise export-hf OUT --out MERGED --merge"
                )
        if self.lora_from is not None:
            flags = ", ".join(changed)
            require(
                not flags, f"{flags} with --lora-from, whose folder has the settings of its adapters; leave them out"
            )
        elif self.lora_rank is None:
            flags = ", ".join([*changed, "--lora-merge"] if self.lora_merge else changed)
            require(not flags, f"{flags} without --lora-rank: without a rank there are no adapters")
        else:
            require(
                bool(self.lora_targets or self.lora_target_parameters),
                "--lora-targets names no layer; name at least one, such as q_proj",
            )
            require(
                self.lora_target_pattern is None or not self.changed("lora_targets"),
                "--lora-targets cannot be used with --lora-target-pattern: both say which layers get adapters",
            )
            self.config()

    @property
    def is_on(self) -> bool:
        """True if adapters are trained instead of the model's weights."""
        return self.lora_rank is not None or self.lora_from is not None

    def config(self) -> LoraConfig:
        """Return the configuration of new adapters."""
        # Not at the top, because it imports PyTorch.
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
            target_parameters=self.lora_target_parameters,
        )

    def describe(self) -> str:
        """Describe the trained parameters in a few words."""
        if self.lora_from is not None:
            return f"the adapters of {self.lora_from}"
        if self.lora_rank is None:
            return "all weights"
        layers = self.lora_targets if self.lora_target_pattern is None else (self.lora_target_pattern,)
        targets = ", ".join((*layers, *self.lora_target_parameters))
        biases = {"none": (), "all": ("all biases",), "lora_only": ("their biases",)}[self.lora_bias]
        beside = ", ".join((*biases, *self.lora_modules_to_save))
        kind = "DoRA adapters" if self.lora_dora else "adapters"
        base = "" if self.base_quantization == "none" else f", on a base in {self.base_quantization}"
        return f"{kind} of rank {self.lora_rank} ({targets})" + (f", and {beside}" if beside else "") + base


def _numbers(flag: str, pairs: Sequence[str], kind: Callable[[str], Any]) -> dict[str, Any]:
    """Parse pairs ``NAME=NUMBER``."""
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


@dataclass(frozen=True)
class PretrainedSettings(Checked, prefix="model."):
    """Settings of a model that is read from a folder.

    Attributes:
        sequence_length: tokens in a training sample; if not given, 512 or the model's maximum, whichever is less.
        dropout: probability of dropping an element of residual branches and of attention weights; if not given, the
            values in the folder's config.json.
        implementation: "shardwise" computes the model with its own layers, if it has a table of the folder's
            model_type; "transformers" with the model of that library, split by its own plan; "auto" takes a table if
            there is one.
    """

    sequence_length: Annotated[int | None, SEQUENCE] = None
    dropout: Annotated[float | None, PROBABILITY] = None
    implementation: Literal["auto", "shardwise", "transformers"] = "auto"


@dataclass(frozen=True)
class SampleSettings(Checked, prefix="--"):
    """Chats and instructions, and the number of epochs.

    Attributes:
        mask_prompts: train only on completions and the turns of the assistant; with --no-mask-prompts on all of the
            text.
        learn: train on all answers of a chat or completion, or only on the last one.
        prompt_template: JSON file with a form for records of other keys: a record with places for their texts, such
            as {"prompt": "{question}", "completion": "{answer}"}; or several under "forms".
        packing: put several samples into one row, separated by masks, each with positions from 0, which avoids padding.
            The batch size then counts rows.
        too_long: how to fit a sample that is longer than model.sequence-length: cut off its end, split it into several
            samples, or drop it.
        held_out: files and folders for evaluation, in the formats of data; if not given, a part of the
            data (corpus.held-out-fraction).
        epochs: number of passes over the data, instead of training.steps; places of the last step that no sample is
            left for stay empty.
    """

    mask_prompts: bool = True
    learn: Literal["all", "last"] = "all"
    prompt_template: str | None = None
    packing: bool = False
    too_long: Literal["cut", "split", "drop"] = "cut"
    held_out: tuple[str, ...] = ()
    epochs: Annotated[float | None, Range(0, 1e6, low_included=False)] = None

    def _check_together(self) -> None:
        require(
            self.mask_prompts or self.learn == "all",
            f"--no-mask-prompts trains on all of the text, and --learn {self.learn} on one answer; leave one out",
        )


@dataclass(frozen=True)
class FinetuneOptimizerSettings(OptimizerSettings):
    """AdamW or Muon, and the learning rate of each step.

    Attributes:
        learning_rate: highest learning rate; if not given, 2e-5, or 2e-4 for adapters.
    """

    # ``FinetuneSettings`` replaces None, because the default depends on whether adapters are trained.
    learning_rate: Annotated[float | None, RATE, tyro.conf.arg(aliases=("--lr",))] = None  # type: ignore[assignment]
    warmup_steps: Annotated[int, STEPS] = 10
    weight_decay: Annotated[float, DECAY] = 0.0
    beta2: Annotated[float, PROBABILITY] = 0.999


@dataclass(frozen=True)
class FinetuneSettings(RunSettings):
    """Settings of a fine-tuning run.

    Attributes:
        base: Hugging Face folder to start from, with config.json, safetensors and tokenizer.json, or a GGUF file.
        out: folder for the fine-tuned model or its adapters, for checkpoints, metrics and pictures.
        special_tokens: parse the names of special tokens in the text, such as ``<|im_end|>``, as these tokens, like
            transformers; with --no-special-tokens as letters, for text from untrusted sources.
        resize_vocab: if the tokenizer has more tokens than the model has rows in its embedding, add rows, each the mean
            of the model's own; the result has them.
        model: sequence length and dropout of the model.
        lora: low-rank adapters.
        samples: chats and instructions, and the number of epochs.
    """

    learning_rates: ClassVar[tuple[float, float]] = (_LEARNING_RATE, _LORA_LEARNING_RATE)
    """Default learning rates for all weights and for adapters."""

    base: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_DIR", help_behavior_hint="(required)"), _BASE
    ] = ""
    out: Annotated[str, Folder()] = "runs/finetune"
    special_tokens: bool = True
    resize_vocab: bool = False
    model: PretrainedSettings = field(default_factory=PretrainedSettings)
    optimizer: FinetuneOptimizerSettings = field(default_factory=FinetuneOptimizerSettings)
    training: TrainingSettings = field(
        default_factory=lambda: TrainingSettings(steps=_STEPS, global_batch_size=FINETUNE_BATCH)
    )
    lora: Annotated[LoraSettings, tyro.conf.arg(name="")] = field(default_factory=LoraSettings)
    samples: Annotated[SampleSettings, tyro.conf.arg(name="")] = field(default_factory=SampleSettings)

    def _check_together(self) -> None:
        super()._check_together()
        if (kind := self.lora.base_quantization) != "none":
            cases = (self.parallel.fsdp, "--fsdp"), (self.parallel.exact, "--exact")
            refuse(f"--base-quantization {kind} cannot be used with {{}}", *cases)
        require(
            self.resize_vocab or not self.lora.train_new_tokens,
            "--train-new-tokens without --resize-vocab: without it the model gets no new rows to train; give both",
        )
        require(
            not (self.parallel.exact and self.lora.train_new_tokens),
            "--exact has no exact form of --train-new-tokens, whose sums depend on the layout; leave one of them out",
        )
        if self.lora.is_on and self.parallel.virtual_stages > 1:
            raise ConfigError("adapters cannot be used with --virtual-stages over 1; use another schedule")
        if self.lora.is_on and self.optimizer.name == "muon":
            raise ConfigError(
                "--optimizer.name muon is for the weight matrices of transformer layers, which adapters do not "
                "change; use adamw"
            )
        if self.corpus.tokenizer is not None:
            raise ConfigError("--corpus.tokenizer is for shardwise train, and a model has its own; leave it out")
        if self.samples.epochs is not None and self.training.steps != _STEPS:
            raise ConfigError(
                f"--epochs {self.samples.epochs:g} cannot be used with --training.steps {self.training.steps}: both "
                "say how long to train"
            )
        if self.optimizer.learning_rate is None:
            rate = self.learning_rates[self.lora.is_on]
            object.__setattr__(self, "optimizer", dataclasses.replace(self.optimizer, learning_rate=rate))

    @property
    def model_name(self) -> str:
        """Folder of the model, and the trained parameters."""
        return f"{self.base}, {self.lora.describe()}"


@dataclass(frozen=True)
class PreferenceSettings(Checked, prefix="--"):
    """Settings of the preference loss.

    Attributes:
        beta: strength of the pull towards the initial model.
        loss_type: "sigmoid" is DPO; "robust" allows for flipped preferences (label_smoothing); "hinge" and "ipo" stop
            separating two answers once they are far enough apart.
        label_smoothing: probability that a preference is flipped.
    """

    beta: Annotated[float, Range(0, 1e6, low_included=False)] = 0.1
    loss_type: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    label_smoothing: Annotated[float, Range(0, 0.5, high_included=False)] = 0.0

    def _check_together(self) -> None:
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ConfigError(
                f"--label-smoothing {self.label_smoothing:g} cannot be used with --loss-type {self.loss_type}; use "
                "sigmoid or robust"
            )


@dataclass(frozen=True)
class DpoSettings(FinetuneSettings):
    """Settings of a run on preferences.

    Attributes:
        out: folder for the trained model or its adapters, for checkpoints, metrics and pictures.
        preference: preference loss.
    """

    learning_rates: ClassVar[tuple[float, float]] = (1e-6, 1e-5)

    out: Annotated[str, Folder()] = "runs/dpo"
    preference: Annotated[PreferenceSettings, tyro.conf.arg(name="")] = field(default_factory=PreferenceSettings)

    def _check_together(self) -> None:
        super()._check_together()
        refuse(
            "dpo cannot be used with {}",
            (self.samples.packing, "--packing: the answers of a pair are rows of one batch"),
            (self.samples.learn != "all", f"--learn {self.samples.learn}: it compares whole answers"),
            (not self.samples.mask_prompts, "--no-mask-prompts: it compares answers, so prompts are always masked"),
            (self.samples.too_long == "split", "--too-long split: a pair cannot be split; use --too-long cut"),
            (self.parallel.exact, "--exact: the loss of preferences has no exact form"),
        )
        if self.model.dropout is None:
            # With dropout the loss would also measure the dropout as a difference from the reference.
            object.__setattr__(self, "model", dataclasses.replace(self.model, dropout=0.0))
