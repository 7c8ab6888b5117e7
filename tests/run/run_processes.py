"""Whole runs in processes that are started for them, and hashes of all that they leave."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.forked import run_forked

from shardwise.run import run as run_module, session as session_module
from shardwise.run.comparison import results
from shardwise.run.metrics import read_metrics
from shardwise.run.processes import ranks as ranks_module
from shardwise.run.processes.ranks import process_group_of
from shardwise.run.settings import RunSettings
from shardwise.storage.checkpoint.comparing import StoredCheckpoint
from shardwise.training.trainer import Trainer


def run_in_processes(
    settings: RunSettings,
    world_size: int,
    folder: Path,
    *,
    killed_at: int | None = None,
) -> str:
    """Run in so many processes, which end with the run.

    Args:
        settings: of the run.
        world_size: number of processes.
        folder: new, for what they print and where they meet.
        killed_at: the step in which the last of them ends by SIGKILL.

    Returns:
        What the first of them printed.
    """
    folder.mkdir()
    calls = [(settings, rank, world_size, folder / "store", killed_at) for rank in range(world_size)]
    done = run_forked(_run_rank, calls, folder)
    if killed_at is None:
        assert [code for code, _ in done] == [0] * world_size, done
    else:
        assert done[-1][0] == -signal.SIGKILL, done
    return done[0][1]


def hashes(out: Path) -> dict[str, str]:
    """Of a run's folder: what each step and evaluation came to, and each tensor of the newest checkpoint."""
    found = {
        f"{name} of step {row['step']}": float(value).hex()
        for row in read_metrics(out / "metrics.jsonl")
        for name, value in results(row).items()
    }
    newest = StoredCheckpoint(max((out / "checkpoints").iterdir()))
    for name, record in newest.manifest.tensors.items():
        tensor = newest.read(name, [0] * len(record.shape), record.shape)
        content = hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        found[name] = f"{record.dtype} {list(record.shape)} {content.hexdigest()}"
    return found


def _run_rank(
    settings: RunSettings,
    rank: int,
    world_size: int,
    store: Path,
    killed_at: int | None,
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "unused"}
    os.environ["SHARDWISE_CACHE"] = str(store.parent.parent / "cache")

    def join(device: torch.device, **_: Any) -> None:
        # A file for the rendezvous, so that no port is needed.
        meeting = dist.FileStore(str(store), world_size)
        dist.init_process_group(**process_group_of(device, world_size), store=meeting, rank=rank, world_size=world_size)

    ranks_module.join = join
    # They have tests of their own.
    session_module.check_device = lambda *_, **__: None
    run_module.finish = lambda _, outcome: outcome
    step = Trainer.step

    def step_or_die(self: Trainer, number: int, *arguments: Any, **options: Any) -> Any:
        if number == killed_at and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, number, *arguments, **options)

    Trainer.step = step_or_die  # type: ignore[method-assign]
    run_module.run(settings)
