"""Save a sharded state: begin, write, and publish when every rank has written.

torch.distributed.checkpoint plans which rank writes which part. Its asynchronous saving runs collectives in a thread.
Here, a thread only writes its rank's file, and the calling thread runs all collectives. The thread writes from a
``Snapshot`` in host memory, so that the tensors may change meanwhile.
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
from shardwise.core.errors import CheckpointError, ConfigError, DesyncError, LaunchError, ShardwiseError
from shardwise.core.sharding import ParamShard, TensorPieces
from shardwise.storage.checkpoint.checkpoint import (
    Description,
    checkpoint_errors,
    describe,
    describe_state,
    merge_descriptions,
)
from shardwise.storage.checkpoint.folder import checkpoints, fsync, prepare, publish, remove_unless_held, step_path
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
    """Host copies of the parts of a state that this rank writes. The memory is reused by the next save.

    Copies of an accelerator's tensors are in pinned memory, and are made in the current stream: the host waits for them
    only before it writes them. PyTorch rounds the size of each pinned tensor up to a power of two.

    Args:
        budget: returns the number of bytes that may be allocated now; None for no limit.
    """

    def __init__(self, budget: Callable[[], int | None] | None = None) -> None:
        self._budget = budget
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.Event | None = None

    def take(self, parts: Sequence[BoxData]) -> list[BoxData]:
        """Copy the parts; the copies are complete after ``wait``, and overwrite those of an earlier call.

        Raises:
            RuntimeError, MemoryError: there is not enough memory, or it cannot be pinned.
        """
        self._check_budget(parts)
        before, self._buffers, self._copied = self._buffers, {}, None
        copies = []
        for part in parts:
            source = part.data.detach()
            buffer = before.pop(part.key, None)
            if buffer is None or not _is_alike(buffer, source):
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type != "cpu")
            self._buffers[part.key] = buffer.copy_(source, non_blocking=True)
            copies.append(dataclasses.replace(part, data=buffer))
        device = next((part.data.device for part in parts if part.data.device.type != "cpu"), None)
        if device is not None:
            self._copied = torch.Event(device)
            self._copied.record(torch.accelerator.current_stream(device))
        return copies

    def _check_budget(self, parts: Sequence[BoxData]) -> None:
        # Linux grants memory that it does not have, and kills a process that touches it.
        needed = 0
        for part in parts:
            if not _is_alike(self._buffers.get(part.key), part.data):
                needed += part.data.nbytes if part.data.is_cpu else 1 << max(0, part.data.nbytes - 1).bit_length()
        allowed = None if self._budget is None or needed == 0 else self._budget()
        if allowed is not None and needed > allowed:
            raise MemoryError(f"copies of {needed:,} bytes are more than the {allowed:,} bytes that a rank may take")

    def wait(self) -> None:
        """Wait for the copies. May be called from any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def release(self) -> None:
        """Free the memory."""
        self._buffers, self._copied = {}, None


def _is_alike(buffer: Tensor | None, source: Tensor) -> bool:
    return buffer is not None and (buffer.shape, buffer.dtype) == (source.shape, source.dtype)


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
    """Save ``state`` as the checkpoint ``root/step-NNNNNNNN``, completely or not at all.

    Collective over ``group``. Each interval of a tensor is written once, however many ranks hold it, and these ranks
    share the work. The checkpoint gets its name when every byte is on the disk, and replaces an earlier checkpoint with
    that name. All ranks must see the same folder; only one run at a time may save into it.

    Args:
        root: folder of the run's checkpoints; created if missing.
        step: training step, at least 0.
        state: this rank's part of each tensor. A tensor is stored under its entry's ``key``; the mapping's keys do not
            matter. Ranks may hold different tensors, but all entries of one key must have the same dtype, shape and
            layout.
        meta: plain JSON values to store; rank 0's are written. Tuples are read back as lists. None means ``{}``.
        group: all ranks that hold a part: tensor-parallel ranks, and data-parallel replicas if they take part.
        keep: number of most recently published checkpoints of ``root`` to keep; older ones are deleted after the new
            one is published. None keeps all.
        extra_files: callback that adds files (tokenizer, configuration) to the folder that it gets, on rank 0. They are
            part of the checkpoint, and ``verify`` checks them.

    Returns:
        The checkpoint's folder, on every rank.

    Raises:
        ConfigError: ``step`` or ``keep`` is out of range.
        CheckpointError: the checkpoint cannot be saved (no permission, disk full, ranks that disagree, ``meta`` that is
            not JSON); the message is the same on every rank. The new files are removed, and earlier checkpoints are
            unchanged.
    """
    return PendingSave(root, step, state, meta, group=group, keep=keep, extra_files=extra_files).complete()


