"""The message of a run that is out of memory: its plan, and the smallest change that fits."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.core.errors import OutOfMemoryError, ShardwiseError
from shardwise.core.processes import call_in_fresh_process
from shardwise.models.config import ModelConfig
from shardwise.run.processes.ranks import Ranks
from shardwise.run.quantities import shown_bytes
from shardwise.run.settings import RunSettings
from shardwise.training.bounds import launcher_number

_SIGNS = ("DefaultCPUAllocator", "out of memory", "bad_alloc", "ALLOC_FAILED")
_REMEDY = "Use a smaller --training.micro-batch-size, shorter samples, or --recompute.granularity full."
# The other ranks wait for this one.
_SECONDS = 30


def is_out_of_memory(error: BaseException) -> bool:
    """True for an error of PyTorch, Python or the system for lack of memory."""
    if isinstance(error, ShardwiseError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@dataclass(frozen=True)
class MemoryShortage:
    """The message of a rank that runs out of memory."""

    settings: RunSettings
    model: ModelConfig
    ranks: Ranks
    available: int

    @classmethod
    def of(cls, settings: RunSettings, model: ModelConfig, ranks: Ranks) -> MemoryShortage:
        """Measure this rank's memory before its model is built."""
        return cls(settings, model, ranks, available_memory(ranks.device))

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Convert an out-of-memory error in the block to an OutOfMemoryError with the run's requirements."""
        try:
            yield
        except (MemoryError, RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            # Clear the failed frames, which still hold tensors, to free memory for the plan.
            traceback.clear_frames(error.__traceback__)
            raise OutOfMemoryError(self._message(error), self._details()) from error

    def _message(self, error: BaseException) -> str:
        asked = re.search(r"tried to allocate ([\d.]+ ?\w+)", str(error), re.IGNORECASE)
        more = f", which asked for {_readable(asked[1])} more" if asked else ""
        there = f"; the run has about {shown_bytes(self.available)} here" if self.available else ""
        return f"out of memory on a rank{more}{there}"

    def _details(self) -> str:
        """The plan and the remedy, by a fresh process: this one is a rank, and short of memory."""
        facts = self.settings, self.model, self.ranks.device.type, self.ranks.world_size, self.available
        try:
            text: str = call_in_fresh_process("shardwise.plan.advice:advice", *facts, timeout=_SECONDS)
        except (ShardwiseError, RuntimeError) as error:
            return f"There is no plan of it ({error}). {_REMEDY}"
        return text


def available_memory(device: torch.device) -> int:
    """Return the number of bytes that this rank may use from now on.

    On a GPU, its whole memory. On a CPU, the rest of the limit of the process (``ulimit -v``), or its share of the
    machine's memory.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return max(0, limit - _mapped())
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _ranks_of_host()


def memory_for_copies() -> int | None:
    """Return the number of bytes of host memory that this rank may take for copies; None if it is unknown.

    The ranks of a host share half of what is free, within the limit of their control group (of a container) too.
    """
    lines = _read("/proc/meminfo").splitlines()
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        # The system gives back what files are cached in.
        statistics = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
        free.append(int(limit) - int(used) + int(statistics.get("file", 0)))
    return max(0, min(free)) // 2 // _ranks_of_host() if free else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _ranks_of_host() -> int:
    return launcher_number("LOCAL_WORLD_SIZE") or launcher_number("WORLD_SIZE") or 1


def _mapped() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _readable(size: str) -> str:
    number, _, unit = size.partition(" ")
    return shown_bytes(int(number)) if unit == "bytes" and number.isdecimal() else size
