"""What the ranks of the launch tests run: ``python rank_program.py BEHAVIOUR FOLDER``.

It imports PyTorch only where the behaviour says so, and so starts at once.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from shardwise.cli import reporting
from shardwise.cli.reporting import run_command
from shardwise.core.errors import ConfigError, LaunchError
from shardwise.run.processes import stopping

RANK = int(os.environ["RANK"])
# Half of what users' ranks have to end by themselves: many tests wait for it. Whoever is to end by itself, or to be
# heard, has as long as it takes.
reporting._HEAR_OTHERS_SECONDS = 1000.0
stopping.GRACE_SECONDS = 1000.0 if sys.argv[1] == "rank_0_sleeps" and RANK == 0 else 1.0


def succeed(folder: Path) -> None:
    (folder / f"rank{RANK}.json").write_text(json.dumps({"argv": sys.argv[1:], "environment": dict(os.environ)}))


def all_mistaken(folder: Path) -> None:
    raise ConfigError("the corpus is empty")


def one_breaks(folder: Path) -> None:
    """Rank 1 has a bug; the others wait for it in a collective."""
    if RANK == 1:
        raise ZeroDivisionError("division\nby zero")
    hang()


def peers_notice(folder: Path) -> None:
    """Rank 1 is killed; the others get an error from their collective at once."""
    if RANK == 1:
        leave_pid(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(folder / "pid1")
    stat = Path(f"/proc/{(folder / 'pid1').read_text()}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.02)
    raise LaunchError("connection closed by peer")


def one_is_killed(folder: Path) -> None:
    """Rank 1 is killed; the others wait for it in a collective."""
    leave_pid(folder)
    if RANK == 1:
        wait_for(folder / "pid0")
        os.kill(os.getpid(), signal.SIGKILL)
    hang()


def one_breaks_among_collectives(folder: Path) -> None:
    """Rank 1 has a bug between two collectives of real groups."""
    import torch
    import torch.distributed as dist

    store = dist.FileStore(os.environ["SHARDWISE_RANK_STORE"])
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)
    try:
        dist.all_reduce(torch.ones(1))
        if RANK == 1:
            raise ZeroDivisionError("division by zero")
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
        if RANK == 1:
            # The other rank hears of it now, and reports first.
            wait_for(Path(os.environ[reporting.REPORTS_VARIABLE]) / "rank0.json")


def one_is_killed_among_collectives(folder: Path) -> None:
    """Rank 1 is killed between two collectives of real groups."""
    import torch
    import torch.distributed as dist

    store = dist.FileStore(os.environ["SHARDWISE_RANK_STORE"])
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)
    dist.all_reduce(torch.ones(1))
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def one_exits(folder: Path) -> None:
    """Rank 1 ends without a word."""
    if RANK == 1:
        os._exit(7)
    hang()


def one_gets_a_signal_without_a_name(folder: Path) -> None:
    """A real-time signal ends rank 1."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGRTMIN + 1)
    hang()


def one_is_told_to_end(folder: Path) -> None:
    """Somebody ends rank 1 alone."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    hang()


def output_closed(folder: Path) -> None:
    """Rank 0 prints where nobody reads."""
    if RANK == 0:
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, sys.stdout.fileno())
        print("x" * 100_000)
    hang()


def rank_0_sleeps(folder: Path) -> None:
    """Rank 0 is in Python code, the others in a collective; both until told to end."""
    leave_pid(folder)
    if RANK != 0:
        hang()
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        (folder / "tidied").touch()
        raise


def hang() -> None:
    """Block as in a collective: in C code, without Python's lock, where signal handlers do not run."""
    library = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(256)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def leave_pid(folder: Path) -> None:
    """Leave this process's number, complete or not at all."""
    (folder / f"new{RANK}").write_text(str(os.getpid()))
    (folder / f"new{RANK}").rename(folder / f"pid{RANK}")


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(run_command("program", lambda: globals()[sys.argv[1]](Path(sys.argv[2]))))
