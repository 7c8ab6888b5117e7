"""Write the checkpoints of a run, synchronously or in a background thread, and the files next to them.

These files are a comparison, a picture and a sample; a failure to write them never fails the run. A lock ensures that
only one run at a time uses the folder. That run removes the partial files of a killed run.
"""

import dataclasses
import lzma
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardwise.core.atomic_files import write_atomically
from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.folder_lock import FolderLock
from shardwise.core.processes import clear_leftovers
from shardwise.models.generation.cache import CausalModel
from shardwise.models.generation.generation import generate
from shardwise.models.generation.sampling import Sampling
from shardwise.run.checkpoints import begin_save
from shardwise.run.metrics import read_metrics
from shardwise.run.out_of_memory import memory_for_copies
from shardwise.run.pictures import draw_runs
from shardwise.run.processes.ranks import Ranks, open_ranks
from shardwise.run.settings import RunSettings
from shardwise.run.tasks.task import Outcome, Session
from shardwise.storage.checkpoint import PendingSave, Snapshot
from shardwise.storage.checkpoint.folder import clear_unfinished
from shardwise.storage.checkpoint.saving import SaveProgress


class CheckpointWriter:
    """Writes the checkpoints of a run, at most one at a time.

    The collective part of a save runs in the training thread. Each rank adds the ``progress`` of its write to the
    all-reduce of every step and calls ``on_progress`` with the maximum over ranks.
    """

    def __init__(self, session: Session, newest: Path | None) -> None:
        self.newest = newest
        self._session = session
        self._pending: PendingSave | None = None
        self._snapshot = Snapshot(memory_for_copies)
        self._notes: set[str] = set()

    @property
    def progress(self) -> SaveProgress:
        """Progress of this rank's write."""
        return SaveProgress.WRITTEN if self._pending is None else self._pending.progress

    def on_progress(self, progress: SaveProgress) -> None:
        """Publish the checkpoint once every rank has written its part; every rank calls."""
        if self._pending is None or progress == SaveProgress.WRITING:
            return
        if progress == SaveProgress.FAILED and self._pending.progress != SaveProgress.FAILED:
            # Another rank failed and raises the reason; this rank need not write the rest.
            self._pending.abandon()
        self.complete()

    def save(self, step: int, *, at_once: bool) -> None:
        """Save the run after ``step`` steps, after the previous save has completed; every rank calls."""
        self.complete()
        self._pending = begin_save(self._session, step, None if at_once else self._snapshot)
        if at_once:
            self.complete()

    def complete(self) -> None:
        """Wait for the write in progress and publish the checkpoint; every rank calls."""
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
        """Like ``complete``, but ignore errors; for a run that ends with an error that every rank has received."""
        with suppress(ShardwiseError):
            self.complete()

    def abandon(self) -> None:
        """Stop writing, on this rank only, when the ranks can no longer communicate."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None


_SAMPLE_TOKENS = 200
_SAMPLING = Sampling(temperature=0.7, top_k=40)
# Maximum size of the text to compare, because the compressors' time grows with it.
_MOST_BYTES = 16 << 20


def finish(session: Session, outcome: Outcome) -> Outcome:
    """Write the comparison, the picture and the sample after the last checkpoint; every rank calls.

    Each failure becomes a note of the outcome. The sample comes last because all ranks generate it together: a rank
    that fails alone exits, and the other ranks detect this as they detect any rank that exits.
    """
    notes = list(outcome.notes)
    references: dict[str, float] = {}

    def attempt(what: str, function: Callable[[], object]) -> None:
        # A module may even call exit while it is imported. KeyboardInterrupt comes from the user and is not caught.
        try:
            function()
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split())
            notes.append(f"no {what}: {type(error).__name__}{': ' if reason else ''}{reason}")

    def draw() -> None:
        runs, of, title = (
            {"": read_metrics(session.out / "metrics.jsonl")},
            session.trainer.objective,
            session.data.name,
        )
        path = session.out / "loss.png"
        try:
            draw_runs(runs, path, title=title, references=references, curves=of.curves, unit=of.unit)
        except ConfigError as error:
            notes.append(str(error))

    attempt("comparison", lambda: references.update(compressed_bits_per_byte(session.data.held_out_bytes)))
    if session.ranks.is_first:
        attempt("picture", draw)
    stages, model = session.trainer.pp_group, session.trainer.model
    if stages is None and not model.splits_context:
        attempt("sample", lambda: _write_sample(session))
    else:
        hint = "" if session.task.identity else f"; read one with: shardwise generate {session.out}"
        what = "a model in pipeline stages" if stages is not None else "context-parallel ranks"
        notes.append(f"no sample from {what}{hint}")
    return dataclasses.replace(outcome, references=references, notes=tuple(notes))


def compressed_bits_per_byte(content: bytes) -> dict[str, float]:
    """Return the bits per byte of ``zlib -9`` and ``lzma`` (preset 9) on ``content``; empty if it is very large."""
    if not content or len(content) > _MOST_BYTES:
        return {}
    compressed = {"zlib -9": zlib.compress(content, 9), "lzma": lzma.compress(content, preset=9)}
    return {name: 8 * len(each) / len(content) for name, each in compressed.items()}


def _write_sample(session: Session) -> None:
    """Generate the beginning of a new text and write it, for a model with one pipeline stage; every rank calls."""
    tokenizer, model = session.data.tokenizer, session.trainer.model
    assert isinstance(model, CausalModel)
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
        text = tokenizer.decode(new_ids) + "\n"
        write_atomically(session.out / "sample.txt", lambda file: file.write(text.encode()))


# Temporary file names of ``files.write_atomically``, of adapters and of exports.
_UNFINISHED = re.compile(r"\..+\.shardwise-file-.+\.tmp|adapter_\w+\.\w+\.new|export\.partial|\.export\.partial\..*")


@contextmanager
def open_run(settings: RunSettings) -> Iterator[Ranks]:
    """Join the other ranks of a run, and lock its folder, for the duration of the block."""
    overlaps = settings.parallel.tp > 1 and not settings.parallel.fsdp
    with (
        open_ranks(settings.device, timeout=settings.timeout, overlaps=overlaps) as ranks,
        lock_folder(Path(settings.out), ranks),
    ):
        yield ranks


@contextmanager
def lock_folder(out: Path, ranks: Ranks) -> Iterator[None]:
    """Lock the folder ``out`` during the block; every rank calls, and the first rank holds the lock.

    Partial files of a killed run are removed. A folder that was created here is removed again if the block writes
    nothing.
    """
    with ExitStack() as stack:
        agree(lambda: stack.enter_context(_cleared(out)) if ranks.is_first else None, group=ranks.world)
        yield


def _cleared(out: Path) -> FolderLock:
    lock = FolderLock(out)
    clear_leftovers()
    if lock.left_by is not None:
        print(f"note   {lock.left_by} was in {out} and was killed; what it left unfinished is removed", flush=True)
    # A partial file that cannot be removed does no harm.
    with suppress(OSError):
        for path in [path for path in out.iterdir() if _UNFINISHED.fullmatch(path.name)]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        clear_unfinished(out / "checkpoints")
    return lock
