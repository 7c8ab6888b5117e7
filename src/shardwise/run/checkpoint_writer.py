"""The checkpoints of a run, written at once or by a thread while it trains on, and the files next to them.

These are a comparison, a picture and a sample, none of which can fail the run. One run at a time has its folder, and
clears it of what a killed one left.
"""

import dataclasses
import lzma
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ShardwiseError
from shardwise.core.files import FolderLock
from shardwise.core.processes import clear_leftovers
from shardwise.models.generation.generation import generate
from shardwise.models.generation.sampling import Sampling
from shardwise.models.gpt import GPT
from shardwise.run.checkpoints import begin_save
from shardwise.run.metrics import draw_loss, read_metrics
from shardwise.run.processes.ranks import Ranks
from shardwise.run.tasks.task import Outcome, Session
from shardwise.storage.checkpoint import PendingSave, Snapshot
from shardwise.storage.checkpoint.folder import clear_unfinished
from shardwise.storage.checkpoint.saving import SaveProgress


class CheckpointWriter:
    """The checkpoints of a run, of which at most one is being written.

    The collective part of a save runs in the thread that trains. Each rank puts its ``progress`` of writing into the
    all-reduce of every step, and calls ``on_progress`` with the largest.

    Args:
        session: the run.
        newest: its newest checkpoint; None if there is none.

    Attributes:
        newest: published last.
    """

    def __init__(self, session: Session, newest: Path | None) -> None:
        self.newest = newest
        self._session = session
        self._pending: PendingSave | None = None
        self._snapshot = Snapshot()
        self._notes: set[str] = set()

    @property
    def progress(self) -> SaveProgress:
        """Of this rank's writing."""
        return SaveProgress.WRITTEN if self._pending is None else self._pending.progress

    def on_progress(self, progress: SaveProgress) -> None:
        """Publish what is written, once every rank has, or raise what kept a rank from it; every rank calls.

        Raises:
            CheckpointError: the disk is full, or what else a rank's thread found.
            DivergenceError: what was to be saved is not finite.
        """
        if self._pending is None or progress == SaveProgress.WRITING:
            return
        if progress == SaveProgress.FAILED and self._pending.progress != SaveProgress.FAILED:
            # Another rank has the reason; this one need not write the rest.
            self._pending.abandon()
        self.complete()

    def save(self, step: int, *, at_once: bool) -> None:
        """Save the run after ``step`` steps, once the save before is complete; every rank calls.

        Args:
            step: steps done.
            at_once: publish it before this returns. Otherwise ``on_progress`` does, or ``complete``.

        Raises:
            CheckpointError, DivergenceError: see ``on_progress``.
        """
        self.complete()
        self._pending = begin_save(self._session, step, None if at_once else self._snapshot)
        if at_once:
            self.complete()

    def complete(self) -> None:
        """Wait for what is being written, and publish it; every rank calls.

        Raises:
            CheckpointError, DivergenceError: see ``on_progress``.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            with self._session.ranks.phase(f"saving step {pending.step}"):
                self.newest = pending.complete()
        except BaseException:
            pending.abandon()
            raise
        if pending.note and pending.note not in self._notes and self._session.ranks.is_first:
            self._notes.add(pending.note)
            print(f"note   {pending.note}", flush=True)

    def complete_if_possible(self) -> None:
        """``complete`` for a run that ends with an error of its own, of which every rank has heard."""
        with suppress(ShardwiseError):
            self.complete()

    def abandon(self) -> None:
        """Stop writing, where the ranks can no longer agree on anything; for this rank alone."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None


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
        rows, title = read_metrics(session.out / "metrics.jsonl"), session.data.name
        of, path = session.trainer.objective, session.out / "loss.png"
        if note := draw_loss(rows, path, references=references, title=title, curves=of.curves, unit=of.unit):
            notes.append(note)

    attempt("comparison", lambda: references.update(compressed_bits_per_byte(session.data.held_out_bytes)))
    if session.ranks.is_first:
        attempt("picture", draw)
    if session.data.labels is not None:
        return dataclasses.replace(outcome, references=references, notes=tuple(notes))
    if session.settings.parallel.pp == 1:
        attempt("sample", lambda: _leave_sample(session))
    else:
        hint = "" if session.task.identity else f"; read one with: shardwise generate {session.out}"
        notes.append(f"no sample from a model in pipeline stages{hint}")
    return dataclasses.replace(outcome, references=references, notes=tuple(notes))


def compressed_bits_per_byte(content: bytes) -> dict[str, float]:
    """Bits per byte of ``zlib -9`` and ``lzma`` (preset 9) on ``content``; nothing for a very large one."""
    if not content or len(content) > _MOST_BYTES:
        return {}
    compressed = {"zlib -9": zlib.compress(content, 9), "lzma": lzma.compress(content, preset=9)}
    return {name: 8 * len(each) / len(content) for name, each in compressed.items()}


def _leave_sample(session: Session) -> None:
    """Write the beginning of a new text by the model, of one stage; every rank calls."""
    tokenizer, model = session.data.tokenizer, session.trainer.model
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


# Of ``files.write_atomically``, of adapters, and of exports.
_UNFINISHED = re.compile(r"\..+\.tmp|adapter_\w+\.\w+\.new|export\.partial|\.export\.partial\..*")


@contextmanager
def lock_folder(out: Path, ranks: Ranks) -> Iterator[None]:
    """Hold ``out`` for the length of the block; every rank calls, and the first one holds it.

    What a killed run left there unfinished is removed. If nothing is written in the block, and the folder was made for
    it, it is gone afterwards.

    Raises:
        ConfigError: another run is there, which is named, or the folder cannot be written to; on every rank.
    """
    with ExitStack() as stack:
        agree(lambda: stack.enter_context(_cleared(out)) if ranks.is_first else None, group=ranks.world)
        yield


def _cleared(out: Path) -> FolderLock:
    lock = FolderLock(out)
    clear_leftovers()
    if lock.left_by is not None:
        print(f"note   {lock.left_by} was in {out} and was killed; what it left unfinished is removed", flush=True)
    # What cannot be removed is in nobody's way.
    with suppress(OSError):
        for path in [path for path in out.iterdir() if _UNFINISHED.fullmatch(path.name)]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        clear_unfinished(out / "checkpoints")
    return lock
