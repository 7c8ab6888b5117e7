"""Repeat steps of a run on one rank, in the run's dtype and with another rounding, which measures rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.doctor.places import Axes
from shardwise.doctor.recorder import Recorder
from shardwise.run.checkpoints import check_belongs, draws_dropout, load_state_, state_of
from shardwise.run.processes.ranks import open_ranks
from shardwise.run.session import metrics_of, open_session, replay_of
from shardwise.run.settings import (
    DpoSettings,
    FinetuneSettings,
    ParallelSettings,
    ProfileSettings,
    RunSettings,
    Settings,
)
from shardwise.run.tasks.task import Session
from shardwise.training.hooks import Parts, StepHooks, StepRouting
from shardwise.training.trainer import Trainer

# For a field of settings that other commands lack, the command and its settings.
_KINDS: dict[str, tuple[str, type[RunSettings]]] = {
    "preference": ("dpo", DpoSettings),
    "lora": ("finetune", FinetuneSettings),
    "": ("train", Settings),
}
ONE_RANK: Axes = {"tp": (0, 1), "dp": (0, 1)}
"""Axes of a recording of one rank."""


@dataclass
class Repetition:
    """Metrics of repeated steps, and states on the CPU by the number of completed steps."""

    dtype: str
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def settings_on_one_rank(values: Mapping[str, Any]) -> RunSettings:
    """Return the settings of a run, from the JSON that it left, for the same run on one rank; raise ConfigError."""
    settings = _kind(values)[1].from_json(dict(values))
    return dataclasses.replace(
        settings, parallel=ParallelSettings(), profile=ProfileSettings(), resume="never", record_routing=None
    )


def command_of(values: Mapping[str, Any]) -> str:
    """Return the command whose run left these settings."""
    return _kind(values)[0]


def _kind(values: Mapping[str, Any]) -> tuple[str, type[RunSettings]]:
    return next(kind for name, kind in _KINDS.items() if not name or name in values)


def repeat(
    settings: RunSettings,
    steps: range,
    *,
    base: Path | None,
    saved: Path | None,
    evaluated: Collection[int],
    kept: Collection[int],
    folder: Path,
) -> tuple[Repetition, Repetition]:
    """Repeat steps on one rank, in this process.

    Args:
        settings: settings of the run on one rank.
        steps: the steps.
        base: checkpoint before the first step; None for the start of the run.
        saved: any checkpoint of the run, to check that the data are the same; None if there is none.
        evaluated: steps after which the loss on held-out data is measured.
        kept: numbers of completed steps whose state is kept.
        folder: empty folder for temporary files.

    Returns:
        The steps in the run's dtype, and with another rounding: in float64 for float32, and otherwise with each
        operation changed by one rounding error.

    Raises:
        ShardwiseError: the settings, the data or the memory do not allow it; see ``open_session``.
    """
    with open_ranks(settings.device, timeout=settings.timeout) as ranks:
        session = open_session(settings, ranks)
        agree(lambda: check_dropout(session), group=session.ranks.control)
        if saved is not None:
            check_belongs(session, saved)
        with session.shortage.explained():
            session.task.method.before(session)
            own = _steps(session, session.trainer, StepHooks(session.routing), base, steps, evaluated, kept)
            with twin_of(session, folder, steps=len(steps)) as (twin, hooks):
                other = _steps(session, twin, hooks, base, steps, evaluated, kept)
    return own, other


def check_dropout(session: Session) -> None:
    """Raise ConfigError if two layouts of the run drop other elements."""
    if session.settings.training.rng == "per_rank" and draws_dropout(session):
        raise ConfigError("training.rng is per_rank, so each layout drops other elements; use --training.rng global")


def alone(session: Session, dtype: str | None = None) -> tuple[Trainer, StepRouting | None]:
    """Build the run's initial model on this rank alone, with its trainer, in another dtype if one is given.

    Returns:
        The trainer, and the replay of the routing that the settings name, if any.
    """
    single = next((group for group in session.topology.groups() if group.size() == 1), None)
    if single is None:
        raise ConfigError("no axis of the run has one rank; leave out one of tp, pp, cp, ep and data-parallel ranks")
    groups = Groups.alone(single)
    training = session.settings.training
    if dtype is not None:
        training = dataclasses.replace(training, dtype=dtype)  # type: ignore[arg-type]
    settings = dataclasses.replace(session.settings, training=training)
    torch.default_generator.manual_seed(training.seed)
    model = session.task.source.build(settings, session.data, groups=groups, device=session.ranks.device)
    trainer = Trainer(
        settings, model, groups, session.task.method.objective(session.data, groups, session.ranks.device)
    )
    return trainer, replay_of(settings, model)


def other_rounding(session: Session) -> tuple[str | None, int | None]:
    """Return the dtype and the seed of ``perturb`` that give a run another rounding."""
    return ("float64", None) if session.settings.training.dtype == "float32" else (None, 1)


class RecordedSteps(StepHooks):
    """Hooks of steps that ``recorder`` records."""

    def __init__(self, recorder: Recorder, routing: StepRouting | None = None) -> None:
        super().__init__(routing)
        self._recorder = recorder

    def gradients(self, parts: Parts) -> None:
        self._recorder.gradients(parts())

    def clipped(self, parts: Parts) -> None:
        self._recorder.clipped(parts())

    def updated(self, parts: Parts) -> None:
        self._recorder.updated(parts())


@contextmanager
def twin_of(session: Session, folder: Path, *, steps: int) -> Iterator[tuple[Trainer, StepHooks]]:
    """Build the run's model once more on this rank alone, with another rounding in the block."""
    dtype, perturb = other_rounding(session)
    trainer, routing = alone(session, dtype)
    if perturb is None:
        yield trainer, StepHooks(routing)
        return
    recorder = Recorder(
        trainer.model,
        folder,
        steps=steps,
        axes=ONE_RANK,
        perturb=perturb,
        world_size=1,
        remedy="set TMPDIR to a folder with more room, or take --no-rerun",
    )
    yield trainer, RecordedSteps(recorder, routing)
    recorder.close()


def _steps(
    session: Session,
    trainer: Trainer,
    hooks: StepHooks,
    base: Path | None,
    steps: range,
    evaluated: Collection[int],
    kept: Collection[int],
) -> Repetition:
    if base is not None:
        load_state_(trainer, base, steps.start, group=session.ranks.control)
    found = Repetition(trainer.settings.training.dtype)
    for step in steps:
        result = trainer.train_step(step, session.loader, hooks)
        reported, others = metrics_of(session, result)
        found.rows[step] = reported | others
        if step in evaluated:
            found.rows[step] |= trainer.evaluate(session.held_out_after(step + 1))
        if step + 1 in kept:
            trainer.wait_for_weights()
            found.states[step + 1] = {
                name: shard.data.detach().cpu().clone() for name, shard in state_of(trainer).items()
            }
    return found