class SaveProgress(enum.IntEnum):
    """State of a rank's writing; the maximum over the ranks is the state of the save."""

    WRITTEN = 0
    WRITING = 1
    FAILED = 2


class PendingSave:
    """A checkpoint in progress, which ``complete`` publishes; ``save`` makes one and completes it at once.

    With a snapshot, a thread writes this rank's file from it, and the tensors may change after construction. The thread
    runs no collectives, so the ranks may run any meanwhile. Until ``complete`` returns, the checkpoint is hidden, and
    earlier ones are unchanged. Construction and ``complete`` are collective over ``group``.

    Args:
        root, step, state, meta, group, keep, extra_files: as for ``save``.
        snapshot: memory for the copies. If None, or on a rank with too little memory, the constructor writes the file
            from the tensors themselves.
        check: callback for the stored name and the values of each part of this rank, called before the file is written,
            in the thread if there is one. If it raises, the save fails with its error.

    Attributes:
        step: training step.
        note: message of this rank for the user, or after ``complete`` the messages of all ranks; empty if there is
            none.

    Raises:
        ConfigError, CheckpointError: as for ``save``; ``complete`` raises the errors of the thread.
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
        """State of this rank's writing; does not wait."""
        if self._thread is not None and self._thread.is_alive():
            return SaveProgress.WRITING
        return SaveProgress.WRITTEN if self._error is None else SaveProgress.FAILED

    def complete(self) -> Path:
        """Wait until every rank has written, publish the checkpoint, and return its folder. Collective.

        Raises:
            CheckpointError: as for ``save``.
            ShardwiseError: the error of ``check`` on any rank; raised on every rank.
        """
        with self._failing_alike():
            self.note = decide(self._own_part, self._publish, group=self._group)
        return step_path(self._root, self.step)

    def wait(self) -> None:
        """Wait until this rank has written or failed. Not collective."""
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Stop this rank's thread before its next part, after any error; nothing is published. Not collective."""
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
            # In the caller's thread, raise KeyboardInterrupt to the caller.
            if threading.current_thread() is not self._thread and not isinstance(error, Exception):
                raise
        self._parts = []

    def _go_on(self) -> None:
        if self._abandoned:
            raise CheckpointError("the save was abandoned")

    def _own_part(self) -> tuple[Written | None, str]:
        self.wait()
        # A save is abandoned because of another error, which is the one to report.
        if self._error is not None and not self._abandoned:
            raise self._error
        return self._written, self.note

    @checkpoint_errors()
    def _publish(self, ranks: list[tuple[Written | None, str]]) -> str:
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
        earlier, _ = checkpoints(self._root)
        serial = earlier[-1][1].serial + 1 if earlier else 0
        manifest = Manifest(self.step, serial, self._meta, records, files)
        (self._partial / MANIFEST_NAME).write_text(manifest.to_text(), encoding="utf-8")
        fsync(self._partial / MANIFEST_NAME)
        fsync(self._partial)
        target = step_path(self._root, self.step)
        publish(self._partial, target)
        # Unreadable checkpoints are neither counted nor deleted.
        others = [folder for folder, _ in earlier if folder != target]
        for folder in [] if self._keep is None else others[: max(0, len(others) + 1 - self._keep)]:
            remove_unless_held(folder, waits=self._thread is None)
        return "; ".join(note for _, note in ranks if note)

    @contextlib.contextmanager
    def _failing_alike(self) -> Iterator[None]:
        """After an error on all ranks, remove this save's files, and add the state of earlier ones to the message."""
        try:
            try:
                yield
            except (DesyncError, LaunchError):
                # A rank is gone, so no collective can run. The next save removes the files.
                raise
            except ShardwiseError:
                decide(self._clear, lambda _: None, group=self._group)
                raise
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot save a checkpoint in {self._root}: {error}; {self._remaining_files()}"
            ) from error

    def _remaining_files(self) -> str:
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
