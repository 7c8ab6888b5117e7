"""The folder of a run's checkpoints. Each checkpoint is complete or absent, even if the program is killed.

::

    step-00000100/            published: complete
    .step-00000200.partial/   being written, or about to be deleted: never read, removed by the next save
    .step-00000100.replaced/  the previous step-00000100, complete, while a new one takes its name

A folder gets or loses its published name by one ``os.rename``. Replacing a checkpoint takes two, because a folder
cannot be renamed over a non-empty one. If the program is killed between the two, ``.replaced`` counts as the step's
checkpoint, and the next save restores its name. Only one run at a time may save into a folder.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from shardwise.core.atomic_files import open_regular
from shardwise.core.errors import CheckpointError
from shardwise.storage.checkpoint.manifest import MANIFEST_NAME, Manifest

PUBLISHED = re.compile(r"(step-\d{8,})")
"""Name of a published checkpoint."""

_REPLACED = re.compile(r"\.(step-\d{8,})\.replaced")
_PARTIAL = re.compile(r"\.step-\d{8,}\.[0-9a-f]+\.partial")


def step_path(root: Path, step: int) -> Path:
    """Return the published folder of a step's checkpoint."""
    return root / f"step-{step:08d}"


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def prepare(root: Path, step: int) -> Path:
    """Make a new, hidden, empty folder for the checkpoint of ``step``, and clean up after killed saves.

    Raises:
        CheckpointError: there is a file with the step's published name.
        OSError: the folder cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    clear_unfinished(root)
    target = step_path(root, step)
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; move it away")
    partial = _partial_path(target)
    partial.mkdir()
    return partial


def clear_unfinished(root: Path) -> None:
    """Remove partial checkpoints of killed saves from ``root``, and restore the name of an unfinished replacement."""
    for entry in list(root.iterdir()):
        if _PARTIAL.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
        elif match := _REPLACED.fullmatch(entry.name):
            published = root / match[1]
            if published.exists():
                remove_unless_held(entry)
            else:
                os.rename(entry, published)


def publish(partial: Path, target: Path) -> None:
    """Rename the complete folder ``partial`` to its published name, and delete a checkpoint that had that name.

    After an OSError, all earlier checkpoints are still published.
    """
    root = target.parent
    replaced = root / f".{target.name}.replaced"
    replaces = target.exists()
    if replaces:
        os.rename(target, replaced)
    try:
        os.rename(partial, target)
    except OSError:
        if replaces:
            os.rename(replaced, target)
        raise
    fsync(root)
    if replaces:
        remove_unless_held(replaced)


def remove(folder: Path, *, waits: bool = True) -> None:
    """Delete a complete checkpoint, in a thread unless it ``waits``.

    It is renamed before, so that no reader sees a part of it. The next save deletes files that cannot be deleted now,
    for example those in use on a network file system.
    """
    partial = _partial_path(folder)
    os.rename(folder, partial)
    if waits:
        shutil.rmtree(partial, ignore_errors=True)
    else:
        name = f"shardwise-remove-{folder.name}"
        threading.Thread(target=shutil.rmtree, args=(partial, True), name=name).start()


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Keep a run from deleting an old checkpoint during the block.

    The reader holds a shared lock on its manifest; ``remove_unless_held`` needs an exclusive one. Without support for
    locks, nothing is held.

    Yields:
        False if the checkpoint is gone already.
    """
    path = folder / MANIFEST_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        # Reading it reports other errors.
        yield os.path.lexists(folder)
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            there = os.path.samestat(os.fstat(descriptor), os.stat(path))
        except (BlockingIOError, FileNotFoundError, NotADirectoryError):
            there = False
        except OSError:
            there = True
        yield there
    finally:
        os.close(descriptor)


@contextmanager
def held_latest(root: Path) -> Iterator[Path | None]:
    """Find the checkpoint of ``latest``, if any, and keep a run from deleting it during the block."""
    while True:
        folder = latest(root)
        with held(folder) if folder is not None else nullcontext(True) as there:
            # A run that saves has removed it in the meantime, and published a newer one before.
            if there:
                yield folder
                return


