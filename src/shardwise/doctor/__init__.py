"""Find the first wrong module of a parallel model, of any library.

Record a run on one rank and the parallel run, in three lines of any training script::

    from shardwise.doctor import record

    recorder = record(model, "recordings/parallel", optimizer=optimizer)  # Before the first step.
    ...
    recorder.gradients()  # In each step, before gradients are clipped.

Then ``diagnose("recordings/one", "recordings/parallel")``, or ``shardwise doctor recordings/one recordings/parallel``,
names the first wrong module of the forward, the backward and the update. ``docs/doctor.md`` has an example.
"""

from collections.abc import Sequence
from os import PathLike

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.topology import Groups
from shardwise.doctor.diagnosis import Diagnosis, Finding, diagnose
from shardwise.doctor.places import Axes
from shardwise.doctor.recorder import BUDGET, Recorder
from shardwise.models.experts.routing import RoutingRecorder, RoutingReplay

__all__ = ["Diagnosis", "Finding", "Recorder", "RoutingRecorder", "RoutingReplay", "diagnose", "record"]


def record(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 2,
    axes: Axes | DeviceMesh | Groups | None = None,
    full: Sequence[str] = (),
    first_layers: int | None = None,
    budget: int = BUDGET,
    perturb: int | None = None,
) -> Recorder:
    """Record the next steps of a model's training; every rank calls.

    The run keeps its bits, unless ``perturb`` is given. Small tensors are recorded whole, others as sketches.

    Args:
        model: the model, on its device; with pipeline stages this rank's.
        folder: folder for all ranks, on a file system that ``diagnose`` can read.
        optimizer: its ``step`` ends a recorded step; without one, call ``recorder.updated()`` after each update.
        steps: number of steps.
        axes: for each axis of parallelism this rank's place and the number of ranks, such as ``{"dp": (0, 2), "tp":
            (1, 4)}``, the slowest first; a mesh; or Shardwise's groups. None for one axis of all ranks.
        full: patterns of names of modules and parameters whose tensors are recorded whole.
        first_layers: number of layers to record; None for all. A layer's number is the first one in its name.
        budget: most bytes that a rank records; what comes later is left out, and reported.
        perturb: seed of a recording whose operations are changed by one rounding error each, which measures the
            expected rounding; None for none.

    Raises:
        ConfigError: the folder has a recording, or an argument is wrong.
        UnwritableError: the disk has too little space, when the recording ends.
    """
    return Recorder(
        model,
        folder,
        optimizer=optimizer,
        steps=steps,
        axes=axes,
        full=full,
        first_layers=first_layers,
        budget=budget,
        perturb=perturb,
    )
