"""Processes of this machine, their temporary files, and switches in environment variables.

A killed process leaves its temporary files behind. The name of each file identifies its process, so that a later
process can tell files of running processes from stale files. A switch is an environment variable with the value 0 or 1;
any other value is an error.
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
    """A process of this machine, identified by its PID and its start time, since PIDs are reused."""

    pid: int
    started: str

    @classmethod
    def find(cls, pid: int) -> Process | None:
        """Return the process ``pid`` if it runs; None if it has exited or is a zombie."""
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else cls(pid, fields[19])

    def runs(self) -> bool:
        """True if the process is still running."""
        return Process.find(self.pid) == self


@cache
def machine() -> str | None:
    """Return eight digits that identify the boot and the PID namespace of this process; None without /proc."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return hashlib.sha256(f"{_BOOT_ID.read_text().strip()} {namespace}".encode()).hexdigest()[:8]
    except OSError:
        return None


def temporary_prefix(kind: str) -> str:
    """Return the name prefix of this process's temporary files; ``kind`` is their purpose, in lower-case letters."""
    own = Process.find(os.getpid())
    return f"shardwise-{kind}-" if own is None else f"shardwise-{kind}-{machine()}-{own.pid}-{own.started}-"


def clear_leftovers(folders: Iterable[str | os.PathLike[str]] | None = None) -> None:
    """Remove the temporary files of this user's processes that have exited.

    Args:
        folders: folders to search; None means the folders of temporary files and of shared memory.
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
    """True if a switch is 1. An unset or empty variable has the switch's default.

    Raises:
        ConfigError: the value is neither 0 nor 1.
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"the environment has {name}={value}, which must be 0 or 1; change it, or unset it")
    return value == "1" if value else _ON_IF_NOT_SET[name]


def check_switches() -> None:
    """Raise ConfigError unless each switch is 0 or 1."""
    for name in _ON_IF_NOT_SET:
        is_on(name)
