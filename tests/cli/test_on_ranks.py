"""A function on several ranks of this machine: what it gets, returns, prints and raises."""

import os
import subprocess
import sys
import threading

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from harness.program import run

from shardwise import on_ranks
from shardwise.core.errors import ConfigError, DataError, LaunchError

# As in a notebook, nothing here can be imported by another process.
PROGRAM = """
import torch, torch.distributed as dist
from shardwise import Topology, on_ranks

class Sum:
    def __init__(self, value): self.value = value

ten = 10.0

def work(x):
    group = Topology.create(tp=2).group("tp")
    rank = group.rank()
    print(f"rank {rank} has {x.tolist()}")
    x = x * (ten + rank)
    dist.all_reduce(x, group=group)
    return Sum(x), rank

results = on_ranks(work, torch.ones(2), nproc=2, device="cpu")
assert [rank for _, rank in results] == [0, 1]
assert all(type(each) is Sum and each.value.tolist() == [21.0, 21.0] for each, _ in results)
assert not dist.is_initialized()
"""


@pytest.mark.slow
def test_a_function_of_a_script_reaches_the_ranks_and_its_results_come_back(tmp_path):
    """Its globals, its classes and tensors too; the program is a folder's, whose modules the ranks find."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    done = run("-u", tmp_path / "program.py")
    assert sorted(done.stdout.splitlines()) == ["rank 0 has [1.0, 1.0]", "rank 1 has [1.0, 1.0]"]


def fail(kind):
    if dist.get_rank() == 1:
        raise kind("rank 1 has no data")
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DataError, ZeroDivisionError])
def test_the_error_of_the_rank_that_failed_first_is_raised_here_with_its_trace(kind):
    with pytest.raises(kind, match=r"^rank 1 has no data") as info:
        on_ranks(fail, kind, device="cpu")
    assert info.value.__notes__[-1].startswith("on rank 1:\nTraceback")
    assert "in fail" in info.value.__notes__[-1]


@pytest.fixture
def by_value():
    """Send functions of this module by value: ranks that imported it would import PyTorch."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


class UnmadeError(Exception):
    def __init__(self, number, reason):
        super().__init__(f"{number} {reason}")


def end(how):
    assert "torch" not in sys.modules
    if how == "killed":
        os.kill(os.getpid(), 9)
    if how == "unmade":
        raise UnmadeError(3, "wishes")
    return threading.Lock()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("killed", LaunchError, r"^rank 0 \(pid \d+\) was killed by SIGKILL"),
        ("unmade", LaunchError, "^UnmadeError: 3 wishes\n"),
        ("lock", ConfigError, "^the result of end cannot be copied to another process"),
    ],
)
@pytest.mark.usefixtures("by_value")
def test_an_end_without_a_result_says_why(how, error, message):
    """Without joining, ranks import no PyTorch."""
    with pytest.raises(error, match=message):
        on_ranks(end, how, nproc=1, join=False)


def leave():
    """Leave a process that holds this one's output."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid


@pytest.mark.slow
@pytest.mark.usefixtures("by_value")
def test_a_process_that_a_rank_leaves_holds_nothing_up():
    (pid,) = on_ranks(leave, nproc=1, join=False)
    os.kill(pid, 9)


def test_what_cannot_be_sent_or_started_is_refused_before_ranks_start(monkeypatch):
    with pytest.raises(ConfigError, match=r"^end or one of its arguments cannot be copied .*_thread.lock"):
        on_ranks(end, threading.Lock())
    with pytest.raises(ConfigError, match=r"^nproc is 0; it must be from 1 to 1,024"):
        on_ranks(end, nproc=0)
    with pytest.raises(ConfigError, match=r"^device is 'gpu'"):
        on_ranks(torch.ones, 2, device="gpu")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="this process is rank 1 of 2 already"):
        on_ranks(end, "lock")
