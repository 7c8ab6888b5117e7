"""The folder of a run's checkpoints: each is complete or absent, whenever the program is killed.

::

    step-00000100/            published: complete
    .step-00000200.partial/   being written, or about to be deleted: never read, removed by the next save
    .step-00000100.replaced/  the previous step-00000100, complete, while a new one takes its name

A folder gets and loses its published name by one ``os.rename``. Replacing one takes two, since no folder can be renamed
over another that is not empty; a program killed between the two leaves ``.replaced``, which then stands for the step
and gets its name back at the next save. One run at a time saves into a folder.
"""

import errno
import os
import re
import secrets
import shutil
from pathlib import Path

from shardwise.core.errors import CheckpointError
from shardwise.storage.checkpoint.manifest import Manifest

_PUBLISHED = re.compile(r"(step-\d{8,})")
_REPLACED = re.compile(r"\.(step-\d{8,})\.replaced")
_PARTIAL = re.compile(r"\.step-\d{8,}\.[0-9a-f]+\.partial")


def step_path(root: Path, step: int) -> Path:
    """The published folder of a step's checkpoint."""
    return root / f"step-{step:08d}"


def fsync(path: Path) -> None:
    """Write the file, or the folder's entries, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; nothing more can be done there.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def prepare(root: Path, step: int) -> Path:
    """A new, hidden, empty folder for the checkpoint of ``step``; what killed saves left is removed.

    Raises:
        CheckpointError: a file has the step's published name.
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
    """Remove what killed saves left in ``root``, and give a checkpoint that was about to be replaced its name back."""
    for entry in list(root.iterdir()):
        if _PARTIAL.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
        elif match := _REPLACED.fullmatch(entry.name):
            published = root / match[1]
            if published.exists():
                remove(entry)
            else:
                os.rename(entry, published)


def publish(partial: Path, target: Path) -> None:
    """Give the complete folder ``partial`` its published name; a checkpoint that had that name is then deleted.

    After an OSError, checkpoints that were published before still are.
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
        remove(replaced)


def remove(folder: Path) -> None:
    """Delete a complete checkpoint: first its name, so that it is never seen in part, then its files.

    Files that cannot be deleted now (in use on a network file system) are left to the next save.
    """
    partial = _partial_path(folder)
    os.rename(folder, partial)
    shutil.rmtree(partial, ignore_errors=True)


def prune(root: Path, keep: int) -> None:
    """Delete all but the ``keep`` checkpoints of ``root`` that were published last; unreadable ones are left alone."""
    readable, _ = checkpoints(root)
    for folder, _ in readable[: max(0, len(readable) - keep)]:
        remove(folder)


def next_serial(root: Path) -> int:
    """The serial of the checkpoint that ``root`` publishes next."""
    readable, _ = checkpoints(root)
    return readable[-1][1].serial + 1 if readable else 0


def checkpoints(root: Path) -> tuple[list[tuple[Path, Manifest]], list[tuple[Path, CheckpointError]]]:
    """The published checkpoints of ``root``: the readable ones, the newest last, and the others with their errors."""
    readable, unreadable = [], []
    for folder in sorted(root.iterdir()):
        replaced = _REPLACED.fullmatch(folder.name)
        if not (_PUBLISHED.fullmatch(folder.name) or (replaced and not (root / replaced[1]).exists())):
            continue
        try:
            readable.append((folder, Manifest.read(folder)))
        except CheckpointError as error:
            # A folder that another process removed in the meantime is not an error.
            if folder.exists():
                unreadable.append((folder, error))
    readable.sort(key=lambda item: item[1].serial)
    return readable, unreadable


def latest(root: Path) -> Path | None:
    """The checkpoint of ``root`` that was published last, None if there is none.

    "Last" is in time, not the highest step: a run that goes on from step 100 where step 300 was reached before, or
    begins anew in a used folder, is resumed from its own. What a killed save left is passed over; a damaged published
    checkpoint is an error. Not collective; ranks that share the folder get the same answer.

    Args:
        root: the folder that ``save`` was given; it need not exist.

    Raises:
        CheckpointError: the newest checkpoint is damaged (no good ``meta.json``, or a file that is missing or not of
            its recorded size; ``verify`` compares the contents too), or ``root`` cannot be read.
    """
    try:
        readable, unreadable = checkpoints(root)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {root}: {error}") from error
    newest = readable[-1][0] if readable else None
    for folder, damage in unreadable:
        # The serial of a damaged checkpoint cannot be read. Steps give the same order, unless a run went back.
        if newest is None or step_of(folder) > step_of(newest):
            raise CheckpointError(f"{damage}; {_way_out(folder, newest)}") from damage
    if newest is None:
        return None
    try:
        readable[-1][1].check_sizes(newest)
    except CheckpointError as error:
        older = readable[-2][0] if len(readable) > 1 else None
        raise CheckpointError(f"{error}; {_way_out(newest, older)}") from error
    return newest


def step_of(folder: Path) -> int:
    """The step in a published or replaced checkpoint's name."""
    return int(folder.name.split("-")[1].split(".")[0])


def _way_out(damaged: Path, older: Path | None) -> str:
    return f"remove {damaged} to go on from {older}" if older else f"remove {damaged} to start anew"


def _partial_path(folder: Path) -> Path:
    """A new hidden name next to ``folder``: a rank that outlived its killed run must not write to a later one's."""
    return folder.with_name(f".{folder.name.strip('.').removesuffix('.replaced')}.{secrets.token_hex(4)}.partial")
