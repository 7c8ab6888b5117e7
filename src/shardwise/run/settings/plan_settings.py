"""What a run is planned by: the settings of one that trains a new model, of which nothing is read or started."""

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from shardwise.run.settings.lora_settings import LoraSettings
from shardwise.training.setting_groups import ModelSettings
from shardwise.training.settings import RunSettings


@dataclass(frozen=True)
class PlanSettings(RunSettings):
    """The settings of a run, as ``shardwise train`` takes them.

    Attributes:
        data: as for a run; not read here.
        model: the model's sizes and kind.
        lora: low-rank adapters, beside which the model is frozen.
    """

    data: tuple[str, ...] = ("stdlib",)
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: Annotated[LoraSettings, tyro.conf.arg(name="")] = field(default_factory=LoraSettings)

    @property
    def sequence_length(self) -> int:
        """Tokens in a sample."""
        return self.model.sequence_length

    @property
    def model_name(self) -> str:
        """What people call the model."""
        return self.model.architecture
