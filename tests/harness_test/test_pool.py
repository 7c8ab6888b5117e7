"""The bookkeeping of pools, their start and their end."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import plugin
from harness.messages import CleanUp
from harness.pool import Pool, Pools, RankError
from harness.program import Program
from harness.watchdog import wait_until_ended
from harness.worker import log_file

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def test_bare(group): pass", "*needs the mark ranks*"),
        ("import pytest\n@pytest.mark.ranks(0)\ndef test_none(group): pass", "*must be ranks(size, ...)*"),
        ("import pytest\n@pytest.mark.ranks(2, time=1)\ndef test_time(group): pass", "*must be ranks(size, ...)*"),
        ("import pytest\n@pytest.mark.ranks(2, slow=(3,))\ndef test_other(group): pass", "*slow=(size, ...) of some*"),
        ("import pytest\n@pytest.mark.ranks(2, slow=(2,))\ndef test_all(group): pass", "*slow=(size, ...) of some*"),
    ],
)
def test_misuse(pytester, text, message):
    pytester.makepyfile(text)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", plugins=[plugin])
    result.stdout.fnmatch_lines([message])
    assert result.ret != 0


@pytest.mark.slow
def test_ranks_that_do_not_arrive_in_time(tmp_path):
    with pytest.raises(RankError, match=r"^ranks 0, 1 of 2 still in the start of the pool at its time limit of 0 s"):
        Pool(2, start_timeout=0)


def leave_at_once(rank, size, folder, connection):
    log_file(folder, rank).write_text("no such network\n")
    sys.exit(4)


def test_ranks_that_cannot_start(monkeypatch):
    monkeypatch.setattr("harness.worker.main", leave_at_once)
    with pytest.raises(RankError) as info:
        Pool(1)
    assert str(info.value).startswith("rank 0 of 1 ended its process with exit code 4 during the start of the pool\n")
    assert str(info.value).endswith("the ranks printed:\n[rank 0] no such network\n")


class FakePool:
    """Stands for a pool in the bookkeeping of pools."""

    alive: list["FakePool"]

    def __init__(self, size):
        self.size = size
        self.usable = True
        self.alive.append(self)

    def run(self, command, timeout):
        return None

    def close(self):
        self.alive.remove(self)


@pytest.mark.slow
def test_the_least_recently_used_pools_make_room(monkeypatch):
    FakePool.alive = []
    monkeypatch.setattr("harness.pool.Pool", FakePool)
    pools = Pools(max_ranks=6)
    for size, expected in [(1, [1]), (2, [1, 2]), (4, [2, 4]), (2, [2, 4]), (1, [2, 1]), (6, [6]), (8, [8])]:
        pools.run(size, CleanUp(), timeout=1)
        assert [pool.size for pool in FakePool.alive] == expected
    pools.close()
    assert FakePool.alive == []


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes through /proc")
def test_no_rank_outlives_pytest(tmp_path):
    kills = (signal.SIGKILL, signal.SIGINT)
    # Short names: a socket's path must be.
    folders = [tmp_path / str(int(kill)) for kill in kills]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor() as threads:
        list(threads.map(kill_pytest, folders, kills))


def kill_pytest(tmp_path, kill):
    # Without the compiler, which no rank here needs and which takes seconds to import.
    (tmp_path / "conftest.py").write_text(
        (TESTS / "conftest.py").read_text() + "\nfrom harness import pool\npool._PRELOADED = ['torch.distributed']\n"
    )
    (tmp_path / "temporary").mkdir()
    (tmp_path / "test_sleep.py").write_text(
        "import os, pathlib, time, pytest\n"
        "@pytest.mark.ranks(2)\n"
        "def test_sleep(group):\n"
        "    pathlib.Path(f'pid{group.rank()}').write_text(str(os.getppid()) + ' ' + str(os.getpid()))\n"
        "    time.sleep(1000)\n"
    )
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    with Program(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)),
        folder=tmp_path,
        PYTHONPATH=TESTS,
        TMPDIR=tmp_path / "temporary",
    ) as process:
        process.wait_until(lambda: all(file.exists() and file.read_text() for file in files), "both ranks sleep")
        pids = {int(pid) for file in files for pid in file.read_text().split()}
        assert len(pids) == 3
        # Ctrl-C reaches the ranks too; SIGKILL pytest alone.
        if kill is signal.SIGINT:
            process.interrupt()
        else:
            process.kill()
        process.finish(exit_code=2 if kill is signal.SIGINT else -signal.SIGKILL)
        wait_until_ended(*pids)
    assert not list((tmp_path / "temporary").glob("shardwise-ranks-*"))


def test_closing_is_silent(tmp_path):
    pool = Pool(2)
    # The log goes with the folder, so it is held open.
    with log_file(pool._folder, 0).open() as log:
        pool.close()
        assert [line for line in log if not line.startswith("[Gloo]")] == []
    assert [process.exitcode for process in pool._processes] == [0, 0]
