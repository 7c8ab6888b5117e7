"""Recordings of the planted programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from doctor.planted import Script
from harness.groups import alone
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.doctor.recorder import Recorder


class Watcher:
    """Records what a program tells."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options = folder, options
        self.recorder: Recorder | None = None

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.recorder = Recorder(model, self.folder, optimizer=optimizer, **self.options)

    def gradients(self) -> None:
        assert self.recorder is not None
        self.recorder.gradients()

    def inputs(self, **tensors: Tensor) -> None:
        assert self.recorder is not None
        self.recorder.inputs(**tensors)


def record_script(script: Script, group: ProcessGroup, folder: Path, *, is_planted: bool) -> None:
    """Record a program on one rank, twice, and on all ranks: folders ``one``, ``rounding`` and ``parallel``."""
    other = torch.float64 if script.dtype == torch.float32 else script.dtype
    one = alone(group)
    for name, dtype in (("one", script.dtype), ("rounding", other)):
        # Every rank runs it, since a program may make groups, and the first rank's recording counts.
        own = folder / name if group.rank() == 0 else folder / f"{name} of rank {group.rank()}"
        perturb = 1 if name == "rounding" and other == script.dtype else None
        script.run(one, Watcher(own, world_size=1, perturb=perturb), False, dtype=dtype)
    tp = script.options.tp or group.size()
    axes = {"dp": (group.rank() // tp, group.size() // tp), "tp": (group.rank() % tp, tp)}
    watcher = Watcher(folder / "parallel", axes=axes)
    script.run(group, watcher, is_planted)
    assert watcher.recorder is not None
    assert watcher.recorder.is_done
