"""Runs a benchmark's script in this process, with workers that several runs share: each takes seconds to start."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import workers
from workers import Workers, WorkerSpec


class SharedWorkers:
    """Workers that the runs of a script find in place of their own. A warning is an error in them.

    Args:
        specs: of all that some run needs.
        log: file for what they print on the standard error.
    """

    def __init__(self, specs: Sequence[WorkerSpec], log: Path) -> None:
        self.log = log
        self._specs = {spec.name: spec for spec in specs}
        with pytest.MonkeyPatch.context() as monkeypatch, _standard_error_to(log):
            monkeypatch.setenv("PYTHONWARNINGS", "error")
            # Threads that spin for each other take seconds per step where other tests want the cores.
            monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
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


@contextlib.contextmanager
def _standard_error_to(log: Path):
    saved = os.dup(2)
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
