"""What a run is told that learns from a teacher, beside what every fine-tuning run is."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from shardwise.core.errors import ConfigError
from shardwise.run.settings.finetune_settings import FinetuneSettings
from shardwise.training.bounds import Checked, Folder, Range


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
