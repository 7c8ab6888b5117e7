"""Folders locked for one run.

A process locks a folder by holding a lock on a file in it. The kernel releases the lock when the process ends, even if
it is killed. The file contains the holder's name. If the file system does not support locks, this name is used instead:
a holder on this machine can be looked up, a holder on another host cannot.
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

from shardwise.core.atomic_files import cannot_write, check_folder, open_regular, read_regular
from shardwise.core.errors import ConfigError
from shardwise.core.json_text import parse_json
from shardwise.core.processes import Process, machine

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
            place = f"{self.path}: " if error.filename == str(self.path) else ""
            raise cannot_write(folder, f"{place}{error.strerror or error}", flag) from error
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
