"""A whole run on one rank: resume, train, evaluate, save, sample."""

import json
import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwise.core.atomic_files import cannot_write, write_atomically
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.agreement import agree
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.context import validated_calls
from shardwise.core.errors import REPORT, DivergenceError, UnwritableError
from shardwise.core.json_text import read_json
from shardwise.kernels.host_memory import keep_freed_memory
from shardwise.run.banner import banner
from shardwise.run.checkpoint_writer import CheckpointWriter, finish, open_run
from shardwise.run.checkpoints import find_newest, start_or_resume
from shardwise.run.metrics import SAMPLES, MetricsWriter, Progress
from shardwise.run.processes.stopping import Interrupted, Postponed, signals_postponed
from shardwise.run.session import metrics_of, open_session
from shardwise.run.settings import RunSettings
from shardwise.run.tasks import task_of
from shardwise.run.tasks.task import Outcome, Session, Task
from shardwise.run.tracking import Tracking
from shardwise.run.utilisation import peak_memory, profiled
from shardwise.storage.checkpoint.saving import SaveProgress
from shardwise.training.hooks import StepHooks


def run(settings: RunSettings, make_task: Callable[[Any], Task] = task_of) -> Outcome:
    """Execute a whole run; every rank calls. If one rank fails, every rank raises the same error."""
    with open_run(settings) as ranks:
        agree(lambda: find_newest(settings), group=ranks.control)
        session = open_session(settings, ranks, make_task)
        # A fault that it finds in the first layer is an error.
        agree(lambda: print(_first_lines(session), flush=True) if ranks.is_first else None, group=ranks.control)
        with session.shortage.explained():
            session.task.method.before(session)
        with Tracking(settings.trackers if ranks.is_first else (), session.out / "trackers") as tracking:
            outcome = train(session, tracking)
            session.task.write(session)
            outcome = finish(session, outcome)
            if ranks.is_first:
                tracking.report = session.task.report(session, outcome)
                print(tracking.report, flush=True)
        return outcome


def _first_lines(session: Session) -> str:
    return f"{banner(session)}\n{session.utilisation.line()}"


def train(session: Session, tracking: Tracking | None = None) -> Outcome:
    """Train to the last step and save; every rank calls."""
    if session.ranks.device.type == "cpu":
        keep_freed_memory()
    first_step, checkpoint = start_or_resume(session)
    session.settings.profile.check_steps(first_step, session.settings.training.steps)
    if (routing := session.routing) is not None:
        steps = range(first_step, session.settings.training.steps)

        def check_steps() -> None:
            if _recorded_there(session):
                routing.resume(first_step)
            routing.check_steps(steps)

        agree(check_steps, group=session.ranks.control)
    agree(lambda: _write_settings(session), group=session.ranks.control)
    if checkpoint is not None and session.ranks.is_first:
        print(f"resumed at step {first_step}", flush=True)
    with signals_postponed() as signals, session.shortage.explained():
        return _Training(session, first_step, CheckpointWriter(session, checkpoint), signals, tracking).run()


