"""A trace of some steps of a run, by PyTorch's profiler."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shardwise.core.errors import UnwritableError
from shardwise.core.files import write_atomically
from shardwise.run.processes.ranks import Ranks
from shardwise.training.setting_groups import ProfileSettings

_LOGGER = logging.getLogger(__name__)


@contextlib.contextmanager
def profiled(settings: ProfileSettings, folder: Path, ranks: Ranks) -> Iterator[Callable[[], None]]:
    """Trace the steps that ``settings`` ask for, into ``folder/profile/rank-N.json``.

    What cannot be written ends no run: it is said, and the run goes on.

    Args:
        settings: which steps.
        folder: of the run.
        ranks: who this process is.

    Yields:
        A function to be called at the end of each step.
    """
    if not settings.enabled:
        yield lambda: None
        return
    path = folder / "profile" / f"rank-{ranks.rank}.json"
    activities = [ProfilerActivity.CPU]
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    steps: Any = schedule(wait=settings.wait, warmup=settings.warmup, active=settings.active, repeat=1)
    with profile(
        activities=activities, schedule=steps, on_trace_ready=lambda done: _write(done, path), acc_events=True
    ) as profiler:
        yield profiler.step


def _write(profiler: torch.profiler.profile, path: Path) -> None:
    """Complete or absent."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            trace = Path(scratch) / path.name
            profiler.export_chrome_trace(str(trace))
            with trace.open("rb") as source:
                write_atomically(path, lambda file: shutil.copyfileobj(source, file))
    except (OSError, RuntimeError, UnwritableError) as error:
        _LOGGER.warning("the trace %s could not be written: %s", path, error)
