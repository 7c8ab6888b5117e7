"""Processes of this machine, their temporary files, and switches in the environment.

A process that is killed leaves its temporary files. The name of each has its process, so that the next process can tell
files of living processes from those of dead ones. A switch is a variable that is 0 or 1; another value is an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardwise.core.errors import ConfigError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OWNED = re.compile(r"(?:\..+\.)?shardwise-[a-z]+-([0-9a-f]{8})-(\d+)-(\d+)-.*")


@dataclass(frozen=True)
class Process:
    """A process of this machine, told apart from a later one of the same number by when it started."""

    pid: int
    started: str

    @classmethod
    def find(cls, pid: int) -> Process | None:
        """The process ``pid`` if it runs; None if it is gone, or dead and not yet collected by its parent."""
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else cls(pid, fields[19])

    def runs(self) -> bool:
        """True if it has not ended."""
        return Process.find(self.pid) == self


@cache
def machine() -> str | None:
    """Eight digits, the same for processes of one boot in one namespace of process numbers; None without /proc."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return hashlib.sha256(f"{_BOOT_ID.read_text().strip()} {namespace}".encode()).hexdigest()[:8]
    except OSError:
        return None


def temporary_prefix(kind: str) -> str:
    """Prefix of the name of a temporary file or folder of this process; ``kind`` is its purpose, in small letters."""
    own = Process.find(os.getpid())
    return f"shardwise-{kind}-" if own is None else f"shardwise-{kind}-{machine()}-{own.pid}-{own.started}-"


def clear_leftovers(folders: Iterable[str | os.PathLike[str]] | None = None) -> None:
    """Remove the files of this user's processes that are gone.

    Args:
        folders: folders to look in; those of temporary files and of shared memory if None.
    """
    for folder in {tempfile.gettempdir(), "/dev/shm"} if folders is None else folders:
        with suppress(OSError):
            for entry in list(os.scandir(folder)):
                match = _OWNED.fullmatch(entry.name)
                if match is not None and match[1] == machine() and not Process(int(match[2]), match[3]).runs():
                    with suppress(OSError):
                        _remove(entry)


def _remove(entry: os.DirEntry[str]) -> None:
    status = entry.stat(follow_symlinks=False)
    if status.st_uid != os.getuid():
        return
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(entry.path)
    else:
        os.unlink(entry.path)


SHARED_MEMORY, ONEDNN = "SHARDWISE_SHARED_MEMORY", "SHARDWISE_ONEDNN"
TRITON, CUDA_GRAPHS = "SHARDWISE_TRITON", "SHARDWISE_CUDA_GRAPHS"

_ON_IF_NOT_SET = {SHARED_MEMORY: True, ONEDNN: True, TRITON: True, CUDA_GRAPHS: False}


def is_on(name: str) -> bool:
    """True if a switch is 1; its default if the variable is not set, or empty.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"the environment has {name}={value}, which must be 0 or 1; change it, or unset it")
    return value == "1" if value else _ON_IF_NOT_SET[name]


def check_switches() -> None:
    """Raise ConfigError unless each switch is 0 or 1."""
    for name in _ON_IF_NOT_SET:
        is_on(name)
