"""Diagnose a run of Shardwise: the same steps on one rank and at the layout that was asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from shardwise.core.atomic_files import check_folder
from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError, ParityError
from shardwise.core.topology import Groups
from shardwise.doctor.diagnosis import Diagnosis, diagnose
from shardwise.doctor.places import Axes
from shardwise.doctor.recorder import Recorder
from shardwise.doctor.recording import check_replaceable
from shardwise.doctor.repeating import ONE_RANK, RecordedSteps, alone, check_dropout, other_rounding
from shardwise.run.checkpoint_writer import open_run
from shardwise.run.session import open_session
from shardwise.run.settings import RunSettings
from shardwise.run.tasks.task import Session
from shardwise.training.hooks import StepRouting
from shardwise.training.trainer import Trainer

STEPS = 2
_RECORDINGS = ("one", "rounding", "parallel")


def diagnose_run(
    settings: RunSettings,
    *,
    steps: int = STEPS,
    report: Callable[[Diagnosis], object] = lambda diagnosis: None,
) -> None:
    """Train a few steps at the settings' layout and on one rank, and compare them; every rank calls.

    The first rank trains the model on one rank twice: in the run's dtype, and with another rounding, in float64 for
    float32, and otherwise with each operation changed by one rounding error. ``doctor`` in the run's folder gets the
    recordings ``one``, ``rounding`` and ``parallel``.

    Raises:
        ParityError: a module is wrong; on every rank, after the report.
        ConfigError: the layout has one rank, layouts drop other elements, the settings do not fit the ranks, another
            process uses ``out``, or the folder of a recording has something else.
    """
    folder = Path(settings.out) / "doctor"
    with open_run(settings) as ranks:
        if ranks.world_size == 1:
            raise ConfigError("the doctor compares several ranks with one, and this run has one; give --nproc, --tp...")
        if settings.training.steps < steps:
            raise ConfigError(f"training.steps is {settings.training.steps}, and {steps} steps are recorded")
        earlier = [folder / name for name in _RECORDINGS]

        def check_earlier() -> None:
            check_folder(folder)
            for each in earlier if ranks.is_first else ():
                check_replaceable(each)

        agree(check_earlier, group=ranks.control)
        session = open_session(settings, ranks)
        # The adapters of one stage may have dropout, and those of another none.
        agree(lambda: check_dropout(session), group=ranks.control)
        if ranks.is_first:
            for each in earlier:
                shutil.rmtree(each, ignore_errors=True)
        with session.shortage.explained():
            session.task.method.before(session)
            agree(lambda: _record_alone(session, folder, steps), group=ranks.control)
            axes = Groups.of(session.topology)
            _record(session.trainer, session.routing, session, folder / "parallel", steps, axes)
        # The recordings of all ranks are complete.
        agree(lambda: None, group=ranks.control)

        def judge() -> None:
            if not ranks.is_first:
                return
            diagnosis = diagnose(folder / "one", folder / "parallel", folder / "rounding")
            report(diagnosis)
            if diagnosis.first is not None:
                raise ParityError(f"not equal to one rank: {diagnosis.first.line()}")

        agree(judge, group=ranks.control)


def _record_alone(session: Session, folder: Path, steps: int) -> None:
    if not session.ranks.is_first:
        return
    for name, dtype, perturb in (("one", None, None), ("rounding", *other_rounding(session))):
        _record(*alone(session, dtype), session, folder / name, steps, ONE_RANK, perturb=perturb, world_size=1)


def _record(
    trainer: Trainer,
    routing: StepRouting | None,
    session: Session,
    folder: Path,
    steps: int,
    axes: Axes | Groups,
    *,
    perturb: int | None = None,
    world_size: int | None = None,
) -> None:
    recorder = Recorder(
        trainer.model,
        folder,
        steps=steps,
        axes=axes,
        perturb=perturb,
        world_size=world_size,
        remedy="record fewer steps (--recorded-steps), take a smaller model, or choose another --out",
    )
    hooks = RecordedSteps(recorder, routing)
    for step in range(steps):
        trainer.train_step(step, session.loader, hooks)
    trainer.wait_for_weights()
    recorder.close()
