"""The recipe of a run, the session that is set up from it, and the outcome: the three values that a run consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwise.core.communication.overlap import Pass, Way
from shardwise.core.topology import Groups, Topology
from shardwise.data import DataLoader, HeldOut
from shardwise.models.description import ModelDescription
from shardwise.run.build import build_model, describe
from shardwise.run.plan.fit import Shortage
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import RunSettings, Settings
from shardwise.run.tasks.texts import TrainingData, prepare_texts, share_texts
from shardwise.run.utilisation import Utilisation
from shardwise.training.objective import Objective
from shardwise.training.trainer import Trainer


class Recipe:
    """A run that trains a new model; other runs override what they do otherwise.

    Args:
        settings: of the run.

    Attributes:
        settings: likewise, with what making the recipe has decided.
        identity: the model that the run starts from, as checkpoints record it; nothing for a new one.
        trains_weights: all weights of the model, not adapters beside them.
        rows_per_sample: sequences that a sample of a batch is.
        has_plan: whether ``shardwise plan`` knows what the run needs if it trains all weights.
        leaves_sample: the run ends with a text by the model.
    """

    identity: Mapping[str, Any] = {}
    trains_weights = True
    rows_per_sample = 1
    has_plan = True
    leaves_sample = True
    build_model = staticmethod(build_model)

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings

    def read_texts(self, ranks: Ranks) -> TrainingData:
        """What is trained and measured on; every rank calls. Raises as ``share_texts``.

        ``settings`` may be others afterwards, if the number of steps depends on what there is.
        """
        settings = self.settings
        assert isinstance(settings, Settings)
        return share_texts(lambda: prepare_texts(settings), ranks)

    def describe(self, vocab_size: int) -> ModelDescription:
        """The model, whose tokenizer has ``vocab_size`` ids."""
        assert isinstance(self.settings, Settings)
        return describe(self.settings.model, vocab_size)

    def objective(self, groups: Groups, device: torch.device) -> Objective | None:
        """What a step minimises; the cross entropy of each token if None. Every rank calls.

        Args:
            groups: the model's process groups.
            device: where the model is.
        """
        return None

    def before(self, session: Session) -> None:
        """What is to be done before the first step; every rank calls."""

    def after(self, session: Session) -> None:
        """What is to be done once the last step is saved; every rank calls."""

    def report(self, session: Session, outcome: Outcome) -> str:
        """What is printed at the end."""
        return summary(session, outcome)


@dataclass(frozen=True)
class Session:
    """One rank's view of a run.

    Attributes:
        recipe: what the run trains, and does besides.
        settings: of the run.
        ranks: who this process is.
        topology: the groups.
        texts: what is trained and measured on.
        loader: training batches.
        held_out: what is measured on.
        trainer: model and optimizer.
        ways: how each pass of the layers goes together with its collective, with ``parallel.tp_comm_overlap``.
        transport: how the tensor-parallel ranks' tensors travel.
        num_parameters: of the whole model, tied weights counted once.
        utilisation: what the steps are measured against.
        shortage: what is said when a rank runs out of memory.
    """

    recipe: Recipe
    settings: RunSettings
    ranks: Ranks
    topology: Topology
    texts: TrainingData
    loader: DataLoader
    held_out: HeldOut
    trainer: Trainer
    ways: list[tuple[Pass, Way]]
    transport: str
    num_parameters: int
    utilisation: Utilisation
    shortage: Shortage

    @property
    def out(self) -> Path:
        """The run's folder."""
        return Path(self.settings.out)

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.out / "checkpoints"


@dataclass(frozen=True)
class Outcome:
    """What a run came to; the same on every rank.

    Attributes:
        first_loss: of the first step that this process did, in nats per token; None if there was none to do.
        last_loss: of the last step; None likewise.
        held_out: what was measured on held-out data at the end, by name.
        seconds: spent in training steps.
        collectives_per_step: collectives that a rank launches in a step.
        bytes_per_step: bytes that a rank contributes to them.
        checkpoint: the last one.
        references: bits per byte of general-purpose compressors on the same held-out text, by name.
        notes: what could not be done, one line each; each rank has its own.
    """

    first_loss: float | None
    last_loss: float | None
    held_out: dict[str, float]
    seconds: float
    collectives_per_step: int
    bytes_per_step: int
    checkpoint: Path
    references: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def held_out_bits_per_byte(self) -> float:
        """Of the held-out text, where that is what is measured."""
        return self.held_out["held_out_bits_per_byte"]


def summary(session: Session, outcome: Outcome) -> str:
    """What came of it, and where it is."""
    references = f" ({compared(outcome)})" if outcome.references else ""
    lines = [session.trainer.objective.of_evaluation.outcome(outcome.held_out) + references]
    if outcome.first_loss is not None and outcome.last_loss is not None:
        lines.append(f"loss {outcome.first_loss:.3f} -> {outcome.last_loss:.3f} in {outcome.seconds:.0f} s")
    lines.append(f"files: {session.out} (checkpoint {outcome.checkpoint.name})")
    return "\n".join([*lines, *outcome.notes])


def compared(outcome: Outcome) -> str:
    """What other compressors need for the held-out text."""
    return ", ".join(f"{name} {value:.3f}" for name, value in outcome.references.items())
