"""Saving of a sharded state: begin, write, and publish once every rank has written.

torch.distributed.checkpoint plans who writes what. Its asynchronous saving runs collectives in a thread; here a thread
only writes its rank's file, and the calling thread makes all collectives. A ``Snapshot`` in host memory lets the thread
write while the tensors change.
"""

import contextlib
import dataclasses
import enum
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from shardwise.core.communication.agreement import decide
from shardwise.core.errors import CheckpointError, ConfigError, DesyncError, ShardwiseError
from shardwise.core.sharding import ParamShard, TensorPieces
from shardwise.storage.checkpoint.checkpoint import (
    Description,
    checkpoint_errors,
    describe,
    describe_state,
    merge_descriptions,
)
from shardwise.storage.checkpoint.folder import fsync, next_serial, prepare, prune, publish, step_path
from shardwise.storage.checkpoint.manifest import (
    MANIFEST_NAME,
    ChunkRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    json_copy,
)
from shardwise.storage.checkpoint.storage import BoxData, BoxesToWrite, Written, tensors_of, write_parts


class Snapshot:
    """Host memory for the parts of a state that this rank writes, kept from one save to the next.

    For tensors of an accelerator it is pinned, and the copies run in the stream of the kernels before and after them:
    the host waits only where it writes them. PyTorch rounds each pinned tensor up to a power of two.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.Event | None = None

    def take(self, parts: Sequence[BoxData]) -> list[BoxData]:
        """The parts with copies of their data, complete after ``wait``; copies of an earlier call are overwritten.

        Raises:
            RuntimeError, MemoryError: there is not enough memory, or it cannot be pinned.
        """
        before, self._buffers, self._copied = self._buffers, {}, None
        copies = []
        for part in parts:
            source = part.data.detach()
            buffer = before.pop(part.key, None)
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type != "cpu")
            self._buffers[part.key] = buffer.copy_(source, non_blocking=True)
            copies.append(dataclasses.replace(part, data=buffer))
        device = next((part.data.device for part in parts if part.data.device.type != "cpu"), None)
        if device is not None:
            self._copied = torch.Event(device)
            self._copied.record(torch.accelerator.current_stream(device))
        return copies

    def wait(self) -> None:
        """Wait for the copies; from any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def release(self) -> None:
        """Give the memory back."""
        self._buffers, self._copied = {}, None


def save(
    root: Path,
    step: int,
    state: Mapping[str, ParamShard],
    meta: Mapping[str, Any] | None = None,
    *,
    group: ProcessGroup,
    keep: int | None = 3,
    extra_files: Callable[[Path], None] | None = None,
) -> Path:
    """Save ``state`` as the checkpoint ``root/step-NNNNNNNN``, complete or not at all.

    Collective over ``group``. Each interval of a tensor is written once, however many ranks hold it, and the work is
    spread over them. The checkpoint appears under its name when every byte is on the disk, and replaces an earlier one
    of that name. One run at a time saves into a folder, which all ranks share.

    Args:
        root: folder of the run's checkpoints; made if it does not exist.
        step: training step, at least 0.
        state: this rank's part of each tensor, by any name: a tensor is stored under its entry's ``key``. Ranks may
            hold different tensors, but all entries of one key agree on dtype, shape and layout.
        meta: plain JSON values to keep with it; rank 0's are written. Tuples are read back as lists. None is ``{}``.
        group: all ranks that hold a part: tensor-parallel, and the data-parallel copies if they take part.
        keep: how many checkpoints of ``root`` to keep, those published last; older ones are deleted once the new one is
            published. None keeps all.
        extra_files: called on rank 0 with a folder to add files to (tokenizer, configuration); they are part of the
            checkpoint and checked by ``verify``.

    Returns:
        The checkpoint's folder, on every rank.

    Raises:
        ConfigError: ``step`` or ``keep`` out of range.
        CheckpointError: it cannot be saved (no permission, disk full, ranks that disagree, ``meta`` that is not JSON);
            the same message on every rank. Nothing is left of it, and earlier checkpoints are unchanged.
    """
    return PendingSave(root, step, state, meta, group=group, keep=keep, extra_files=extra_files).complete()


