"""Training steps on two tensor-parallel ranks, with the doctor's recorder and without."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from ranks import NUM_RANKS, join_ranks, leave_ranks, seconds_of

from shardwise.core.topology import Groups
from shardwise.data import Batch
from shardwise.doctor import record
from shardwise.doctor.repeating import RecordedSteps
from shardwise.kernels.host_memory import keep_freed_memory
from shardwise.run.build import build_model
from shardwise.training.hooks import NO_HOOKS, StepHooks
from shardwise.training.trainer import Trainer
from steps.exact_steps import settings_of
from steps.problem import LlamaSizes

RECORDED_VARIANTS = ("recorded", "plain")


class RecordedRunner:
    """One rank's trainer.

    Args:
        store: file through which the ranks connect.
        rank: rank of this process.
    """

    def __init__(self, store: str, rank: int) -> None:
        # As in a run.
        keep_freed_memory()
        self._folder = tempfile.TemporaryDirectory()
        self._topology = join_ranks(store, rank)
        self._num_recordings = 0

    def prepare(self, sizes: LlamaSizes) -> None:
        """Create the trainer."""
        settings = settings_of(sizes, "plain_whole", NUM_RANKS)
        groups = Groups.of(self._topology)
        self._axes = groups
        ids = torch.randint(
            sizes.vocab_size, (sizes.batch_size, sizes.sequence_length + 1), generator=torch.Generator().manual_seed(1)
        )
        self._batch = Batch(ids[:, :-1], ids[:, 1:])
        model = build_model(settings, sizes.vocab_size, groups=groups, device=torch.device("cpu"))
        self._trainer = Trainer(settings, model, groups)

    def time_step(self, variant: str) -> float:
        """Return the seconds of a step; with ``"recorded"`` of one that is recorded, without writing the files."""
        if variant == "plain":
            return seconds_of(partial(self._step, NO_HOOKS), 1, together=True)
        self._num_recordings += 1
        path = Path(self._folder.name) / str(self._num_recordings)
        # The warm-up and the step that is timed; the file would be written at the end of a third.
        recorder = record(self._trainer.model, path, steps=3, axes=self._axes)
        seconds = seconds_of(partial(self._step, RecordedSteps(recorder)), 1, together=True)
        recorder.close()
        self._bytes = sum(file.stat().st_size for file in path.glob("*.safetensors")) // 2
        return seconds

    def recorded_bytes(self) -> int:
        """Return the bytes that the last recording took for each step."""
        return self._bytes

    def _step(self, hooks: StepHooks) -> None:
        self._trainer.step(0, [self._batch], hooks=hooks)

    def close(self) -> None:
        """Leave the process groups."""
        leave_ranks(self._topology)
        self._folder.cleanup()
