"""Files that several processes use: complete or absent, checked before they are read, and folders locked for one run.

Python's JSON parser accepts NaN and Infinity, silently keeps the last of two equal keys, and recurses until the stack
overflows. ``read_json`` accepts only an object with finite numbers and unique keys, nested at most ``MAX_DEPTH`` deep,
in a regular file of bounded size.

A process locks a folder by holding a lock on a file in it. The kernel releases the lock when the process ends, even if
it is killed. The file contains the holder's name. If the file system does not support locks, this name is used instead:
a holder on this machine can be looked up, a holder on another host cannot.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import secrets
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from shardwise.core.errors import ConfigError, UnwritableError
from shardwise.core.processes import Process, clear_leftovers, machine, temporary_prefix

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


MAX_DEPTH = 64
"""Largest depth of nested objects and lists; real files have about ten levels."""

MAX_CONFIG_BYTES = 8_000_000
"""Largest size of files such as ``config.json``; real ones have a few kilobytes."""

MAX_TABLE_BYTES = 100_000_000
"""Largest size of a list of tensors; safetensors limits its headers to the same size."""

_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


def read_json(path: str | os.PathLike[str], *, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read the JSON object in the regular file at ``path``, of at most ``limit`` bytes.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger than ``limit``.
        ValueError: the content is not valid; see ``parse_json``.
    """
    return parse_json(read_regular(path, limit=limit))


def parse_json(content: bytes) -> dict[str, Any]:
    """Parse a JSON object from UTF-8 text.

    Raises:
        ValueError: the text is not JSON or not an object, has a non-finite number or a duplicate key, or is nested
            deeper than ``MAX_DEPTH``. The message states the reason, but not the file's name.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: can't decode byte 0x{content[error.start]:02x} at {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=_checked_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not isinstance(value, dict):
        raise ValueError(f"it must hold a JSON object, not {type(value).__name__}")
    _check_depth(value, MAX_DEPTH)
    return value


def _check_depth(value: Any, depth: int) -> None:
    if isinstance(value, dict | list):
        if depth == 0:
            raise ValueError(_TOO_DEEP)
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, depth - 1)


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"it has {shown(key)} twice in one object")
        if not _is_finite(item):
            raise ValueError(f"its {shown(key)} is {shown(item)}, which is not finite")
        value[key] = item
    return value


def _is_finite(item: Any) -> bool:
    """True if a number, or each number of a list, is finite. Nested objects were checked when they were parsed."""
    if isinstance(item, float):
        return math.isfinite(item)
    return not isinstance(item, list) or all(map(_is_finite, item))


def shown(value: object, longest: int = 80) -> str:
    """Format a value from a file as JSON for a message, cut off after ``longest`` characters."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        # Python does not format integers of more than 4,300 digits.
        return "a value that cannot be shown"
    return text if len(text) <= longest else f"{text[:longest]}..."


def first_of(names: Sequence[str], number: int = 3) -> str:
    """List the first names for a message, such as ``"a, b, c and 4 more"``."""
    more = f" and {len(names) - number} more" if len(names) > number else ""
    return ", ".join(names[:number]) + more


LOCK_NAME = ".shardwise-lock"

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF}
_LONGEST = 4096


class FolderLock:
    """A lock on a folder for this process, until ``release`` or the end of a ``with`` block.

    A child process that is forked while the lock is held keeps the lock until it ends. A spawned process does not.
    Missing folders are created, and removed at the release if they are still empty. If another process holds the lock,
    ConfigError names it.

    Args:
        folder: folder to lock.
        name: name of the lock file in the folder.
        what: path to show in messages; None means the folder.
        flag: the user's flag for the folder, for messages.

    Attributes:
        left_by: name of the process that exited without releasing the lock, if any.
    """

    def __init__(self, folder: Path, *, name: str = LOCK_NAME, what: Path | None = None, flag: str = "--out") -> None:
        self.path, self._what = folder / name, what or folder
        self.left_by: str | None = None
        check_folder(folder, flag=flag)
        self._made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._lock(flag)
        except OSError as error:
            self._remove_made()
            raise cannot_write(folder, error.strerror or str(error), flag) from error
        except ConfigError:
            self._remove_made()
            raise

    def _lock(self, flag: str) -> int:
        while True:
            descriptor = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
            )
            try:
                before = _holder(self.path)
                if not _is_free(descriptor, before):
                    raise _in_use(self._what, self.path, before, flag)
                # The previous holder may have removed the file after this process opened it.
                if _is_same_file(descriptor, self.path):
                    self.left_by = _named(before) if before else None
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(_own()).encode() + b"\n", 0)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def release(self) -> None:
        """Release the lock and remove its file."""
        if self._descriptor < 0:
            return
        with suppress(OSError):
            os.unlink(self.path)
        os.close(self._descriptor)
        self._descriptor = -1
        self._remove_made()

    def _remove_made(self) -> None:
        for folder in self._made:
            # A folder that is not empty stays.
            with suppress(OSError):
                folder.rmdir()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def check_free(folder: Path, *, name: str = LOCK_NAME, what: Path | None = None, flag: str = "--out") -> None:
    """Check that no process holds the folder and that it can be written to, without creating or locking anything."""
    check_folder(folder, flag=flag)
    path = folder / name
    # NFS locks only files that are open for writing.
    try:
        with open_regular(path, os.O_RDWR) as descriptor:
            holder = _holder(path)
            if not _is_free(descriptor, holder):
                raise _in_use(what or folder, path, holder, flag)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise cannot_write(folder, f"{path}: {error.strerror}", flag) from error


def lock_of_target(target: Path) -> dict[str, Any]:
    """Return ``FolderLock`` arguments for a folder that appears only when complete: the lock file is next to it."""
    return {"folder": target.parent, "name": f".{target.name}.lock", "what": target, "flag": "folder"}


def check_free_target(target: Path) -> None:
    """Call ``check_free`` for a folder that appears only when complete."""
    check_free(**lock_of_target(Path(os.path.abspath(target))))


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


def _in_use(what: Path, path: Path, holder: dict[str, Any], flag: str) -> ConfigError:
    ours = not holder or holder.get("machine") == machine()
    wait = "wait for it to end" if ours else f"if that run has ended, remove {path}"
    return ConfigError(f"{what} is in use by {_named(holder)}; {wait}, or choose another {flag}")


def _holder(path: Path) -> dict[str, Any]:
    """Return the holder that the lock file names; empty if the file is not valid."""
    try:
        return parse_json(read_regular(path, limit=_LONGEST))
    except (OSError, ValueError):
        return {}


def _is_free(descriptor: int, holder: dict[str, Any]) -> bool:
    """Lock the file and return True if that succeeds; without lock support, return True if the holder is gone."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return not holder or _is_gone(holder)
    return True


def _own() -> dict[str, Any]:
    process = Process.find(os.getpid())
    return {
        "host": socket.gethostname(),
        "machine": machine(),
        "pid": os.getpid(),
        "started": None if process is None else process.started,
    }


def _named(holder: dict[str, Any]) -> str:
    if not holder:
        return "another run"
    return f"process {holder.get('pid')} on host {holder.get('host')}"


def _is_gone(holder: dict[str, Any]) -> bool:
    """True if the holder was a process of this machine that has exited."""
    pid, started = holder.get("pid"), holder.get("started")
    if holder.get("machine") != machine() or type(pid) is not int or not isinstance(started, str):
        return False
    return not Process(pid, started).runs()


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
