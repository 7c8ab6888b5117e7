"""Other users and other hosts: what they reach of a program on this machine."""

from __future__ import annotations

import base64
import datetime
import os
import pickle
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from harness.program import Program, run

from shardwise.core.sockets import own_inodes, sockets

pytestmark = pytest.mark.slow

SIZES = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 300, "sequence_length": 16}
FLAGS = [word for name, size in SIZES.items() for word in (f"--model.{name.replace('_', '-')}", str(size))]
TRAIN = ["train", "--data", "text.txt", "--device", "cpu", "--tp", "2", "--training.global-batch-size", "2", *FLAGS]
# An interface that the machine has besides loopback; where there is none, loopback's own name.
OUTSIDE = next((name.name for name in Path("/sys/class/net").glob("*") if name.name != "lo"), "lo")
SCRIPT = f"""
from shardwise.run import train

train("text.txt", out="again", device="cpu", model={SIZES!r}, parallel={{"tp": 2}},
      training={{"steps": 2, "global_batch_size": 2}})
"""
CALLS = (
    SCRIPT.replace("from shardwise.run", "from shardwise import on_ranks\nfrom shardwise.run")
    .replace("train(", "def job():\n    train(", 1)
    .replace("again", "called")
)
CALLS += """
if __name__ == "__main__":
    on_ranks(job, nproc=2, join=False)
"""
# Ranks listen for seconds. Looking at all processes without a pause would take a core from them.
_PAUSE = 0.2
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and scripts."""
    folder = tmp_path_factory.mktemp("strangers")
    (folder / "text.txt").write_text("".join(f"{number} small things stand here. " for number in range(300)))
    (folder / "script.py").write_text(SCRIPT)
    (folder / "calls.py").write_text(CALLS)
    (folder / "alone.py").write_text(SCRIPT.replace('"tp": 2', '"tp": 1').replace("again", "alone"))
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> None:
    """Train the model ``run`` in the folder."""
    command = ["-m", "shardwise", *TRAIN, "--training.steps", "2", "--out", "run"]
    run(*command, folder=folder, SHARDWISE_CACHE=folder / "cache", OMP_NUM_THREADS="1")


def listening(program: Program, *, but: int | None = None) -> set[tuple[str, int]]:
    """Return the addresses and ports at which the processes of a program listen, except those of one process.

    Between fork and exec, a process that it starts has its sockets too.
    """
    inodes = {inode for pid in program.processes() if pid != but for inode in own_inodes(pid)}
    inodes -= set() if but is None else set(own_inodes(but))
    return {(str(each.here[0]), each.here[1]) for each in sockets() if each.listens and each.inode in inodes}


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "shardwise", *TRAIN, "--training.steps", "3", "--out", "other"],
        # The ranks of these meet as those of train do.
        pytest.param(
            ["-m", "shardwise", "generate", "run", "--prompt", "1 small", "--tp", "2", "--device", "cpu"],
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            ["-m", "shardwise", "doctor", *TRAIN, "--training.steps", "2", "--out", "examined"],
            marks=pytest.mark.matrix,
        ),
        pytest.param(["-m", "shardwise", "conformance", "--case", "adapters/column_factors"], marks=pytest.mark.matrix),
        [*TORCHRUN, "script.py"],
        ["alone.py"],
        pytest.param(["calls.py"], marks=pytest.mark.matrix),
    ],
    ids=["train", "generate", "doctor", "conformance", "functions", "one rank", "on_ranks"],
)
def test_ranks_of_one_machine_listen_on_loopback_only(
    folder: Path, command: list[str], request: pytest.FixtureRequest
) -> None:
    if "generate" in command:
        request.getfixturevalue("trained")
    seen: set[tuple[str, int]] = set()
    words = [sys.executable, *command]
    # For the hosts of a cluster; these ranks need none.
    chosen = {"GLOO_SOCKET_IFNAME": OUTSIDE, "NCCL_SOCKET_IFNAME": OUTSIDE}
    with Program(*words, folder=folder, SHARDWISE_CACHE=folder / "cache", OMP_NUM_THREADS="1", **chosen) as program:
        # The store of torchrun is PyTorch's, and docs/first-gpu.md says what listens.
        but = program.pid if command[:2] == TORCHRUN[:2] else None
        while program.returncode is None:
            seen |= listening(program, but=but)
            time.sleep(_PAUSE)
        program.finish()
    assert {address for address, _ in seen} <= {"127.0.0.1", "::1"}
    # One rank may end between two looks.
    assert seen or command == ["alone.py"]


class Write:
    """A pickle that makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._folder),)


def test_nothing_that_others_put_into_a_store_is_unpickled(folder: Path, tmp_path: Path) -> None:
    """Whoever finds a store at a port of the program puts a pickle under the name of its rendezvous."""
    mark, tried = tmp_path / "mark", set()
    command = ["-m", "shardwise", *TRAIN, "--training.steps", "3", "--out", "attacked"]
    with Program(*command, folder=folder, SHARDWISE_CACHE=folder / "cache", OMP_NUM_THREADS="1") as program:
        own = f"torch.rendezvous.shardwise-{program.pid}"
        while program.returncode is None and not mark.exists():
            inodes = own_inodes(program.pid)
            ports = {each.here[1] for each in sockets() if each.listens and each.inode in inodes}
            for port in ports - tried:
                with suppress(Exception):
                    store = dist.TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=3))
                    store.wait([own])
                    store.set(own, base64.b64encode(pickle.dumps(Write(mark))))
                tried.add(port)
            time.sleep(_PAUSE)
        assert not mark.exists()
        program.finish()
    assert not tried, "nobody has to reach the launcher"
