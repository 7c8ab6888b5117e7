"""What a run on preferences is told, beside what every fine-tuning run is."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import tyro

from shardwise.core.errors import ConfigError
from shardwise.run.settings.finetune_settings import FinetuneSettings
from shardwise.training.bounds import Checked, Folder, Range


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
