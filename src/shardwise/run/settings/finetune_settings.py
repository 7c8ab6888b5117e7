"""The settings of fine-tuning runs: the model to start from, labels, adapters, preferences, a teacher."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import tyro

from shardwise.core.errors import ConfigError
from shardwise.run.settings.lora_settings import LoraSettings
from shardwise.training.bounds import PROBABILITY, STEPS, Checked, Folder, Range
from shardwise.training.optimizer_settings import DECAY, RATE, OptimizerSettings
from shardwise.training.setting_groups import SEQUENCE, TrainingSettings
from shardwise.training.settings import RunSettings

_BASE = Folder("", "no model to start from; name its Hugging Face folder: shardwise finetune MODEL_DIR ...")
_STEPS = 200
USUAL_BATCH_SIZE = 8
"""Samples of a step, where nothing says otherwise."""

USUAL_SEQUENCE_LENGTH = 512
"""Tokens in a sample, where nothing says otherwise and the model takes as many."""

_LEARNING_RATE, _LORA_LEARNING_RATE = 2e-5, 2e-4


@dataclass(frozen=True)
class PretrainedSettings(Checked, prefix="model."):
    """What of the model may be chosen.

    Attributes:
        sequence_length: tokens in a training sample; 512, or the model's longest if that is less, if not given.
        dropout: probability of dropping an element of residual branches, of attention weights, and of what a
            classification head looks at; what the folder's config.json says of each if not given.
    """

    sequence_length: Annotated[int | None, SEQUENCE] = None
    dropout: Annotated[float | None, PROBABILITY] = None


@dataclass(frozen=True)
class SampleSettings(Checked, prefix="--"):
    """Chats and instructions, and how long to train on them.

    Attributes:
        mask_prompts: learn what the assistant says, and completions, only; with --no-mask-prompts all of the text.
        packing: put several samples into one row, kept apart by masks, with positions of their own: no time is spent on
            filling up short ones. A step's samples are rows then.
        too_long: what becomes of a sample that is longer than model.sequence-length: its beginning, parts of it, or
            nothing.
        held_out: files and folders to measure on, in the forms of data; a share of the data (corpus.held-out-fraction)
            if not given.
        epochs: how often to train on all of the data, in place of training.steps.
    """

    mask_prompts: bool = True
    packing: bool = False
    too_long: Literal["cut", "split", "drop"] = "cut"
    held_out: tuple[str, ...] = ()
    epochs: Annotated[float | None, Range(0, 1e6, low_included=False)] = None


@dataclass(frozen=True)
class LabelSettings(Checked, prefix="--"):
    """Labels for texts.

    Attributes:
        task: "text-generation" trains a model to continue texts; "sequence-classification" one to label them, on
            records of a text (corpus.text-key), its label and, of two texts, text_pair; "token-classification" one to
            label words, on records of tokens (a list of words) and their labels (or tags, or ner_tags).
        num_labels: how many labels there are; if not given as many as the model has, or the data of a new head.
        label_names: names of the labels that the data has as integers from 0, in order, for a new head, or one whose
            labels have no names.
        problem_type: what labels mean, as in transformers; if not given what config.json says of the model's head, or
            what the data looks like: a list of labels, a fraction, or one label of several.
        pad_token: the name of the token that fills up short texts, where the model's config.json has no pad_token_id;
            for sequence-classification.
    """

    task: Literal["text-generation", "sequence-classification", "token-classification"] = "text-generation"
    num_labels: Annotated[int | None, Range(1, 1 << 20)] = None
    label_names: tuple[str, ...] = ()
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None
    pad_token: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_labels", "label_names", "problem_type", "pad_token"):
            if getattr(self, name) not in (None, ()) and not self.is_on:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for --task sequence-classification or token-classification; add it"
                )
        for name, why in (
            ("problem_type", "each word has one label of several"),
            ("pad_token", "labels of words do not depend on what fills up short texts"),
        ):
            if getattr(self, name) is not None and self.task == "token-classification":
                raise ConfigError(f"--{name.replace('_', '-')} is for --task sequence-classification: {why}")
        names, count = self.label_names, len(self.label_names)
        if names and (count < 2 or len(set(names)) < count or "" in names):
            raise ConfigError(f"--label-names {' '.join(map(repr, names))}: give at least two names, all different")
        if names and self.problem_type == "regression":
            raise ConfigError("--label-names: the number of a regression has no name; leave it out")
        if names and self.num_labels not in (None, count):
            raise ConfigError(f"--num-labels is {self.num_labels}, and --label-names has {count}; leave one out")

    @property
    def is_on(self) -> bool:
        """Whether texts, or words, are labelled."""
        return self.task != "text-generation"


@dataclass(frozen=True)
class FinetuneOptimizerSettings(OptimizerSettings):
    """AdamW or Muon, and the learning rate of each step.

    Attributes:
        learning_rate: highest learning rate; 2e-5, or 2e-4 for adapters, if not given.
    """

    # A number once the settings of the run are made, which know whether it is for adapters.
    learning_rate: Annotated[float | None, RATE] = None  # type: ignore[assignment]
    warmup_steps: Annotated[int, STEPS] = 10
    weight_decay: Annotated[float, DECAY] = 0.0
    beta2: Annotated[float, PROBABILITY] = 0.999


@dataclass(frozen=True)
class FinetuneSettings(RunSettings):
    """One fine-tuning run.

    Attributes:
        base: Hugging Face folder to start from: config.json, safetensors and tokenizer.json.
        out: folder for the fine-tuned model or its adapters, for checkpoints, metrics and pictures.
        special_tokens: read the names of special tokens in the text, such as <|im_end|>, as these tokens, as
            transformers does; as letters with --no-special-tokens, for text of people whom you don't trust.
        model: what of the model may be chosen.
        lora: low-rank adapters.
        samples: chats and instructions, and how long to train on them.
        labels: labels for texts, in place of more text.
    """

    learning_rates: ClassVar[tuple[float, float]] = (_LEARNING_RATE, _LORA_LEARNING_RATE)
    """Usual ones, of all weights and of adapters."""

    base: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_DIR"), _BASE] = ""
    out: Annotated[str, Folder()] = "runs/finetune"
    special_tokens: bool = True
    model: PretrainedSettings = field(default_factory=PretrainedSettings)
    optimizer: FinetuneOptimizerSettings = field(default_factory=FinetuneOptimizerSettings)
    training: TrainingSettings = field(
        default_factory=lambda: TrainingSettings(steps=_STEPS, global_batch_size=USUAL_BATCH_SIZE, eval_every=50)
    )
    lora: Annotated[LoraSettings, tyro.conf.arg(name="")] = field(default_factory=LoraSettings)
    samples: Annotated[SampleSettings, tyro.conf.arg(name="")] = field(default_factory=SampleSettings)
    labels: Annotated[LabelSettings, tyro.conf.arg(name="")] = field(default_factory=LabelSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (kind := self.lora.base_quantization) != "none":
            for flag, is_on in (("--fsdp", self.parallel.fsdp), ("--exact", self.parallel.exact)):
                if is_on:
                    raise ConfigError(f"--base-quantization {kind} and {flag} exclude each other; leave one out")
        if self.lora.is_on and self.parallel.virtual_stages > 1:
            raise ConfigError("adapters and --virtual-stages over 1 exclude each other; use another schedule")
        if self.lora.is_on and self.optimizer.name == "muon":
            raise ConfigError(
                "--optimizer.name muon is for the weight matrices of transformer layers, and adapters leave them "
                "as they are; use adamw"
            )
        if self.samples.epochs is not None and self.training.steps != _STEPS:
            raise ConfigError(
                f"--epochs {self.samples.epochs:g} and --training.steps {self.training.steps} exclude each other; "
                "leave one of them out"
            )
        if self.labels.is_on and self.parallel.exact:
            raise ConfigError(f"--task {self.labels.task} and --exact exclude each other; leave one out")
        for name in ("mask_prompts", "packing", "too_long"):
            if self.labels.is_on and getattr(self.samples, name) != getattr(SampleSettings, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for text that is continued, and --task {self.labels.task} "
                    "labels it; leave one of them out"
                )
        if self.optimizer.learning_rate is None:
            rate = self.learning_rates[self.lora.is_on]
            object.__setattr__(self, "optimizer", dataclasses.replace(self.optimizer, learning_rate=rate))

    @property
    def sequence_length(self) -> int:
        """Tokens in a sample; there is a number once the model's folder was looked at."""
        assert self.model.sequence_length is not None
        return self.model.sequence_length

    @property
    def model_name(self) -> str:
        """The folder's name, and what is trained."""
        task = f", {self.labels.task}" if self.labels.is_on else ""
        return f"{self.base}, {self.lora.describe()}{task}"