@dataclass
class _Training(StepHooks):
    """The training loop of a run, with its evaluations, saves and end."""

    session: Session
    first_step: int
    saves: CheckpointWriter
    signals: Postponed
    tracking: Tracking | None
    _saved_at: float = 0.0
    _counter: CollectiveCounter = field(default_factory=CollectiveCounter)
    _counting: ExitStack = field(default_factory=ExitStack)
    _losses: list[float] = field(default_factory=list)
    _spent: float = 0.0
    _started: float = 0.0
    _held_out: dict[str, float] | None = None
    _peak_memory: float = 0.0
    _unwritten: UnwritableError | None = None

    def __post_init__(self) -> None:
        super().__init__(self.session.routing)

    def run(self) -> Outcome:
        """Run all remaining steps."""
        session, settings = self.session, self.session.settings.training
        self._saved_at = time.monotonic()
        try:
            with ExitStack() as stack:
                metrics = agree(
                    lambda: MetricsWriter(session.out, self.first_step) if session.ranks.is_first else None,
                    group=session.ranks.control,
                )
                if metrics is not None:
                    stack.enter_context(metrics)
                    self._start_tracking()
                progress = stack.enter_context(
                    Progress(settings.steps, self.first_step, visible=session.ranks.is_first)
                )
                end_of_step = stack.enter_context(profiled(session.settings.profile, session.out, session.ranks))
                for step in range(self.first_step, settings.steps):
                    self._step(step, metrics, progress)
                    end_of_step()
                self._check_metrics()
            if self._held_out is None:  # All steps were done before.
                self._held_out = self._evaluate(settings.steps)
        except DivergenceError as error:
            # Every rank has the same error, so the ranks can still publish the checkpoint in progress.
            self.saves.complete_if_possible()
            raise DivergenceError(f"{error}; {self._after_divergence()}") from error
        finally:
            self.saves.abandon()
        assert self.saves.newest is not None
        return Outcome(
            self._losses[0] if self._losses else None,
            self._losses[-1] if self._losses else None,
            self._held_out,
            self._spent,
            len(self._counter.launches),
            self._counter.num_bytes,
            self.saves.newest,
        )

    def _start_tracking(self) -> None:
        """Start the trackers, on the rank that writes metrics, when the file of metrics is there."""
        if self.tracking is None:
            return
        session, settings = self.session, self.session.settings
        facts = settings, session.trainer.model.config, session.ranks.device.type, session.ranks.world_size
        self.tracking.start(
            session.out.absolute().name,
            settings.to_json(),
            metrics=session.out / "metrics.jsonl",
            first_step=self.first_step,
            plan=pickle.dumps(facts),
        )

    def _step(self, step: int, metrics: MetricsWriter | None, progress: Progress) -> None:
        session, settings = self.session, self.session.settings.training
        self._started = time.perf_counter()
        is_first = step == self.first_step
        with (
            session.ranks.phase(f"at step {step}", limited=True),
            self._counting,
            # Ranks that disagree are detected in the first step.
            validated_calls(session.topology.groups() if is_first else ()),
        ):
            if is_first:
                self._counting.enter_context(self._counter)
            result = session.trainer.train_step(step, session.loader, self)
        seconds = time.perf_counter() - self._started
        self._spent += seconds
        self.signals.step_took(seconds)
        if math.isfinite(result.loss):
            self._losses.append(result.loss)
        reported, others = metrics_of(session, result)
        loader, computed = session.loader, session.loader.computed(step)
        values = reported | others | {"tokens_per_second": loader.num_tokens(step) / seconds}
        values["computed_tokens_per_second"] = int(computed.sum()) / seconds
        values["learned_tokens_per_second"] = loader.num_learned(step) / seconds
        values |= session.utilisation.metrics(computed, seconds) | {
            peak_memory(session.ranks.device)[0]: self._peak_memory
        }
        done = step + 1
        if _is_due(done, settings.doctor_every):
            session.trainer.check_copies(done)
        last = done == settings.steps
        signum = self._agreed() if last else 0
        if (last or _is_due(done, settings.evaluation_interval)) and not signum:
            self._held_out = self._evaluate(done)
            values |= self._held_out | {SAMPLES: len(session.held_out_after(done))}
        if metrics is not None:
            # JSON has no infinity or NaN, which the metrics of an overflowed step may have.
            try:
                metrics.write(step, {name: value for name, value in values.items() if math.isfinite(value)})
            except UnwritableError as error:
                self._unwritten = error
            if self.tracking is not None:
                self.tracking.show_notes()
        progress.update(reported, values)
        if last:
            self._save(done, signum)

    def before_update(self, step: int, rank_reports: Sequence[float]) -> None:
        """Save and stop if due.

        The saved state is that after ``step`` steps. The next step's loss and gradient, computed from it, are finite,
        so its weights are finite too.
        """
        self._counting.close()
        signum, due, progress = int(rank_reports[0]), bool(rank_reports[1]), SaveProgress(int(rank_reports[2]))
        self._peak_memory = rank_reports[3]
        if rank_reports[4]:
            self._check_metrics()
        with self._outside_the_step():
            self.saves.on_progress(progress)
        if step > self.first_step and (due or signum or _is_due(step, self.session.settings.training.save_every)):
            self._save(step, signum)
        elif signum:
            self._exit_for_signal(signum)

    def _save(self, done: int, signum: int) -> None:
        """Save, then stop if a signal came, including one during the save."""
        settings = self.session.settings.training
        # The run ends: a background thread would gain nothing.
        at_once = not settings.asynchronous_saves or bool(signum) or done == settings.steps
        with self._outside_the_step(), self.session.ranks.phase(f"saving step {done}"):
            self.saves.save(done, at_once=at_once)
        self._saved_at = time.monotonic()
        if signum := signum or self._agreed():
            self._exit_for_signal(signum)

    @contextmanager
    def _outside_the_step(self) -> Iterator[None]:
        """Exclude the block from the time of the step and from its time limit."""
        begun = time.perf_counter()
        with self.signals.unhurried():
            yield
        self._started += time.perf_counter() - begun

    def _exit_for_signal(self, signum: int) -> NoReturn:
        with self._outside_the_step():
            self.saves.complete()
        self._check_metrics()
        self.signals.agreed = True
        raise Interrupted(signum, agreed=True)

    def _check_metrics(self) -> None:
        """Raise the error of the rank that could not write the metrics, on every rank, when no save is in progress."""

        def check() -> None:
            if self._unwritten is not None:
                raise self._unwritten

        try:
            agree(check, group=self.session.ranks.control)
        except UnwritableError:
            self.saves.complete_if_possible()
            raise

    def rank_reports(self) -> tuple[float, ...]:
        """Return this rank's part of the step's all-reduce: signal (0 for none), whether a timed save is due (on the
        first rank), progress of the write, peak memory, and whether metrics could not be written.
        """
        ranks, minutes = self.session.ranks, self.session.settings.training.save_minutes
        due = ranks.is_first and minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes
        memory = float(peak_memory(ranks.device)[1])
        lacks_metrics = self._unwritten is not None
        return float(self.signals.signum), float(due), float(self.saves.progress), memory, float(lacks_metrics)

    def _agreed(self) -> int:
        """Return the signal that any rank received, by a separate collective; 0 for none."""
        ranks = self.session.ranks
        signum = torch.tensor(self.rank_reports()[:1], dtype=torch.float32, device=ranks.device)
        return int(all_reduce(signum, group=ranks.world, op=dist.ReduceOp.MAX, may_overwrite=True))

    def _evaluate(self, done: int) -> dict[str, float]:
        with self.signals.unhurried(), self.session.ranks.phase("measuring", limited=True):
            values = self.session.trainer.evaluate(self.session.held_out_after(done))
        for value in values.values():
            if not math.isfinite(value):
                raise DivergenceError(f"the loss on held-out text is {value} after {done} steps")
        return values

    def _after_divergence(self) -> str:
        if not self._losses and self.first_step == 0:
            # No weight was updated, so the learning rate is not the cause.
            return (
                "no step was made before; the weights that the run begins with are broken, or too large "
                f"for --training.dtype; {REPORT.format('good weights fail in float32 too')}"
            )
        rate = f"a lower optimizer.learning-rate than {self.session.settings.optimizer.learning_rate:g}"
        if self.saves.newest is None:
            return f"no checkpoint was saved before; start anew with {rate}"
        return f"the last good checkpoint is {self.saves.newest}; go on from it with --resume auto and {rate}"


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _recorded_there(session: Session) -> bool:
    """True if this run goes on or starts anew in a folder whose settings name the same folder of the routing."""
    if session.settings.resume == "never":
        return False
    try:
        recorded = read_json(session.out / "settings.json").get("record_routing")
    except (OSError, ValueError):
        return False
    return recorded is not None and recorded == session.settings.record_routing


def _write_settings(session: Session) -> None:
    """Write settings and tokenizer into the folder, after the check that its content belongs to this run."""
    try:
        session.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(session.out, error.strerror or str(error), "--out") from error
    if session.ranks.is_first:
        session.data.tokenizer.save(session.out)
        text = json.dumps(session.settings.to_json(), indent=2) + "\n"
        write_atomically(session.out / "settings.json", lambda file: file.write(text.encode()))
