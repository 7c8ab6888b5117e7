"""Pools of ranks: processes that start once per test session and size, and run the bodies of tests.

A rank is a child of multiprocessing's fork server, which has already imported torch. Therefore the rank starts in
milliseconds and shares that memory. Ranks connect through a ``FileStore`` in a temporary folder, without a port.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from harness import worker
from harness.messages import CleanUp, Command, Leave, Reply, RunTest
from harness.report import RankState, describe_failure
from harness.stacks import stacks
from harness.watchdog import WATCHDOG_SECONDS, is_at_work

TEST_TIMEOUT = 120.0
"""Default limit in seconds for the sleep of the ranks of a test, or of the start of a pool.

Time counts only while all unfinished ranks sleep at once. So a deadlock is found soon, but slow ranks, and ranks that a
busy machine does not run, get the time that they need. Ranks that compute forever are ended by ``WATCHDOG_SECONDS``.
"""

GRACE = 1.5
"""Seconds that the other ranks may sleep after one has failed; most of them wait for it in a collective."""

MAX_RANKS = 10
"""Maximum number of ranks over all pools: one pool each of the sizes 1, 2, 3 and 4."""

# Includes the compiler, because torch's checkpointing and optimizers import it at their first use: a second per rank.
_PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "numpy",
    "pytest",
    "hypothesis",
]

# What models and their generation import lazily: a second and a half in each rank that is forked for one run.
_PRELOADED_WITH_TRANSFORMERS = [
    "transformers.modeling_utils",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
]


class RankError(Exception):
    """Raised when a test or the start of a pool failed on some rank. The message is the whole report."""


def _start_fork_server() -> None:
    # Modules of the package that the collected tests have imported here without an error.
    tested = sorted(name for name in sys.modules if name.partition(".")[0] == "shardwise")
    more = _PRELOADED_WITH_TRANSFORMERS if "transformers" in sys.modules else []
    multiprocessing.set_forkserver_preload([*_PRELOADED, *more, *tested])
    # torch and numpy read it at their import. The fork server must have no threads when it forks.
    with _environment("OMP_NUM_THREADS", "1"), _environment("OMP_WAIT_POLICY", "passive"):
        forkserver.ensure_running()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Pool:
    """``size`` connected ranks. A pool is usable until a command fails; then it is closed and replaced."""

    def __init__(self, size: int, *, start_timeout: float = TEST_TIMEOUT) -> None:
        """Start the ranks."""
        self.size = size
        self.usable = True
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))
        self._processes: list[ForkServerProcess] = []
        self._connections: list[connection.Connection] = []
        self._log_offsets = [0] * size
        try:
            _start_fork_server()
            context = multiprocessing.get_context("forkserver")
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=worker.main, args=(rank, size, self._folder, theirs), name=f"rank {rank}", daemon=True
                )
                self._connections.append(ours)
                # The pipe ends when the rank dies only if no copy of the rank's end is open here.
                with theirs:
                    process.start()
                self._processes.append(process)
            try:
                self._wait(start_timeout, "the start of the pool")
            finally:
                printed = self._read_logs()
        except RankError as error:
            self.kill()
            raise RankError(f"{error}\n\nthe ranks printed:\n{printed}") from None
        except BaseException:
            self.kill()
            raise

    def run(self, command: RunTest, timeout: float) -> Reply:
        """Run a test on every rank, and clean up after it.

        The output of the ranks goes to ``sys.stdout``, with the rank at the start of each line.
        """
        try:
            try:
                self._send(command)
                replies = self._wait(timeout, "the test")
                self._send(CleanUp())
                cleaned = self._wait(timeout, "the cleaning up after the test")
            finally:
                sys.stdout.write(self._read_logs())
        except BaseException:
            self.kill()
            raise
        if not all(reply.reusable for reply in cleaned):
            self.close()
        return replies[0]

    def close(self) -> None:
        """Ask the ranks to exit, and kill ranks that do not."""
        self.usable = False
        self._send(Leave())
        end = time.monotonic() + WATCHDOG_SECONDS
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every rank now."""
        self.usable = False
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for ours in self._connections:
            ours.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, command: Command) -> None:
        message = pickle.dumps(command)
        for ours in self._connections:
            # The wait detects a rank that has ended, and knows its exit code.
            with contextlib.suppress(OSError):
                ours.send_bytes(message)

    def _wait(self, timeout: float, doing: str) -> list[Reply]:
        """Collect every rank's reply to the last command."""
        states = [RankState()] * self.size
        waiting = dict(zip(self._connections, range(self.size), strict=True))
        end, slept, limit = time.monotonic() + WATCHDOG_SECONDS, 0.0, timeout
        while waiting and slept < limit and time.monotonic() < end:
            nap = min(limit / 30, 0.5)
            replies = connection.wait(list(waiting), nap)
            for ready in replies:
                assert isinstance(ready, connection.Connection)
                rank = waiting.pop(ready)
                states[rank] = self._receive(rank)
                if states[rank].failed or states[rank].died:
                    limit = min(limit, slept + GRACE)
            if not replies and not any(is_at_work(self._processes[rank].pid) for rank in waiting.values()):
                slept += nap
        for rank, stack in self._stacks(list(waiting.values())).items():
            states[rank] = RankState(stack=stack)
        message = describe_failure(states, timeout if slept >= limit else WATCHDOG_SECONDS, doing)
        if message is not None:
            raise RankError(message)
        return [state.reply for state in states if state.reply is not None]

    def _receive(self, rank: int) -> RankState:
        try:
            return RankState(reply=pickle.loads(self._connections[rank].recv_bytes()))
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(WATCHDOG_SECONDS)
            return RankState(exit_code=process.exitcode, stack=self._read_stack(rank))

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Return the stacks of these ranks; empty for a rank that cannot answer a signal."""
        pids = {rank: self._processes[rank].pid for rank in ranks}
        stacks({pid: worker.stack_file(self._folder, rank) for rank, pid in pids.items() if pid is not None})
        return {rank: self._read_stack(rank) for rank in ranks}

    def _read_stack(self, rank: int) -> str:
        """Return the last stack in the rank's stack file, up to the frame called by the harness."""
        path = worker.stack_file(self._folder, rank)
        text = path.read_text() if path.exists() else ""
        above = text.partition(f'  File "{worker.__file__}"')[0].rstrip()
        # A rank that is stuck in the harness itself has no other frames.
        return above if "  File " in above else text.rstrip()

    def _read_logs(self) -> str:
        """Return the output of the ranks since the last call."""
        lines = []
        for rank in range(self.size):
            path = worker.log_file(self._folder, rank)
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._log_offsets[rank])
                data = file.read()
            self._log_offsets[rank] += len(data)
            for line in data.decode(errors="replace").splitlines():
                # gloo prints a line for every group that it connects.
                if not line.startswith("[Gloo] Rank "):
                    lines.append(f"[rank {rank}] {line}\n")  # noqa: PERF401
        return "".join(lines)


class Pools:
    """The pools of one test session, one per size, the least recently used first."""

    def __init__(self, max_ranks: int = MAX_RANKS) -> None:
        self._max_ranks = max_ranks
        self._pools: dict[int, Pool] = {}

    def run(self, size: int, command: RunTest, timeout: float) -> Reply:
        """Run a test on a pool of the given size, like ``Pool.run``."""
        pool = self._pools.pop(size, None)
        if pool is None:
            while self._pools and sum(self._pools) + size > self._max_ranks:
                self._pools.pop(next(iter(self._pools))).close()
            pool = Pool(size)
        try:
            return pool.run(command, timeout)
        finally:
            if pool.usable:
                self._pools[size] = pool

    def close(self) -> None:
        """Close all pools."""
        while self._pools:
            self._pools.popitem()[1].close()
