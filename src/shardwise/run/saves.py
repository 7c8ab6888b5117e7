"""When a run's checkpoints are written and published: at once, or by a thread while the run trains on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shardwise.core.errors import ShardwiseError
from shardwise.run.checkpoints import begin_save
from shardwise.run.tasks.recipe import Session
from shardwise.storage.checkpoint import PendingSave, Snapshot
from shardwise.storage.checkpoint.saving import Progress


class Saves:
    """The checkpoints of a run, of which at most one is being written.

    Whatever ranks do together happens in the thread that trains, in the order of its calls. How far each rank's writing
    is they hear of in the all-reduce that every step has anyway: each puts in its ``progress``, and calls ``heard``
    with the largest.

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
    def progress(self) -> Progress:
        """Of this rank's writing."""
        return Progress.WRITTEN if self._pending is None else self._pending.progress

    def heard(self, progress: Progress) -> None:
        """Publish what is written, once every rank has, or raise what kept a rank from it; every rank calls.

        Raises:
            CheckpointError: the disk is full, or what else a rank's thread found.
            DivergenceError: what was to be saved is not finite.
        """
        if self._pending is None or progress == Progress.WRITING:
            return
        if progress == Progress.FAILED and self._pending.progress != Progress.FAILED:
            # Another rank has the reason; this one need not write the rest.
            self._pending.abandon()
        self.complete()

    def save(self, step: int, *, at_once: bool) -> None:
        """Save the run after ``step`` steps, once the save before is complete; every rank calls.

        Args:
            step: steps done.
            at_once: publish it before this returns. Otherwise ``heard`` does, or ``complete``.

        Raises:
            CheckpointError, DivergenceError: see ``heard``.
        """
        self.complete()
        self._pending = begin_save(self._session, step, None if at_once else self._snapshot)
        if at_once:
            self.complete()

    def complete(self) -> None:
        """Wait for what is being written, and publish it; every rank calls.

        Raises:
            CheckpointError, DivergenceError: see ``heard``.
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
