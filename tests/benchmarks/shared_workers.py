"""Runs a benchmark's script in this process, with workers that several runs share and that start in a moment."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import workers
from harness import pool
from workers import Workers, WorkerSpec


@contextlib.contextmanager
def forked_workers(log: Path) -> Iterator[None]:
    """In the block, ``Workers`` are forked with PyTorch imported, which takes most of the time of a new process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(workers.multiprocessing, "get_context", lambda _: _Forked(log))
        yield


class _Forked:
    """The part of a context of ``multiprocessing`` that ``Workers`` use."""

    def __init__(self, log: Path) -> None:
        pool._start_fork_server()
        self._log, self._context = log, _FORK_SERVER
        self.Pipe = self._context.Pipe

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...], **options: Any) -> Any:  # noqa: N802
        return self._context.Process(target=_serve, args=(target, args, self._log), **options)


_FORK_SERVER = multiprocessing.get_context("forkserver")


def _serve(target: Callable[..., None], args: tuple[Any, ...], log: Path) -> None:
    """Print to the log, let a warning be an error, and have the worker's own environment."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)
    warnings.simplefilter("error")
    # Of a library's own source, when Python first compiles it.
    warnings.filterwarnings("ignore", "invalid escape sequence")
    os.environ.update(args[-1].environment)
    target(*args)


@contextlib.contextmanager
def _new_workers(log: Path) -> Iterator[None]:
    """In the block, a warning is an error in ``Workers``, which print to the log."""
    saved = os.dup(2)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch, log.open("wb") as file:
            monkeypatch.setenv("PYTHONWARNINGS", "error,ignore:invalid escape sequence")
            # Threads that spin for each other take seconds per step where other tests want the cores.
            monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
            os.dup2(file.fileno(), 2)
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


class SharedWorkers:
    """Workers that the runs of a script find in place of their own. A warning is an error in them."""

    def __init__(self, specs: Sequence[WorkerSpec], log: Path, *, forked: bool = True) -> None:
        self.log = log
        self._specs = {spec.name: spec for spec in specs}
        log.touch()
        with forked_workers(log) if forked else _new_workers(log):
            self.workers = Workers(specs)

    def in_place_of(self, specs: Sequence[WorkerSpec]) -> contextlib.AbstractContextManager[Workers]:
        """What ``Workers(specs)`` would be; only the file through which ranks meet may be another."""
        for spec in specs:
            assert dataclasses.replace(self._specs[spec.name], arguments=spec.arguments) == spec
        return contextlib.nullcontext(self.workers)


def run_script(path: Path, arguments: Sequence[str], shared: SharedWorkers, monkeypatch: pytest.MonkeyPatch) -> object:
    """Run ``python path arguments``; returns the exit code."""
    monkeypatch.setattr(workers, "Workers", shared.in_place_of)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(path), run_name="__main__")
    return exit_.value.code


def measured(
    script: ModuleType,
    arguments: Sequence[str],
    sizes: Mapping[str, int],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[dict[str, Any], str]:
    """Run two rounds of a script whose ``start_workers`` starts all ranks; return its JSON, and what it printed."""
    specs: list[WorkerSpec] = []
    with monkeypatch.context() as patch:
        patch.setattr(script, "Workers", specs.extend)
        script.start_workers(folder)
    file = folder / "result.json"
    words = [str(word) for name, value in sizes.items() for word in ("--" + name.replace("_", "-"), value)]
    shared = SharedWorkers(specs, folder / "log")
    with shared.workers:
        given = [*arguments, *words, "--rounds", "2", "--json", str(file)]
        code = run_script(Path(str(script.__file__)), given, shared, monkeypatch)
    printed = capsys.readouterr()
    assert code == 0, printed.err + shared.log.read_text()
    return json.loads(file.read_text()), printed.out
