"""The task of a run: the source of its model, its training method, and its final files.

``shardwise.run.tasks.task_of`` chooses a ``Source``, a ``Method`` and a function of the session by the settings, each
independently of the others. ``Session`` is the task set up on one rank; ``Outcome`` is its result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardwise.core.communication.agreement import agree
from shardwise.core.communication.overlap import OverlapMethod, Pass
from shardwise.core.errors import CheckpointError
from shardwise.core.json_text import shown
from shardwise.core.topology import Groups, Topology
from shardwise.data import DataLoader, HeldOut
from shardwise.data.json_records import counted
from shardwise.models.config import ModelConfig
from shardwise.models.description import ModelChunks
from shardwise.models.language_model import LanguageModel
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import FinetuneSettings, RunSettings
from shardwise.run.tasks.task_data import TaskData, share
from shardwise.run.utilisation import Utilisation
from shardwise.storage import checkpoint
from shardwise.storage.checkpoint.folder import step_of
from shardwise.training.hooks import StepRouting
from shardwise.training.objective import Objective
from shardwise.training.trainer import Trainer

if TYPE_CHECKING:
    from shardwise.run.out_of_memory import MemoryShortage


class Source(Protocol):
    """Source of a run's model.

    Attributes:
        identity: identity of the initial model, recorded in checkpoints; empty for a new model.
        trains_weights: True if all weights are trained, False if adapters are.
    """

    identity: Mapping[str, Any]
    trains_weights: bool

    def describe(self, data: TaskData) -> ModelConfig:
        """Describe the model to train on ``data``."""

    def build(
        self, settings: RunSettings, data: TaskData, *, groups: Groups, device: torch.device
    ) -> LanguageModel | ModelChunks:
        """Build the model, or this rank's stage of it, on ``device``; every rank calls."""


class Method:
    """The data of a run and the objective of its steps.

    Attributes:
        identity: identity of other inputs of training, such as a teacher, recorded in checkpoints.
    """

    identity: Mapping[str, Any] = {}

    def read(self, ranks: Ranks) -> TaskData:
        """Read the data; every rank calls. Raises as ``share``."""
        return share(self.prepare, ranks)

    def prepare(self) -> TaskData:
        """Prepare the data, or load it from the cache of an earlier run."""
        raise NotImplementedError

    def objective(self, data: TaskData, groups: Groups, device: torch.device) -> Objective | None:
        """Return the objective of a step, or None for the cross entropy of each token. Every rank calls."""
        return None

    def before(self, session: Session) -> None:
        """Hook before the first step; every rank calls."""


