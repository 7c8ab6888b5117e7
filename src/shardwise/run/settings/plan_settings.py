"""What a run is planned by: the settings of one that trains a new model, of which nothing is read or started."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from shardwise.run.settings.finetune_settings import USUAL_BATCH_SIZE, USUAL_SEQUENCE_LENGTH
from shardwise.run.settings.lora_settings import LoraSettings
from shardwise.training.bounds import Range
from shardwise.training.setting_groups import SEQUENCE, ModelSettings, TrainingSettings
from shardwise.training.settings import RunSettings


@dataclass(frozen=True)
class PlannedModelSettings(ModelSettings):
    """The model's sizes and kind.

    Attributes:
        sequence_length: tokens in a training sample; if not given 256, and with MODEL_DIR 512 or the model's longest if
            that is less, as for a fine-tuning run.
    """

    sequence_length: Annotated[int | None, SEQUENCE] = None  # type: ignore[assignment]  # a number in ``resolved``


@dataclass(frozen=True)
class PlannedTrainingSettings(TrainingSettings):
    """The optimisation of one run.

    Attributes:
        global_batch_size: samples per step, over all ranks; if not given 16, and with MODEL_DIR 8, as for a fine-tuning
            run.
    """

    global_batch_size: Annotated[int | None, Range(1, 10**6)] = None  # type: ignore[assignment]  # likewise


@dataclass(frozen=True)
class PlanSettings(RunSettings):
    """The settings of a run, as ``shardwise train`` takes them.

    Attributes:
        data: as for a run; not read here.
        model: the model's sizes and kind.
        training: length, batch size, precision.
        lora: low-rank adapters, beside which the model is frozen.
    """

    data: tuple[str, ...] = ("stdlib",)
    model: PlannedModelSettings = field(default_factory=PlannedModelSettings)
    training: PlannedTrainingSettings = field(default_factory=PlannedTrainingSettings)
    lora: Annotated[LoraSettings, tyro.conf.arg(name="")] = field(default_factory=LoraSettings)

    def resolved(self, longest: int | None) -> "PlanSettings":
        """The settings with the numbers that are not given.

        Args:
            longest: the longest sequence of the model that a fine-tuning run starts from; None for a new model.
        """
        length, batch = self.model.sequence_length, self.training.global_batch_size
        if length is None:
            length = ModelSettings.sequence_length if longest is None else min(USUAL_SEQUENCE_LENGTH, longest)
        if batch is None:
            batch = TrainingSettings.global_batch_size if longest is None else USUAL_BATCH_SIZE
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, sequence_length=length),
            training=dataclasses.replace(self.training, global_batch_size=batch),
        )

    @property
    def sequence_length(self) -> int:
        """Tokens in a sample; there is a number once it is ``resolved``."""
        assert self.model.sequence_length is not None
        return self.model.sequence_length

    @property
    def model_name(self) -> str:
        """What people call the model."""
        return self.model.architecture
