"""Files that are complete or absent, and files of others, which are looked at before they are opened and read."""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shardwise.core.errors import UnwritableError
from shardwise.core.processes import clear_leftovers, temporary_prefix

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Create or replace a file, complete or not at all, also when several processes do it at once.

    Args:
        path: the file; its folder is made if missing.
        write: called with the open binary file; its result is not used.

    Raises:
        UnwritableError: the folder cannot be made or written to.
    """
    temporary = path.with_name(f".{path.name}.{temporary_prefix('file')}{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers([path.parent])
        try:
            with temporary.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UnwritableError(
            f"cannot write {str(path)!r}: {reason}; choose a folder that can be written to"
        ) from error


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[int]:
    """A descriptor to read a regular file with, for the length of the block.

    Opening a named pipe would wait for a writer that never comes, and a device has no end; so the kind is looked at
    first, and once more when it is open.

    Raises:
        OSError: there is no such file, it cannot be read, or it is no regular file.
    """
    try:
        _check_regular(os.stat(path), path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:
        # A NUL, or a character that no file name has.
        raise OSError(errno.EINVAL, str(error), repr(path)) from error
    try:
        _check_regular(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


def read_regular(path: str | os.PathLike[str], *, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: see ``open_regular``; or the file is larger, which is found before anything is read.
    """
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and such a file at most {limit}", os.fspath(path))
        with open(descriptor, "rb", closefd=False) as file:
            # One that grows meanwhile is read as far as it was looked at.
            return file.read(size)


def can_be_a_name(text: str) -> bool:
    """Whether a file can be called so: no NUL, and no lone surrogate."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))