@dataclass(frozen=True)
class Session:
    """One rank's view of a run.

    Attributes:
        ranks: this process's place among the ranks.
        topology: process groups of the run.
        data: rows for training and evaluation.
        loader: loader of the training batches.
        trainer: model and optimizer.
        routing: the recorder or the replay of the experts that tokens choose, if the settings name one.
        overlap: how each pass of the layers overlaps with its collective, with ``parallel.tp_comm_overlap``.
        transport: transport of tensors between the tensor-parallel ranks.
        num_parameters: number of parameters of the whole model, tied weights counted once.
        num_trained: number of these that are trained.
        utilisation: reference for the hardware utilisation of the steps.
        shortage: explanation for the error when a rank runs out of memory.
    """

    task: Task
    settings: RunSettings
    ranks: Ranks
    topology: Topology
    data: TaskData
    loader: DataLoader
    trainer: Trainer
    routing: StepRouting | None
    overlap: list[tuple[Pass, OverlapMethod]]
    transport: str
    num_parameters: int
    num_trained: int
    utilisation: Utilisation
    shortage: MemoryShortage

    @property
    def out(self) -> Path:
        """Folder for checkpoints, metrics and the final files (``--out``)."""
        return Path(self.settings.out)

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.out / "checkpoints"

    def held_out_after(self, done: int) -> HeldOut:
        """Return the held-out data to measure after ``done`` steps: all at the end, and if ``eval_every`` is given.

        Else it is at most a fifth of the samples since the last evaluation, whose forward costs a few percent of them.
        """
        training = self.settings.training
        if training.eval_every is not None or done == training.steps:
            return self.data.held_out
        return self.data.held_out.part(max(1, training.evaluation_interval // 5) * training.global_batch_size)


@dataclass(frozen=True)
class Outcome:
    """Result of a run; the same on every rank, except for ``notes``.

    Attributes:
        first_loss: loss of this process's first step, in nats per token; None without a step.
        last_loss: loss of the last step; None without a step.
        held_out: final metrics on held-out data, by name.
        seconds: time spent in training steps.
        collectives_per_step: number of collectives that a rank launches in a step.
        bytes_per_step: bytes that a rank contributes to these collectives.
        checkpoint: the last checkpoint.
        references: bits per byte of general-purpose compressors on the same held-out text, by name.
        notes: failures that did not end the run, one line each; each rank has its own.
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
        """Bits per byte on the held-out text, if this was measured."""
        return self.held_out["held_out_bits_per_byte"]


def summary(session: Session, outcome: Outcome) -> str:
    """Format the result of a run and its folder."""
    references = f" ({compared(outcome)})" if outcome.references else ""
    lines = [session.trainer.objective.for_evaluation.outcome(outcome.held_out) + references]
    if outcome.first_loss is not None and outcome.last_loss is not None:
        lines.append(f"loss {outcome.first_loss:.3f} -> {outcome.last_loss:.3f} in {outcome.seconds:.0f} s")
    lines.append(f"files: {session.out} (checkpoint {outcome.checkpoint.name})")
    return "\n".join([*lines, *outcome.notes])


def compared(outcome: Outcome) -> str:
    """Format the bits per byte of general-purpose compressors on the held-out text."""
    return ", ".join(f"{name} {value:.3f}" for name, value in outcome.references.items())


def write_nothing(session: Session) -> None:
    """Write nothing; the run has no files other than its checkpoints."""


@dataclass
class Task:
    """The parts of a run.

    Attributes:
        settings: settings of the run.
        source: source of the model.
        method: data and objective.
        write: callback that writes the final files after the last step is saved; every rank calls.
        report: callback that returns the text printed at the end.
        num_samples: number of samples to learn in all steps; None for all that the steps take.
    """

    settings: RunSettings
    source: Source
    method: Method
    write: Callable[[Session], None] = write_nothing
    report: Callable[[Session, Outcome], str] = summary
    num_samples: int | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Identity of the initial model and of other inputs of training, recorded in checkpoints."""
        return {**self.source.identity, **self.method.identity}

    def read(self, ranks: Ranks) -> TaskData:
        """Read the data and, for a run in epochs, set the numbers of samples and steps by its size; every rank calls.

        Raises as ``share``.
        """
        data, settings = self.method.read(ranks), self.settings
        if isinstance(settings, FinetuneSettings) and (epochs := settings.samples.epochs) is not None:
            begun = agree(lambda: _newest_checkpoint(settings), group=ranks.control)
            batch = settings.training.global_batch_size
            self.num_samples, steps, note = agree(
                lambda: end_of_epochs(epochs * len(data.train), batch, begun), group=ranks.control
            )
            if note and ranks.is_first:
                print(f"note   {note}", flush=True)
            self.settings = dataclasses.replace(
                settings,
                training=dataclasses.replace(settings.training, steps=steps),
                samples=dataclasses.replace(settings.samples, epochs=None),
            )
        return data


_Begun = tuple[int, Mapping[str, Any]]
"""Step and ``meta`` of the checkpoint that a run resumes from."""


def _newest_checkpoint(settings: RunSettings) -> _Begun | None:
    newest = checkpoint.latest(Path(settings.out) / "checkpoints") if settings.resume == "auto" else None
    return None if newest is None else (step_of(newest), checkpoint.read_meta(newest))


def end_of_epochs(exact: float, batch: int, begun: _Begun | None) -> tuple[int | None, int, str]:
    """Return the number of samples to learn, the number of steps, and a note or an empty string.

    A run that began without a number of samples, in an earlier version or with a number of steps, has none: samples of
    the next epoch fill its last step.

    Args:
        exact: number of samples in the epochs of the run, maybe a fraction.
        batch: number of samples in a step.
        begun: see ``_Begun``; None for a new run.
    """
    number = max(1, round(exact))
    steps = math.ceil(number / batch)
    if begun is None:
        return number, steps, ""
    before = begun[1].get("num_samples")
    if before is None:
        steps = max(1, math.ceil(exact / batch))
        surplus = steps * batch - number
        filled = f"as the run began, its last step is filled with {counted(surplus, 'sample')} of the next epoch"
        return None, steps, filled if surplus else ""
    if type(before) is not int or before < 1:
        raise CheckpointError(f"num_samples of the checkpoint is {shown(before)}; it must be a count, or null")
    passed = min(begun[0] * batch, number) - before
    return number, steps, f"{counted(passed, 'sample')} left out where the run ended before" if passed > 0 else ""
