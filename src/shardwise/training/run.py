"""A whole run on one rank: resume, train, measure, save, sample."""

from __future__ import annotations

import json
import math
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from shardwise.collectives.accounting import CollectiveCounter
from shardwise.collectives.agreement import agree
from shardwise.collectives.primitives import validated_calls
from shardwise.errors import ConfigError, DivergenceError
from shardwise.kernels.host_memory import keep_freed_memory
from shardwise.training.metrics import MetricsWriter
from shardwise.training.out_folder import hold_folder
from shardwise.training.pictures import draw_loss
from shardwise.training.progress import Progress
from shardwise.training.ranks import open_ranks
from shardwise.training.references import compressed_bits_per_byte
from shardwise.training.sample import sample_text
from shardwise.training.saving import save_run, start_or_resume
from shardwise.training.session import Session, gather_texts, open_session
from shardwise.training.settings import Settings

_SAMPLE_TOKENS = 200


@dataclass(frozen=True)
class Outcome:
    """What a run came to; the same on every rank.

    Attributes:
        first_loss: of the first step that this process did, in nats per token; None if there was none to do.
        last_loss: of the last step; None likewise.
        held_out_bits_per_byte: at the end.
        seconds: spent in training steps.
        collectives_per_step: collectives that a rank launches in a step.
        bytes_per_step: bytes that a rank contributes to them.
        checkpoint: the last one.
        references: bits per byte of general-purpose compressors on the same held-out text, by name.
        notes: what could not be done, one line each.
    """

    first_loss: float | None
    last_loss: float | None
    held_out_bits_per_byte: float
    seconds: float
    collectives_per_step: int
    bytes_per_step: int
    checkpoint: Path
    references: dict[str, float]
    notes: tuple[str, ...]


def run(settings: Settings) -> None:
    """Train as ``settings`` say; every rank calls, and ends with the same error if one cannot go on."""
    with open_ranks(settings.device, timeout=settings.timeout) as ranks, hold_folder(Path(settings.out), ranks):
        settings.check_world(ranks.world_size)
        texts = gather_texts(settings, ranks)
        session = open_session(settings, ranks, texts)
        if ranks.is_first:
            print(banner(session))
        outcome = train(session)
        if ranks.is_first:
            print(summary(session, outcome))


def banner(session: Session) -> str:
    """What is about to be trained, on what and how, in a few lines."""
    texts, settings, topology = session.texts, session.settings, session.topology
    size = f"{session.num_parameters / 1e6:.1f} M parameters"
    tp, pp, dp = topology.size("tp"), topology.size("pp"), topology.size("dp")
    schedule = settings.parallel.pipeline_schedule
    chunks = settings.parallel.virtual_stages
    stages = "" if pp == 1 else f"{pp} stages" + (f" of {chunks} chunks" if chunks > 1 else "") + f" ({schedule}), "
    return (
        f"text   {texts.corpus.name}, sha256 {texts.corpus.sha256[:12]}\n"
        f"model  {settings.model_name}, {size}, {settings.training.dtype}, "
        f"vocabulary {texts.tokenizer.vocab_size:,}\n"
        f"ranks  {session.ranks.world_size} on {session.ranks.device.type}: tensor parallel {tp}, {stages}"
        f"data parallel {dp}"
        + (", sequence parallel" if session.trainer.model.config.sequence_parallel else "")
        + (f", through {session.carrier}" if tp > 1 else "")
    )


