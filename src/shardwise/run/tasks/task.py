"""A task: where a run's model comes from, what it learns, and what is left at the end.

A ``Source``, a ``Method`` and a function of the session are chosen apart, by ``shardwise.run.tasks.task_of`` from the
settings. ``Session`` is the task set up on one rank, ``Outcome`` its result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.core.communication.overlap import Pass, Way
from shardwise.core.topology import Groups, Topology
from shardwise.data import DataLoader
from shardwise.models.description import ModelChunks, ModelDescription
from shardwise.models.transformer_model import TransformerModel
from shardwise.run.plan.fit import Shortage
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import FinetuneSettings, RunSettings
from shardwise.run.tasks.task_data import TaskData, share
from shardwise.run.utilisation import Utilisation
from shardwise.training.objective import Objective
from shardwise.training.trainer import Trainer


class Source(Protocol):
    """Where a run's model comes from.

    Attributes:
        identity: the model that the run starts from, as checkpoints record it; nothing for a new one.
        trains_weights: all weights of the model are trained, not adapters.
    """

    identity: Mapping[str, Any]
    trains_weights: bool

    def describe(self, data: TaskData) -> ModelDescription:
        """The model that learns from such data."""

    def build(
        self, settings: RunSettings, data: TaskData, *, groups: Groups, device: torch.device
    ) -> TransformerModel | ModelChunks:
        """The model, or this rank's stage of it, on ``device``; every rank calls."""


class Method:
    """The data of a run, and the objective of its steps.

    Attributes:
        identity: of what it learns from besides its data, as checkpoints record it.
        rows_per_sample: sequences in a sample of a batch.
        has_plan: ``shardwise plan`` knows what the run needs if it trains all weights.
    """

    identity: Mapping[str, Any] = {}
    rows_per_sample = 1
    has_plan = True

    def read(self, ranks: Ranks) -> TaskData:
        """The data; every rank calls. Raises as ``share``."""
        return share(self.prepare, ranks)

    def prepare(self) -> TaskData:
        """Read the data, or take from the cache what an earlier run left."""
        raise NotImplementedError

    def objective(self, data: TaskData, groups: Groups, device: torch.device) -> Objective | None:
        """The objective of a step; the cross entropy of each token if None. Every rank calls.

        Args:
            data: of the run.
            groups: the model's process groups.
            device: where the model is.
        """
        return None

    def before(self, session: Session) -> None:
        """Do what comes before the first step; every rank calls."""


@dataclass(frozen=True)
class Session:
    """One rank's view of a run.

    Attributes:
        task: the run.
        settings: of the run.
        ranks: who this process is.
        topology: the groups.
        data: rows to train and to measure on.
        loader: training batches.
        trainer: model and optimizer.
        ways: how each pass of the layers goes together with its collective, with ``parallel.tp_comm_overlap``.
        transport: how the tensor-parallel ranks' tensors travel.
        num_parameters: of the whole model, tied weights counted once.
        utilisation: what the steps are measured against.
        shortage: what is said when a rank runs out of memory.
    """

    task: Task
    settings: RunSettings
    ranks: Ranks
    topology: Topology
    data: TaskData
    loader: DataLoader
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
    """The result of a run; the same on every rank.

    Attributes:
        first_loss: of the first step that this process did, in nats per token; None if there was none to do.
        last_loss: of the last step; None if there was none to do.
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
    """The result of a run, and its folder."""
    references = f" ({compared(outcome)})" if outcome.references else ""
    lines = [session.trainer.objective.of_evaluation.outcome(outcome.held_out) + references]
    if outcome.first_loss is not None and outcome.last_loss is not None:
        lines.append(f"loss {outcome.first_loss:.3f} -> {outcome.last_loss:.3f} in {outcome.seconds:.0f} s")
    lines.append(f"files: {session.out} (checkpoint {outcome.checkpoint.name})")
    return "\n".join([*lines, *outcome.notes])


def compared(outcome: Outcome) -> str:
    """The bits per byte of other compressors for the held-out text."""
    return ", ".join(f"{name} {value:.3f}" for name, value in outcome.references.items())


def leave_nothing(session: Session) -> None:
    """The checkpoints of a run are all that it leaves."""


@dataclass
class Task:
    """A run, put together from its parts.

    Attributes:
        settings: of the run.
        source: where its model comes from.
        method: what it learns.
        leave: writes what is left once the last step is saved; every rank calls.
        report: gives what is printed at the end.
    """

    settings: RunSettings
    source: Source
    method: Method
    leave: Callable[[Session], None] = leave_nothing
    report: Callable[[Session, Outcome], str] = summary

    @property
    def identity(self) -> dict[str, Any]:
        """The models that the run starts from and learns from, as checkpoints record them."""
        return {**self.source.identity, **self.method.identity}

    def read(self, ranks: Ranks) -> TaskData:
        """The data, whose size tells the number of steps of a run by epochs; every rank calls. Raises as ``share``."""
        data, settings = self.method.read(ranks), self.settings
        if isinstance(settings, FinetuneSettings) and (epochs := settings.samples.epochs) is not None:
            steps = max(1, math.ceil(epochs * len(data.train) / settings.training.global_batch_size))
            self.settings = dataclasses.replace(
                settings,
                training=dataclasses.replace(settings.training, steps=steps),
                samples=dataclasses.replace(settings.samples, epochs=None),
            )
        return data
