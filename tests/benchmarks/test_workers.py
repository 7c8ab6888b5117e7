"""Worker processes end together, whatever happens to one of them."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shared_workers import forked_workers
from workers import Workers, WorkerSpec

from shardwise.core.errors import LaunchError


class Echo:
    """An object to hold; leaves a file when it is closed."""

    def __init__(self, folder: Path, name: str, broken: bool = False) -> None:
        if broken:
            raise ValueError("cannot be made")
        self.folder, self.name = folder, name

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def facts(self, value: int) -> tuple[str, int, int, int]:
        return self.name, value, os.getpid(), torch.get_num_threads()

    def fail(self) -> None:
        raise ValueError(f"{self.name} went wrong")

    def die_if(self, name: str) -> None:
        if self.name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    def close(self) -> None:
        (self.folder / self.name).touch()


def specs(folder: Path) -> list[WorkerSpec]:
    return [WorkerSpec(name, threads, Echo, (folder, name)) for name, threads in (("a", 1), ("b", 2))]


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[None]:
    """Workers that start in a moment; the first test starts them as benchmarks do."""
    (tmp_path / "logs").mkdir()
    with forked_workers(tmp_path / "logs" / "log"):
        yield


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_calls_return_in_order_and_workers_leave_in_good_order(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_TEST_KEPT", "kept")
    changed = {"SHARDWISE_TEST_KEPT": "changed", "SHARDWISE_TEST_NEW": "new"}
    a, b = specs(tmp_path)
    with Workers([a, dataclasses.replace(b, environment=changed)]) as workers:
        (name_b, value, pid_b, threads_b), (name_a, _, pid_a, threads_a) = workers.call(["b", "a"], "facts", 7)
        assert (name_a, name_b, value, threads_a, threads_b) == ("a", "b", 7, 1, 2)
        assert workers.call(["a"], "facts", 8)[0][1:3] == (8, pid_a)
        # Its environment is one worker's own.
        assert workers.call(["b", "a"], "variable", "SHARDWISE_TEST_KEPT") == ["changed", "kept"]
        assert workers.call(["b", "a"], "variable", "SHARDWISE_TEST_NEW") == ["new", None]
    assert os.environ["SHARDWISE_TEST_KEPT"] == "kept"
    assert "SHARDWISE_TEST_NEW" not in os.environ
    assert has_ended(pid_a)
    assert has_ended(pid_b)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.usefixtures("forked")
def test_a_failure_is_told_and_ends_all(tmp_path):
    with Workers(specs(tmp_path)) as workers:
        pids = [facts[2] for facts in workers.call(["a", "b"], "facts", 0)]
        with pytest.raises(LaunchError, match=r"(?s)a failed:.*ValueError: a went wrong"):
            workers.call(["a"], "fail")
        assert all(map(has_ended, pids))


@pytest.mark.usefixtures("forked")
def test_a_death_is_told_and_ends_those_that_wait(tmp_path):
    with Workers(specs(tmp_path)) as workers:
        pids = [facts[2] for facts in workers.call(["a", "b"], "facts", 0)]
        with pytest.raises(LaunchError, match=r"^b died with exit code -9$"):
            workers.call(["a", "b"], "die_if", "b")
        assert all(map(has_ended, pids))


@pytest.mark.usefixtures("forked")
def test_a_worker_that_cannot_be_made_is_told(tmp_path):
    with pytest.raises(LaunchError, match=r"(?s)c failed:.*ValueError: cannot be made"):
        Workers([WorkerSpec("c", 1, Echo, (tmp_path, "c", True))])
