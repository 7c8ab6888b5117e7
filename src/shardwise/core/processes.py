"""Processes of this machine, their temporary files, and switches in environment variables.

A killed process leaves its temporary files behind. The name of each file identifies its process, so that a later
process can tell files of running processes from stale files. A switch is an environment variable with the value 0 or 1;
any other value is an error.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import pickle
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from shardwise.core.errors import ConfigError, ShardwiseError

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

    None means the folders of temporary files and of shared memory.
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


def loopback_interface() -> str | None:
    """Return the name of the loopback interface; None if there is none."""
    return next((name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)), None)


STORE_VARIABLE = "SHARDWISE_RANK_STORE"
"""Environment variable: the file in which the ranks that our launcher started meet."""

SHARED_MEMORY, ONEDNN = "SHARDWISE_SHARED_MEMORY", "SHARDWISE_ONEDNN"
TRITON, CUDA_GRAPHS = "SHARDWISE_TRITON", "SHARDWISE_CUDA_GRAPHS"

_ON_IF_NOT_SET = {SHARED_MEMORY: True, ONEDNN: True, TRITON: True, CUDA_GRAPHS: False}


def is_on(name: str) -> bool:
    """True if a switch is 1, which must be 0 or 1; an unset or empty variable has the switch's default."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"the environment has {name}={value}, which must be 0 or 1; change it, or unset it")
    return value == "1" if value else _ON_IF_NOT_SET[name]


def check_switches() -> None:
    """Raise ConfigError unless each switch is 0 or 1."""
    for name in _ON_IF_NOT_SET:
        is_on(name)


_ANSWER = "from shardwise.core.processes import answer_call; answer_call()"


def call_in_fresh_process(function: str, *args: Any, timeout: float | None = None) -> Any:
    """Call a function in a new Python process, without this process's groups and limit of memory.

    ``function`` is a module and a name, such as ``"shardwise.plan.plan:make_plan"``. A ShardwiseError that it raises
    is raised here; RuntimeError with the last printed line if the process failed or did not end within ``timeout``
    seconds.
    """
    request = pickle.dumps((list(sys.path), function, args))
    options: dict[str, Any] = {"input": request, "capture_output": True, "timeout": timeout, "check": False}
    try:
        # Without -P, modules of the current folder would hide those of Python.
        done = subprocess.run([sys.executable, "-P", "-c", _ANSWER], preexec_fn=_lift_limit, **options)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    if done.returncode:
        raise RuntimeError((done.stderr.decode(errors="replace").strip() or "it printed nothing").splitlines()[-1])
    succeeded, value = pickle.loads(done.stdout)
    if not succeeded:
        raise value
    return value


_T = TypeVar("_T")
_R = TypeVar("_R")


def in_forks(function: Callable[[_T], _R], arguments: Sequence[_T]) -> list[_R]:
    """Call a function of one argument with each of ``arguments``, on all cores; return the results in their order.

    The processes are forks of this one, which need not import or pickle what the function holds; its results are
    pickled. This process calls the function itself on one core, in a process group, where it may not start others, and
    where a system cannot fork. The exception of the first argument that fails is raised.
    """
    # Only plans need these modules, and every command imports this one.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    groups = sys.modules.get("torch.distributed")
    is_rank = groups is not None and groups.is_initialized()
    number = min(len(os.sched_getaffinity(0)), len(arguments))
    if number > 1 and not is_rank and not multiprocessing.current_process().daemon:
        # A fork has no threads but its own. An unreachable process group of gloo would wait for its threads forever
        # when a fork collects it, so this process collects it before, and forks keep what they inherit.
        gc.collect()
        try:
            with ProcessPoolExecutor(number, multiprocessing.get_context("fork"), _keep_function, (function,)) as pool:
                return list(pool.map(_call_kept_function, arguments))
        except RuntimeError as error:
            # PyTorch's autograd has threads after a backward on a machine with GPUs, and refuses to run in a fork.
            if "fork" not in str(error):
                raise
    return [function(argument) for argument in arguments]


_kept: list[Callable[[Any], Any]] = []


def _keep_function(function: Callable[[Any], Any]) -> None:
    gc.freeze()
    _kept.append(function)


def _call_kept_function(argument: Any) -> Any:
    return _kept[-1](argument)


def answer_call() -> None:
    """Answer ``call_in_fresh_process`` in the new process."""
    path, function, args = pickle.load(sys.stdin.buffer)
    sys.path[:] = path
    with os.fdopen(os.dup(1), "wb") as answer:
        # The output of the function is not part of the answer.
        os.dup2(2, 1)
        module, _, name = function.partition(":")
        try:
            result = True, getattr(importlib.import_module(module), name)(*args)
        except ShardwiseError as error:
            result = False, error
        answer.write(pickle.dumps(result))


def _lift_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
