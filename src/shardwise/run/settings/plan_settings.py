"""Settings of plans: those of the runs that they plan, without the need for data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from shardwise.run.settings.finetune_settings import FINETUNE_BATCH, DpoSettings, FinetuneSettings, LoraSettings
from shardwise.run.settings.run_settings import ModelSettings, RunSettings
from shardwise.training.bounds import BATCH, DEFAULT_SEQUENCE, SEQUENCE
from shardwise.training.step_settings import TrainingSettings

_UNREAD = ("stdlib",)


@dataclass(frozen=True)
class PlannedModelSettings(ModelSettings):
    """Sizes and kind of the model.

    Attributes:
        sequence_length: tokens in a training sample; if not given, 256, or with MODEL_DIR 512 or the model's maximum,
            whichever is less, as for a fine-tuning run.
    """

    sequence_length: Annotated[int | None, SEQUENCE] = None  # type: ignore[assignment]  # a number in ``resolved``


@dataclass(frozen=True)
class PlannedTrainingSettings(TrainingSettings):
    """Optimization settings of a run.

    Attributes:
        global_batch_size: samples per step, over all ranks; if not given, 16, or with MODEL_DIR 8, as for a fine-tuning
            run.
    """

    global_batch_size: Annotated[int | None, BATCH] = None  # type: ignore[assignment]  # the same


@dataclass(frozen=True)
class PlanSettings(RunSettings):
    """Settings of the run to plan, the same as those of ``shardwise train``.

    Attributes:
        data: same as for a run; a plan does not read it.
        model: sizes and kind of the model.
        training: length, batch size, precision.
        lora: low-rank adapters on a frozen model.
    """

    data: tuple[str, ...] = _UNREAD
    model: PlannedModelSettings = field(default_factory=PlannedModelSettings)
    training: PlannedTrainingSettings = field(default_factory=PlannedTrainingSettings)
    lora: Annotated[LoraSettings, tyro.conf.arg(name="")] = field(default_factory=LoraSettings)

    def resolved(self, longest: int | None) -> PlanSettings:
        """Return the settings with the defaults filled in."""
        length, batch = self.model.sequence_length, self.training.global_batch_size
        if length is None:
            length = ModelSettings.sequence_length if longest is None else min(DEFAULT_SEQUENCE, longest)
        if batch is None:
            batch = TrainingSettings.global_batch_size if longest is None else FINETUNE_BATCH
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, sequence_length=length),
            training=dataclasses.replace(self.training, global_batch_size=batch),
        )


@dataclass(frozen=True)
class PlannedFinetuneSettings(FinetuneSettings):
    """Settings of the fine-tuning run to plan.

    Attributes:
        data: same as for a run; a plan does not read it.
    """

    data: tuple[str, ...] = _UNREAD


@dataclass(frozen=True)
class PlannedDpoSettings(DpoSettings):
    """Settings of the run on preferences to plan.

    Attributes:
        data: same as for a run; a plan does not read it.
    """

    data: tuple[str, ...] = _UNREAD


PLANNED: dict[str, type[RunSettings]] = {
    "train": PlanSettings,
    "finetune": PlannedFinetuneSettings,
    "dpo": PlannedDpoSettings,
}
"""Settings of the plan of each command that trains."""
