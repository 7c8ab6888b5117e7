"""The files that a run leaves next to its checkpoints: a comparison, a picture, a sample.

Nothing here can fail the run.
"""

from __future__ import annotations

import dataclasses
import lzma
import zlib
from collections.abc import Callable

from shardwise.models.generation.generation import generate
from shardwise.models.generation.sampling import Sampling
from shardwise.models.gpt import GPT
from shardwise.run.metrics import read_metrics
from shardwise.run.pictures import draw_loss
from shardwise.run.tasks.recipe import Outcome, Session

_SAMPLE_TOKENS = 200
_SAMPLING = Sampling(temperature=0.7, top_k=40)
# A compressor's time grows with the text; beyond this, the comparison is not worth the wait.
_MOST_BYTES = 16 << 20


def finish(session: Session, outcome: Outcome) -> Outcome:
    """Compare, draw and sample, once everything that matters is on the disk; every rank calls.

    What cannot be done is a note. The sample comes last, since ranks make it together: where one of them fails alone it
    leaves, and the others hear of that as of any rank that is gone.

    Returns:
        ``outcome`` with references and notes.
    """
    notes = list(outcome.notes)
    references: dict[str, float] = {}

    def attempt(what: str, function: Callable[[], object]) -> None:
        # A module may even exit while it is imported. KeyboardInterrupt is the user's.
        try:
            function()
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split())
            notes.append(f"no {what}: {type(error).__name__}{': ' if reason else ''}{reason}")

    def draw() -> None:
        rows, title = read_metrics(session.out / "metrics.jsonl"), session.texts.name
        of, path = session.trainer.objective, session.out / "loss.png"
        if note := draw_loss(rows, path, references=references, title=title, curves=of.curves, unit=of.unit):
            notes.append(note)

    attempt("comparison", lambda: references.update(compressed_bits_per_byte(session.texts.held_out_bytes)))
    if session.ranks.is_first:
        attempt("picture", draw)
    if not session.recipe.leaves_sample:
        return dataclasses.replace(outcome, references=references, notes=tuple(notes))
    if session.settings.parallel.pp == 1:
        attempt("sample", lambda: _leave_sample(session))
    else:
        hint = "" if session.recipe.identity else f"; read one with: shardwise generate {session.out}"
        notes.append(f"no sample from a model in pipeline stages{hint}")
    return dataclasses.replace(outcome, references=references, notes=tuple(notes))


def compressed_bits_per_byte(content: bytes) -> dict[str, float]:
    """Bits per byte of ``zlib -9`` and ``lzma`` (preset 9) on ``content``; nothing for a very large one."""
    if not content or len(content) > _MOST_BYTES:
        return {}
    compressed = {"zlib -9": zlib.compress(content, 9), "lzma": lzma.compress(content, preset=9)}
    return {name: 8 * len(each) / len(content) for name, each in compressed.items()}


def _leave_sample(session: Session) -> None:
    """Write what the model, of one stage, begins a new text with; every rank calls."""
    tokenizer, model = session.texts.tokenizer, session.trainer.model
    assert isinstance(model, GPT)
    with session.ranks.phase("writing a sample"):
        new_ids = generate(
            model,
            tokenizer.beginning,
            max_new_tokens=_SAMPLE_TOKENS,
            sampling=_SAMPLING,
            seed=session.settings.training.seed,
            eos_id=tokenizer.eos_id,
        )
    if session.ranks.is_first:
        (session.out / "sample.txt").write_text(tokenizer.decode(new_ids) + "\n", encoding="utf-8")