def train(session: Session) -> Outcome:
    """Train to the last step; every rank calls.

    Raises:
        DivergenceError: the loss is not a number; the last checkpoint stands.
        ShardwiseError: what else went wrong, on every rank.
    """
    settings, trainer, ranks = session.settings, session.trainer, session.ranks
    if ranks.device.type == "cpu":
        keep_freed_memory()
    agree(lambda: _make_folder(session), group=ranks.control)
    first_step = start_or_resume(session)
    if first_step and ranks.is_first:
        print(f"resumed at step {first_step}")
    bits_per_nat = session.texts.train_tokens.num_tokens / session.texts.train_tokens.num_bytes / math.log(2)
    tokens_per_step = settings.training.global_batch_size * settings.sequence_length
    counter = CollectiveCounter()
    losses: list[float] = []
    spent = 0.0
    checkpoint: Path | None = None
    with ExitStack() as stack:
        metrics = None
        if ranks.is_first:
            metrics = stack.enter_context(
                MetricsWriter(session.out, first_step, tensorboard=settings.training.tensorboard)
            )
        progress = stack.enter_context(Progress(settings.training.steps, first_step, visible=ranks.is_first))
        for step in range(first_step, settings.training.steps):
            started = time.perf_counter()
            is_first = step == first_step
            with (
                ranks.phase(f"at step {step}", limited=True),
                counter if is_first else nullcontext(),
                # What ranks disagree on they do so in their first step.
                validated_calls(session.topology.groups() if is_first else ()),
            ):
                result = trainer.train_step(step, session.loader)
            seconds = time.perf_counter() - started
            spent += seconds
            if not math.isfinite(result.loss):
                raise DivergenceError(
                    f"the loss is {result.loss} at step {step}; lower optimizer.learning-rate "
                    f"({settings.optimizer.learning_rate}) and continue from the last checkpoint"
                )
            losses.append(result.loss)
            values = {
                "loss": result.loss,
                "bits_per_byte": result.loss * bits_per_nat,
                "grad_norm": result.grad_norm,
                "learning_rate": result.learning_rate,
                "tokens_per_second": tokens_per_step / seconds,
            }
            done = step + 1
            last = done == settings.training.steps
            if last or _is_due(done, settings.training.eval_every):
                values["held_out_bits_per_byte"] = _evaluate(session)
            if metrics is not None:
                metrics.write(step, values)
            progress.update(
                loss=result.loss, bits_per_byte=values["bits_per_byte"], tokens_per_second=values["tokens_per_second"]
            )
            if last or _is_due(done, settings.training.save_every):
                with ranks.phase(f"saving step {done}"):
                    checkpoint = save_run(session, done)
        held_out = values["held_out_bits_per_byte"] if losses else _evaluate(session)
        checkpoint = checkpoint or save_run(session, settings.training.steps)
        references = compressed_bits_per_byte(session.texts.held_out.to_bytes())
        with ranks.phase("writing a sample"):
            notes = _leave_files(session, metrics, references)
    return Outcome(
        losses[0] if losses else None,
        losses[-1] if losses else None,
        held_out,
        spent,
        len(counter.launches),
        counter.num_bytes,
        checkpoint,
        references,
        notes,
    )


def _evaluate(session: Session) -> float:
    """Bits per byte of the held-out text; every rank calls."""
    with session.ranks.phase("measuring", limited=True):
        return session.trainer.evaluate(session.windows)


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _make_folder(session: Session) -> None:
    """Make the run's folder and put settings and tokenizer there, so that lack of permission is heard of at once."""
    try:
        session.out.mkdir(parents=True, exist_ok=True)
        if session.ranks.is_first:
            session.texts.tokenizer.save(session.out)
            text = json.dumps(session.settings.to_json(), indent=2)
            (session.out / "settings.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {session.out}: {error.strerror or error}; choose another --out or free it"
        ) from error


def _leave_files(session: Session, metrics: MetricsWriter | None, references: dict[str, float]) -> tuple[str, ...]:
    """Sample and picture; every rank calls."""
    notes = []
    whole = session.settings.parallel.pp == 1
    text = sample_text(session, max_new_tokens=_SAMPLE_TOKENS) if whole else ""
    if metrics is None:
        return ()
    if whole:
        (session.out / "sample.txt").write_text(text + "\n", encoding="utf-8")
    else:
        hint = "" if session.base else f"; read one with: shardwise generate {session.out}"
        notes.append(f"no sample from a model in pipeline stages{hint}")
    note = draw_loss(metrics.rows, session.out / "loss.png", references=references, title=session.texts.corpus.name)
    return tuple(notes if note is None else [*notes, note])


def summary(session: Session, outcome: Outcome) -> str:
    """What came of it, and where it is."""
    compared = ", ".join(f"{name} {value:.3f}" for name, value in outcome.references.items())
    lines = [
        f"held-out text: {outcome.held_out_bits_per_byte:.3f} bits per byte" + (f" ({compared})" if compared else "")
    ]
    if outcome.first_loss is not None and outcome.last_loss is not None:
        lines.append(f"loss {outcome.first_loss:.3f} -> {outcome.last_loss:.3f} in {outcome.seconds:.0f} s")
    lines.append(f"files: {session.out} (checkpoint {outcome.checkpoint.name})")
    return "\n".join([*lines, *outcome.notes])
