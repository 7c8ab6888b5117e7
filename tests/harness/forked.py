"""Start processes with PyTorch already imported, because the import takes longer than many tests."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import pool
from harness.short_samples import shorten_samples
from harness.watchdog import wait_until


def run_forked(
    function: Callable[..., object], calls: Sequence[tuple[Any, ...]], folder: Path, *, all_end: bool = False
) -> list[tuple[int, str]]:
    """Call a function once per tuple of arguments, in parallel processes that the pool's fork server starts.

    When one process has failed, the others are ended, because they may wait for it.
    """
    pool._start_fork_server()
    context = multiprocessing.get_context("forkserver")
    printed = [folder / f"printed-{number}.txt" for number in range(len(calls))]
    processes = [
        context.Process(target=_call, args=(function, arguments, path), daemon=True)
        for arguments, path in zip(calls, printed, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        wait_until(
            lambda: (
                (any(process.exitcode for process in processes) and not all_end)
                or all(process.exitcode is not None for process in processes)
            ),
            "all processes end" if all_end else "all processes end, or one fails",
        )
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [
        (process.exitcode, path.read_text() if path.exists() else "")
        for process, path in zip(processes, printed, strict=True)
    ]


def _call(function: Callable[..., object], arguments: tuple[Any, ...], path: Path) -> None:
    # As in a pool's rank, no collection visits what the fork server imported.
    gc.freeze()
    shorten_samples()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    function(*arguments)