class SaveProgress(enum.IntEnum):
    """State of one rank's writing; the largest over the ranks is that of the save."""

    WRITTEN = 0
    WRITING = 1
    FAILED = 2


class PendingSave:
    """A checkpoint that has begun, and is published by ``complete``; ``save`` is one right after the other.

    With a snapshot, a thread writes this rank's file from it, and the tensors may change once the object is made. The
    thread makes no collectives, so the ranks may make any meanwhile. Until ``complete`` has returned the checkpoint is
    hidden, and earlier ones are unchanged. Making it and completing it are collective over ``group``.

    Args:
        root, step, state, meta, group, keep, extra_files: as for ``save``.
        snapshot: memory to copy to. If None, or where a rank has too little memory, that rank writes from the tensors
            themselves, before this returns.
        check: called with the stored name and the values of each part of this rank before its file is written, in the
            thread if there is one; an error that it raises is the save's.

    Attributes:
        step: as given.
        note: a message for the user, empty if there is none: of this rank, and after ``complete`` of all ranks.

    Raises:
        ConfigError, CheckpointError: as for ``save``; ``complete`` raises errors of the thread.
    """

    def __init__(
        self,
        root: Path,
        step: int,
        state: Mapping[str, ParamShard],
        meta: Mapping[str, Any] | None = None,
        *,
        group: ProcessGroup,
        keep: int | None = 3,
        extra_files: Callable[[Path], None] | None = None,
        snapshot: Snapshot | None = None,
        check: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        if step < 0 or (keep is not None and keep < 1):
            raise ConfigError(f"step must be at least 0 and keep at least 1 or None, got step={step}, keep={keep}")
        self.step, self.note = step, ""
        self._root, self._keep, self._extra_files = root, keep, extra_files
        self._group, self._rank = group, dist.get_rank(group)
        self._snapshot, self._check = snapshot, check
        self._tensors: dict[str, Description] = {}
        self._partial: Path | None = None
        self._parts: list[BoxData] = []
        self._meta: dict[str, Any] = {}
        self._written: Written | None = None
        self._error: BaseException | None = None
        self._abandoned = False
        self._thread: threading.Thread | None = None
        mine: dict[str, TensorPieces] = {}

        @checkpoint_errors()
        def describe_mine() -> tuple[int, dict[str, Description]]:
            described = describe_state(state)
            mine.update(tensors_of(state))
            return step, described

        @checkpoint_errors()
        def begin(ranks: list[tuple[int, dict[str, Description]]]) -> Path:
            if any(other != step for other, _ in ranks):
                raise CheckpointError(f"the ranks save different steps: {[other for other, _ in ranks]}")
            self._tensors |= merge_descriptions((f"rank {rank}", part) for rank, (_, part) in enumerate(ranks))
            self._meta = json_copy({} if meta is None else meta)
            return prepare(root, step)

        with self._failing_alike():
            self._partial = decide(describe_mine, begin, group=group)
            with checkpoint_errors():
                state_dict_saver.save(
                    dict(mine),
                    storage_writer=BoxesToWrite(self._take),
                    planner=DefaultSavePlanner(flatten_state_dict=False),
                    process_group=group,
                )
        if self._snapshot is None:
            self._write()
        else:
            self._thread = threading.Thread(target=self._write, name=f"shardwise-save-{step}")
            self._thread.start()

    @property
    def progress(self) -> SaveProgress:
        """State of this rank's writing, without waiting for it."""
        if self._thread is not None and self._thread.is_alive():
            return SaveProgress.WRITING
        return SaveProgress.WRITTEN if self._error is None else SaveProgress.FAILED

    def complete(self) -> Path:
        """Wait until every rank has written, publish the checkpoint, and return its folder. Collective.

        Raises:
            CheckpointError: as for ``save``.
            ShardwiseError: the error of ``check`` on any rank, on every rank.
        """
        with self._failing_alike():
            self.note = decide(self._own_part, self._publish, group=self._group)
        return step_path(self._root, self.step)

    def wait(self) -> None:
        """Wait until this rank has written, or failed; not collective."""
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Stop this rank's thread at its next part; what it wrote is never published. Not collective.

        For a rank that leaves because of an error, its own or another rank's.
        """
        self._abandoned = True
        self.wait()

    def _take(self, parts: list[BoxData]) -> None:
        if self._snapshot is not None:
            try:
                parts = self._snapshot.take(parts)
            except (RuntimeError, MemoryError) as error:
                self._snapshot.release()
                self._snapshot = None
                self.note = (
                    f"rank {self._rank} trains on only when it has written, for want of memory: {describe(error)}"
                )
        self._parts = parts

    def _write(self) -> None:
        assert self._partial is not None
        try:
            if self._snapshot is not None:
                self._snapshot.wait()
            for part in self._parts:
                self._go_on()
                if self._check is not None:
                    self._check(part.key, part.data)
            with checkpoint_errors():
                self._written = write_parts(self._partial, self._rank, self._parts, go_on=self._go_on)
        except BaseException as error:
            self._error = error
            # A KeyboardInterrupt of the caller's thread is the caller's.
            if threading.current_thread() is not self._thread and not isinstance(error, Exception):
                raise
        self._parts = []

    def _go_on(self) -> None:
        if self._abandoned:
            raise CheckpointError("the save was abandoned")

    def _own_part(self) -> tuple[Written | None, str]:
        self.wait()
        # One that was abandoned was so because of another rank's error, which is the one to tell.
        if self._error is not None and not self._abandoned:
            raise self._error
        return self._written, self.note

    @checkpoint_errors()
    def _publish(self, ranks: list[tuple[Written | None, str]]) -> str:
        """On rank 0: complete and publish the folder; returns the notes of all ranks."""
        assert self._partial is not None
        chunks: dict[str, list[ChunkRecord]] = {}
        files: dict[str, FileRecord] = {}
        for rank, (written, _) in enumerate(ranks):
            if written is None:
                raise CheckpointError(f"rank {rank} abandoned the save")
            if written.file is not None and written.record is not None:
                files[written.file] = written.record
            for name, chunk in written.chunks:
                chunks.setdefault(name, []).append(chunk)
        files |= _add_extra_files(self._partial, self._extra_files, known=files)
        records = {}
        for key in sorted(chunks):
            dtype, shape, layout = self._tensors[key]
            records[key] = TensorRecord(shape, dtype, dataclasses.asdict(layout), tuple(chunks[key]))
        manifest = Manifest(self.step, next_serial(self._root), self._meta, records, files)
        (self._partial / MANIFEST_NAME).write_text(manifest.to_text(), encoding="utf-8")
        fsync(self._partial / MANIFEST_NAME)
        fsync(self._partial)
        publish(self._partial, step_path(self._root, self.step))
        if self._keep is not None:
            prune(self._root, self._keep)
        return "; ".join(note for _, note in ranks if note)

    @contextlib.contextmanager
    def _failing_alike(self) -> Iterator[None]:
        """On an error that all ranks have, remove the files of this save, and add to the error that they are all."""
        try:
            try:
                yield
            except DesyncError:
                # A rank is gone, and nothing can be done together any more. The next save removes what is left.
                raise
            except ShardwiseError:
                decide(self._clear, lambda _: None, group=self._group)
                raise
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot save a checkpoint in {self._root}: {error}; {self._what_is_left()}"
            ) from error

    def _what_is_left(self) -> str:
        if self._partial is not None and not self._root.is_dir():
            return "the folder is gone, and what was in it: something removed it while the program was at work"
        is_first = not any(self._root.glob("step-*"))
        return "there is no earlier one" if is_first else "earlier ones are untouched"

    @checkpoint_errors()
    def _clear(self) -> None:
        if self._rank == 0 and self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)


def _add_extra_files(
    folder: Path, write: Callable[[Path], None] | None, *, known: Mapping[str, FileRecord]
) -> dict[str, FileRecord]:
    """Let ``write`` add files to ``folder``; returns their records."""
    if write is None:
        return {}
    write(folder)
    if (folder / MANIFEST_NAME).exists():
        raise CheckpointError(f"extra_files wrote {MANIFEST_NAME}, which is the checkpoint's own")
    added = {}
    for path in sorted(folder.rglob("*")):
        fsync(path)
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in known:
            added[name] = FileRecord.of(path)
    return added
