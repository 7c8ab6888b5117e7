"""Worker processes for benchmarks: each holds one object and runs its methods when asked.

An idle worker blocks on its pipe and uses no processor time, so workers that take turns do not disturb each other.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from shardwise.core.errors import LaunchError

# Once a worker has failed, those that wait for it fail within moments; the report names all of them.
_GRACE_SECONDS = 2.0
# Far more than it takes, also on a busy machine.
_LEAVE_SECONDS = 600.0


@dataclass(frozen=True)
class WorkerSpec:
    """How to start one worker.

    Attributes:
        name: for calls and messages.
        num_threads: threads of its computation.
        factory: makes the worker's object; importable by name. The object has ``close()``.
        arguments: of ``factory``.
        environment: variables that it starts with, besides those of this process.
    """

    name: str
    num_threads: int
    factory: Callable[..., Any]
    arguments: tuple[Any, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class Workers:
    """Started worker processes; a context manager that ends them all.

    A worker that fails or dies ends all the others. A worker whose parent is gone ends by itself, when what it is
    running is done.

    Args:
        specs: one per worker.

    Raises:
        LaunchError: a worker could not be started.
    """

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self._processes: dict[str, SpawnProcess] = {}
        self._connections: dict[str, Connection] = {}
        context = multiprocessing.get_context("spawn")
        try:
            for spec in specs:
                ours, theirs = context.Pipe()
                self._connections[spec.name] = ours
                process = context.Process(target=_serve, args=(theirs, spec), name=spec.name, daemon=True)
                # OpenMP reads its settings when the worker imports torch.
                with theirs, _environment({"OMP_NUM_THREADS": str(spec.num_threads), **spec.environment}):
                    process.start()
                self._processes[spec.name] = process
            self._collect(list(self._connections))
        except BaseException:
            self.kill()
            raise

    def call(self, names: Sequence[str], method: str, *arguments: Any) -> list[Any]:
        """Run a method in several workers at once.

        Args:
            names: the workers.
            method: of their objects.
            *arguments: of the method.

        Returns:
            What each returned, in the order of ``names``.

        Raises:
            LaunchError: a worker failed or died; all are ended.
        """
        try:
            for name in names:
                # A worker that is gone is found by the collection, which knows its exit code.
                with contextlib.suppress(OSError):
                    self._connections[name].send((method, arguments))
            results = self._collect(names)
        except BaseException:
            self.kill()
            raise
        return [results[name] for name in names]

    def close(self) -> None:
        """Let the workers leave; end those that do not."""
        for ours in self._connections.values():
            with contextlib.suppress(OSError):
                ours.send(None)
        deadline = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every worker now."""
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
        for process in self._processes.values():
            process.join()
        for ours in self._connections.values():
            ours.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _collect(self, names: Sequence[str]) -> dict[str, Any]:
        waiting = {self._connections[name]: name for name in names}
        results: dict[str, Any] = {}
        failures: list[str] = []
        deaths: list[str] = []
        deadline: float | None = None
        while waiting and (deadline is None or time.monotonic() < deadline):
            for ready in wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic())):
                assert isinstance(ready, Connection)
                name = waiting.pop(ready)
                try:
                    succeeded, value = ready.recv()
                except (EOFError, OSError):
                    process = self._processes[name]
                    process.join(_LEAVE_SECONDS)
                    deaths.append(f"{name} died with exit code {process.exitcode}")
                else:
                    if succeeded:
                        results[name] = value
                        continue
                    failures.append(f"{name} failed:\n{value}")
                if deadline is None:
                    deadline = time.monotonic() + _GRACE_SECONDS
        if deaths or failures:
            # A death is the cause of what the others report.
            raise LaunchError("\n".join(deaths or failures))
        return results


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, spec: WorkerSpec) -> None:
    # Ctrl-C reaches every process of the terminal; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # gloo reports every connection on the standard output, where the benchmark's table goes.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    # A parent that is gone shows as the end of the pipe, or as a broken one.
    with contextlib.suppress(EOFError, OSError):
        try:
            import torch

            torch.set_num_threads(spec.num_threads)
            served = spec.factory(*spec.arguments)
            # What is there by now stays: a benchmark collects the garbage before each timing, but not among all that.
            gc.freeze()
        except Exception:
            connection.send((False, traceback.format_exc().rstrip()))
            return
        connection.send((True, None))
        while (request := connection.recv()) is not None:
            method, arguments = request
            try:
                reply = (True, getattr(served, method)(*arguments))
            except Exception:
                reply = (False, traceback.format_exc().rstrip())
            connection.send(reply)
        served.close()
