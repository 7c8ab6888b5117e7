"""Worker processes for benchmarks: each holds one object and runs its methods on request.

An idle worker blocks on its pipe and uses no processor time, so workers that alternate do not disturb each other.
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

# When a worker has failed, workers that wait for it soon fail too; the report names all of them.
_GRACE_SECONDS = 2.0
# Far more than a worker needs to exit, even on a busy machine.
_LEAVE_SECONDS = 600.0


@dataclass(frozen=True)
class WorkerSpec:
    """Specification of a worker.

    Attributes:
        name: name of the worker, for calls and messages.
        num_threads: number of threads for computation.
        factory: creates the worker's object, which has a method ``close``; importable by name.
        arguments: arguments of ``factory``.
        environment: environment variables in addition to those of this process.
    """

    name: str
    num_threads: int
    factory: Callable[..., Any]
    arguments: tuple[Any, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class Workers:
    """Running worker processes; a context manager that ends all of them.

    If a worker fails or dies, all others are ended. A worker whose parent has ended also ends, after its current call.

    Args:
        specs: specification of each worker.

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
        """Call a method in several workers at once.

        Args:
            names: names of the workers.
            method: name of the method of their objects.
            *arguments: arguments of the method.

        Returns:
            The results of the workers, in the order of ``names``.

        Raises:
            LaunchError: a worker failed or died; all workers have been ended.
        """
        try:
            for name in names:
                # ``_collect`` detects a worker that has ended, and knows its exit code.
                with contextlib.suppress(OSError):
                    self._connections[name].send((method, arguments))
            results = self._collect(names)
        except BaseException:
            self.kill()
            raise
        return [results[name] for name in names]

    def close(self) -> None:
        """Ask the workers to exit, and end workers that do not."""
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
            # The death of a worker is the cause of the others' failures.
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
    # Ctrl-C reaches every process of the terminal, but only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # gloo prints every connection to the standard output, which is for the benchmark's table.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    # When the parent has ended, the pipe is closed or broken.
    with contextlib.suppress(EOFError, OSError):
        try:
            import torch

            torch.set_num_threads(spec.num_threads)
            served = spec.factory(*spec.arguments)
            # Current objects stay alive. Exclude them from the garbage collections before each timing.
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
