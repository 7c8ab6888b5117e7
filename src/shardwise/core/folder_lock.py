"""One run at a time in a folder: a file there that a living process holds locked.

The kernel releases the lock when the process ends, also when it is killed. The file names the holder. Where a file
system has no locks, that name decides: a process of this machine can be looked up, one of another host cannot.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise.core.errors import ConfigError, UnwritableError
from shardwise.core.files import can_be_a_name, open_regular, parse_json, read_regular
from shardwise.core.processes import Process, machine

LOCK_NAME = ".shardwise-lock"

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF}
_LONGEST = 4096


class FolderLock:
    """A lock of a folder for this process, until ``release`` or the end of a ``with`` block.

    A child that is forked while the lock is held keeps it as long as it lives; one that is started does not.

    Args:
        folder: made if missing, with the folders above it; those that are still empty are removed at the release.
        name: name of the file in it.
        what: path that messages name, if not the folder.
        flag: the user's flag for it, for messages.

    Attributes:
        left_by: name of a process that is gone and did not release the lock, if any.

    Raises:
        ConfigError: another process, which is named, holds it; or the folder cannot be made or written to.
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
                # The holder until now may have removed the file after it was opened here.
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
            # It stays if it is not empty.
            with suppress(OSError):
                folder.rmdir()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def check_free(folder: Path, *, name: str = LOCK_NAME, what: Path | None = None, flag: str = "--out") -> None:
    """Check that no process holds a folder, and that it could be written to, without making or locking anything.

    Raises:
        ConfigError: as for ``FolderLock``.
    """
    check_folder(folder, flag=flag)
    path = folder / name
    with suppress(FileNotFoundError), open_regular(path) as descriptor:
        holder = _holder(path)
        if not _is_free(descriptor, holder):
            raise _in_use(what or folder, path, holder, flag)


def lock_of_target(target: Path) -> dict[str, Any]:
    """Arguments of the lock of a folder that is to appear when it is complete: a file next to it."""
    return {"folder": target.parent, "name": f".{target.name}.lock", "what": target, "flag": "folder"}


def check_free_target(target: Path) -> None:
    """``check_free`` of a folder that is to appear when it is complete."""
    check_free(**lock_of_target(Path(os.path.abspath(target))))


def check_folder(folder: Path, *, flag: str = "--out") -> None:
    """Raise ConfigError unless a folder is there and can be written to, or could be made; nothing is made."""
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
    """The error of a folder that cannot be written to."""
    return UnwritableError(f"cannot write to {str(folder)!r}: {reason}; choose another {flag} or free it")


def _in_use(what: Path, path: Path, holder: dict[str, Any], flag: str) -> ConfigError:
    ours = not holder or holder.get("machine") == machine()
    wait = "wait for it to end" if ours else f"if that run has ended, remove {path}"
    return ConfigError(f"{what} is in use by {_named(holder)}; {wait}, or choose another {flag}")


def _holder(path: Path) -> dict[str, Any]:
    """The holder that the file names; empty if it makes no sense."""
    try:
        return parse_json(read_regular(path, limit=_LONGEST))
    except (OSError, ValueError):
        return {}


def _is_free(descriptor: int, holder: dict[str, Any]) -> bool:
    """True if the file could be locked, and is now; where there are no locks, if its holder is gone."""
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
    """True if the holder was a process of this machine that has ended."""
    pid, started = holder.get("pid"), holder.get("started")
    if holder.get("machine") != machine() or type(pid) is not int or not isinstance(started, str):
        return False
    return not Process(pid, started).runs()


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
