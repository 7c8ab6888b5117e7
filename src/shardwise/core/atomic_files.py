"""Files that are complete or absent, and that are checked before they are read."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from shardwise.core.errors import ConfigError, UnwritableError
from shardwise.core.processes import clear_leftovers, temporary_prefix

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Create or replace a file atomically, even if several processes write it at once; its folder is created."""
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


def write_output(path: str | os.PathLike[str], write: Callable[[BinaryIO], object], *, flag: str) -> None:
    """Write the file that a user named by a flag, or raise UnwritableError.

    A regular file is replaced atomically, also at the end of a link. A device, a named pipe, and the file that is this
    process's standard output or standard error are written through.
    """
    check_output(path, flag=flag)
    try:
        if (stream := _own_stream(path)) is not None:
            # Earlier output comes first.
            print(end="", file=(sys.stdout, sys.stderr)[stream - 1], flush=True)
            descriptor = os.dup(stream)
        elif _is_replaced(path):
            write_atomically(Path(os.path.realpath(path)), write)
            return
        else:
            # A named pipe that no process reads would block; with O_NONBLOCK it is an error.
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
        with open(descriptor, "wb") as file:
            write(file)
    except OSError as error:
        reason = "no process reads it" if error.errno == errno.ENXIO else error.strerror or str(error)
        raise cannot_write(Path(path), reason, flag) from error


def check_output(path: str | os.PathLike[str], *, flag: str) -> None:
    """Raise UnwritableError if ``write_output`` would find a folder, or a file that cannot be made; create nothing."""
    if not can_be_a_name(os.fspath(path)):
        raise UnwritableError(f"{flag} is {os.fspath(path)!r}, which is no file's name")
    if os.path.isdir(path):
        raise cannot_write(Path(path), "it is a folder", flag)
    try:
        if _own_stream(path) is None and _is_replaced(path):
            check_folder(Path(os.path.realpath(path)).parent, flag=flag)
    except OSError as error:
        raise cannot_write(Path(path), error.strerror or str(error), flag) from error


def _is_replaced(path: str | os.PathLike[str]) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True


def _own_stream(path: str | os.PathLike[str]) -> int | None:
    """Return the descriptor of standard output or error if it is open on the file at ``path``, as /dev/stdout is."""
    for stream in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(stream)):
                return stream
    return None


@contextmanager
def open_regular(path: str | os.PathLike[str], mode: int = os.O_RDONLY) -> Iterator[int]:
    """Open a regular file, by default for reading, and yield its descriptor; OSError for any other file.

    Opening a named pipe could block forever, and reading a device may never end. The file's type is therefore checked
    before the file is opened, and again afterwards.
    """
    try:
        _check_regular(os.stat(path), path)
        descriptor = os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:
        # The path has a NUL, or a character that file names cannot have.
        raise OSError(errno.EINVAL, str(error), repr(path)) from error
    try:
        _check_regular(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


def read_regular(path: str | os.PathLike[str], *, limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes; OSError if it is larger."""
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and such a file at most {limit}", os.fspath(path))
        with open(descriptor, "rb", closefd=False) as file:
            # A file that grows meanwhile is read up to the checked size.
            return file.read(size)


def can_be_a_name(text: str) -> bool:
    """True if a file can have this name: it has no NUL and no lone surrogate."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def check_folder(folder: Path, *, flag: str = "--out") -> None:
    """Raise ConfigError unless the folder can be written to, or could be created; create nothing."""
    if not can_be_a_name(str(folder)):
        raise ConfigError(f"{flag} is {str(folder)!r}, which is no folder's name")
    for place in (folder, *folder.parents):
        try:
            os.lstat(place)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                continue
            raise cannot_write(folder, f"{place}: {error.strerror}", flag) from error
        if not place.exists():
            raise cannot_write(folder, f"{place} is a link to nothing", flag)
        if not place.is_dir():
            raise cannot_write(folder, f"{place} is a file" if place.is_file() else f"{place} is no folder", flag)
        if not os.access(place, os.W_OK | os.X_OK):
            read_only = os.statvfs(place).f_flag & os.ST_RDONLY
            reason = "is on a read-only file system" if read_only else "has no permission to be written to"
            raise cannot_write(folder, f"{place} {reason}", flag)
        return


def cannot_write(folder: Path, reason: str, flag: str) -> UnwritableError:
    """Return the error for a folder that cannot be written to."""
    return UnwritableError(f"cannot write to {str(folder)!r}: {reason}; choose another {flag} or free it")


# Users type an organisation and a name, or only the name of an old model, with or without the hub's address.
_HUB_ID = re.compile(
    r"(?:https?:/+)?(?:(?:huggingface\.co|hf\.co)/)?((?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95})/?"
)


def no_folder(folder: Path, hint: str = "") -> str:
    """Return the message for a missing folder, with ``hint``, or how to download it if it may be a model on the hub."""
    exists = os.path.exists(folder)
    said = f"{folder} is not a folder" if exists else f"there is no folder {folder}"
    said += hint and f"; {hint}"
    match = _HUB_ID.fullmatch(str(folder))
    # If the first part of the path is a folder here, this is a misspelt path, not a name on the hub.
    if match is None or exists or (len(folder.parts) > 1 and os.path.isdir(folder.parts[0])):
        return said
    name = match[1].rpartition("/")[2]
    return (
        f"{said}; to use a model of the Hugging Face hub, download it (pip install huggingface_hub) and name its "
        f"folder, {name}: hf download {match[1]} --exclude 'original/*' --local-dir {name}"
    )


def no_data(path: Path) -> str:
    """Return the message for a missing file or folder of data."""
    link = " (a link to nothing)" if path.is_symlink() else ""
    return f"data path {str(path)!r} does not exist{link}; check its spelling and the folder"
