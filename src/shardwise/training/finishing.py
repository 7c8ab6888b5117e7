"""What a run leaves beside its checkpoints: a sample, a picture, a comparison. Nothing here can fail the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from shardwise.training.metrics import read_metrics
from shardwise.training.outcome import Outcome
from shardwise.training.pictures import draw_loss
from shardwise.training.references import compressed_bits_per_byte
from shardwise.training.sample import sample_text
from shardwise.training.session import Session

_SAMPLE_TOKENS = 200

T = TypeVar("T")


def finish(session: Session, outcome: Outcome) -> Outcome:
    """Compare, draw and sample, once everything that matters is on the disk; every rank calls.

    What cannot be done is a note. The sample comes last, since ranks make it together: where one of them fails alone it
    leaves, and the others hear of that as of any rank that is gone.

    Returns:
        ``outcome`` with references and notes.
    """
    notes = list(outcome.notes)

    def attempt(what: str, function: Callable[[], T], otherwise: T) -> T:
        # A module may even exit while it is imported. KeyboardInterrupt is the user's.
        try:
            return function()
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split())
            notes.append(f"no {what}: {type(error).__name__}{': ' if reason else ''}{reason}")
            return otherwise

    held_out = session.texts.held_out
    references = attempt("comparison", lambda: compressed_bits_per_byte(held_out.to_bytes()), dict[str, float]())
    if session.ranks.is_first:
        note = attempt("picture", lambda: _draw(session, references), None)
        notes += [] if note is None else [note]
    if session.settings.parallel.pp == 1:
        attempt("sample", lambda: _leave_sample(session), None)
    else:
        hint = "" if session.base else f"; read one with: shardwise generate {session.out}"
        notes.append(f"no sample from a model in pipeline stages{hint}")
    return dataclasses.replace(outcome, references=references, notes=tuple(notes))


def _draw(session: Session, references: dict[str, float]) -> str | None:
    rows = read_metrics(session.out / "metrics.jsonl")
    return draw_loss(rows, session.out / "loss.png", references=references, title=session.texts.corpus.name)


def _leave_sample(session: Session) -> None:
    with session.ranks.phase("writing a sample"):
        text = sample_text(session, max_new_tokens=_SAMPLE_TOKENS)
    if session.ranks.is_first:
        (session.out / "sample.txt").write_text(text + "\n", encoding="utf-8")