@dataclass(frozen=True)
class PreferenceSettings(Checked, prefix="--"):
    """The loss of preferences.

    Attributes:
        beta: how closely the model is held to the one that training begins with.
        loss_type: "sigmoid" is DPO; "robust" allows for preferences that are the wrong way round (label_smoothing);
            "hinge" and "ipo" stop pulling two answers apart that are far enough apart.
        label_smoothing: the probability that a preference is the wrong way round.
    """

    beta: Annotated[float, Range(0, 1e6, low_included=False)] = 0.1
    loss_type: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    label_smoothing: Annotated[float, Range(0, 0.5, high_included=False)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ConfigError(
                f"--label-smoothing {self.label_smoothing:g} and --loss-type {self.loss_type} exclude each other; use "
                "sigmoid or robust"
            )


@dataclass(frozen=True)
class DpoSettings(FinetuneSettings):
    """One run on preferences.

    Attributes:
        out: folder for the trained model or its adapters, for checkpoints, metrics and pictures.
        preference: the loss.
    """

    learning_rates: ClassVar[tuple[float, float]] = (1e-6, 1e-5)

    out: Annotated[str, Folder()] = "runs/dpo"
    preference: Annotated[PreferenceSettings, tyro.conf.arg(name="")] = field(default_factory=PreferenceSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        for excluded, what in (
            (self.samples.packing, "--packing: the answers of a pair are rows of one batch"),
            (not self.samples.mask_prompts, "--no-mask-prompts: what is compared are the answers to one prompt"),
            (self.samples.too_long == "split", "--too-long split: a part of an answer is not what people chose; cut"),
            (self.labels.is_on, f"--task {self.labels.task}: what is learned are answers; finetune learns labels"),
            (self.parallel.exact, "--exact: the loss of preferences has no exact form"),
        ):
            if excluded:
                raise ConfigError(f"dpo has no {what}; leave it out")
        if self.model.dropout is None:
            # What dropout takes away would count as a change since the reference.
            object.__setattr__(self, "model", dataclasses.replace(self.model, dropout=0.0))


@dataclass(frozen=True)
class TeacherSettings(Checked, prefix="--"):
    """The teacher, and how closely it is followed.

    Attributes:
        teacher: Hugging Face folder of the model to learn from, of the same tokenizer: config.json, safetensors and
            tokenizer.json.
        divergence: "forward" is KL(teacher || student), which spreads over all that the teacher finds possible;
            "reverse" is KL(student || teacher), which keeps to what it finds likely.
        temperature: divides the logits of both; the divergence is multiplied by its square.
        alpha: weight of the divergence; the cross entropy with the data has the rest.
    """

    teacher: Annotated[str | None, Folder()] = None
    divergence: Literal["forward", "reverse"] = "forward"
    temperature: Annotated[float, Range(1e-3, 1000)] = 1.0
    alpha: Annotated[float, Range(0, 1, low_included=False)] = 0.5


@dataclass(frozen=True)
class DistillSettings(FinetuneSettings):
    """One run that learns from a teacher.

    Attributes:
        out: folder for the trained model or its adapters, for checkpoints, metrics and pictures.
        distillation: the teacher.
    """

    out: Annotated[str, Folder()] = "runs/distill"
    distillation: Annotated[TeacherSettings, tyro.conf.arg(name="")] = field(default_factory=TeacherSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distillation.teacher is None:
            raise ConfigError("no model to learn from; name its Hugging Face folder: --teacher FOLDER")
        for excluded, what in (
            (self.parallel.pp > 1, "--pp over 1: the teacher has no stages; split both models with --tp"),
            (self.labels.is_on, f"--task {self.labels.task}: what is learned is text; use shardwise finetune"),
            (self.parallel.exact, "--exact: the divergence has no exact form; leave it out"),
        ):
            if excluded:
                raise ConfigError(f"distill has no {what}")