def remove_unless_held(folder: Path, *, waits: bool = True) -> None:
    """Call ``remove``, unless a process reads the checkpoint; the next save then removes it."""
    with ExitStack() as stack:
        try:
            # Over NFS an exclusive lock needs a file that is open for writing.
            descriptor = stack.enter_context(open_regular(folder / MANIFEST_NAME, os.O_RDWR))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            pass  # There is no support for locks, or the checkpoint cannot be read.
        remove(folder, waits=waits)


def clear(root: Path) -> None:
    """Remove all checkpoints of ``root``, also partial and damaged ones, and no other file."""
    with suppress(OSError):
        for entry in list(root.iterdir()):
            if any(pattern.fullmatch(entry.name) for pattern in (PUBLISHED, _REPLACED, _PARTIAL)):
                shutil.rmtree(entry, ignore_errors=True)
        root.rmdir()


def checkpoints(root: Path) -> tuple[list[tuple[Path, Manifest]], list[tuple[Path, CheckpointError]]]:
    """Return the readable checkpoints of ``root``, the newest last, and the unreadable ones with their errors."""
    readable, unreadable, gone = [], [], False
    for folder in sorted(root.iterdir()):
        replaced = _REPLACED.fullmatch(folder.name)
        if not (PUBLISHED.fullmatch(folder.name) or (replaced and not (root / replaced[1]).exists())):
            continue
        try:
            readable.append((folder, Manifest.read(folder)))
        except CheckpointError as error:
            gone = gone or not os.path.lexists(folder)
            if folder.exists():
                unreadable.append((folder, error))
    if gone:
        # Another process has removed it in the meantime, and may have published a newer one.
        return checkpoints(root)
    readable.sort(key=lambda item: item[1].serial)
    return readable, unreadable


def latest(root: Path) -> Path | None:
    """Return the last published checkpoint of ``root``, or None if there is none.

    The last checkpoint in time may not have the highest step: a run may resume from step 100 in a folder that has step
    300, or start again in a used folder. Partial checkpoints are ignored; a damaged published checkpoint is an error.
    Not collective; ranks that see the same folder get the same result.

    Args:
        root: folder of the checkpoints, as for ``save``; it need not exist.

    Raises:
        CheckpointError: the newest checkpoint is damaged (an invalid ``meta.json``, a missing file, or a file of
            another size; only ``verify`` compares contents), or ``root`` cannot be read.
    """
    try:
        readable, unreadable = checkpoints(root)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {root}: {error}") from error
    newest = readable[-1][0] if readable else None
    for folder, damage in unreadable:
        # The serial of a damaged checkpoint is unknown. Steps give the same order unless a run resumed from an earlier
        # step.
        if newest is None or step_of(folder) > step_of(newest):
            raise CheckpointError(f"{damage}; {_way_out(folder, newest)}") from damage
    if newest is None:
        return None
    try:
        readable[-1][1].check_sizes(newest)
    except CheckpointError as error:
        if not os.path.lexists(newest):
            # A run has removed it in the meantime, after it had published a newer one.
            return latest(root)
        older = readable[-2][0] if len(readable) > 1 else None
        raise CheckpointError(f"{error}; {_way_out(newest, older)}") from error
    return newest


def step_of(folder: Path) -> int:
    """Return the step from the name of a published or replaced checkpoint."""
    return int(folder.name.split("-")[1].split(".")[0])


def _way_out(damaged: Path, older: Path | None) -> str:
    return f"remove {damaged} to go on from {older}" if older else f"remove {damaged} to start anew"


def _partial_path(folder: Path) -> Path:
    """Return a new hidden name: a rank that outlives its killed run must not write to the folder of a later run."""
    return folder.with_name(f".{folder.name.strip('.').removesuffix('.replaced')}.{secrets.token_hex(4)}.partial")
