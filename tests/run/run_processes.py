"""Whole runs and commands in processes that are started for them, and hashes of all that runs leave.

The processes are forked with PyTorch imported, so they start in a moment. A test of the launcher or of the start of a
program uses ``harness.program``.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from harness.forked import run_forked

from shardwise.cli.main import main
from shardwise.doctor.comparison import results
from shardwise.run import run as run_module, session as session_module
from shardwise.run.metrics import read_metrics
from shardwise.run.processes import ranks as ranks_module
from shardwise.run.settings import RunSettings
from shardwise.storage.checkpoint.comparing import StoredCheckpoint
from shardwise.training.trainer import Trainer


def run_in_processes(settings: RunSettings, world_size: int, folder: Path, *, killed_at: int | None = None) -> str:
    """Run in so many processes, which end with the run."""
    folder.mkdir()
    calls = [(settings, rank, world_size, folder / "store", killed_at) for rank in range(world_size)]
    done = run_forked(_run_rank, calls, folder)
    if killed_at is None:
        assert [code for code, _ in done] == [0] * world_size, done
    else:
        assert done[-1][0] == -signal.SIGKILL, done
    return done[0][1]


def run_command(folder: Path, world_size: int, *argv: object, **options: Any) -> tuple[str, str]:
    """Run ``shardwise ARGUMENTS`` in so many processes, as its launcher starts them; return what they printed."""
    ended = run_commands(folder, [argv] * world_size, **options)
    assert [code for code, _, _ in ended] == [0] * world_size, ended
    return "".join(out for _, out, _ in ended), "".join(error for _, _, error in ended)


def run_commands(
    folder: Path,
    argvs: Sequence[Sequence[object]],
    *,
    changed: Callable[[], object] | None = None,
    pictures: bool = False,
    **variables: object,
) -> list[tuple[int, str, str]]:
    """Run ``shardwise ARGUMENTS`` with each rank's own arguments until all ranks have ended."""
    own = folder / f"ranks-{len(list(folder.glob('ranks-*')))}"
    own.mkdir()
    given = {"SHARDWISE_CACHE": str(folder / "cache")} | {name: str(value) for name, value in variables.items()}
    errors = [own / f"error-{rank}.txt" for rank in range(len(argvs))]
    calls = [
        (list(map(str, argv)), rank, len(argvs), own / "store", errors[rank], given, changed, pictures)
        for rank, argv in enumerate(argvs)
    ]
    done = run_forked(_run_command, calls, own, all_end=True)
    return [
        (code, _without_gloo(out), _without_gloo(path.read_text(encoding="utf-8")))
        for (code, out), path in zip(done, errors, strict=True)
    ]


def _without_gloo(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))


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


def _run_rank(settings: RunSettings, rank: int, world_size: int, store: Path, killed_at: int | None) -> None:
    os.environ["SHARDWISE_CACHE"] = str(store.parent.parent / "cache")
    be_rank(rank, world_size, store)
    # They have tests of their own.
    mock.patch.object(session_module, "check_device").start()
    mock.patch.object(run_module, "finish", side_effect=lambda _, outcome: outcome).start()
    step = Trainer.step

    def step_or_die(self: Trainer, number: int, *arguments: Any, **options: Any) -> Any:
        if number == killed_at and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, number, *arguments, **options)

    Trainer.step = step_or_die  # type: ignore[method-assign]
    run_module.run(settings)


def _run_command(
    argv: list[str],
    rank: int,
    world_size: int,
    store: Path,
    error: Path,
    variables: dict[str, str],
    changed: Callable[[], object] | None,
    pictures: bool,
) -> NoReturn:
    file = os.open(error, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 2)
    os.close(file)
    os.environ |= variables
    if not pictures:
        sys.modules["matplotlib"] = None  # type: ignore[assignment]
    be_rank(rank, world_size, store)
    if changed is not None:
        changed()
    sys.exit(main(argv))


def be_rank(rank: int, world_size: int, store: Path) -> None:
    """Make this process one of the ranks of a launcher."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "unused"}

    # A file for the rendezvous, so that no port is needed.
    meeting = mock.patch.object(ranks_module, "meet", side_effect=lambda *_: dist.FileStore(str(store), world_size))
    meeting.start()
