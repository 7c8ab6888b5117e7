"""What ``shardwise plan`` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from shardwise.core.errors import ConfigError
from shardwise.run.plan.fit import fitting
from shardwise.run.plan.from_settings import (
    adaptation_of,
    mesh_of,
    planned_model,
    recomputation_of,
    workload_of,
)
from shardwise.run.plan.memory_plan import make_plan
from shardwise.run.plan.report import fitting_as_table, plan_as_json, plan_as_table, read_bytes, shown_bytes
from shardwise.run.plan.workload import Mesh, Workload
from shardwise.run.settings.plan_settings import PlanSettings

_SHOWN = 20


def print_plan(settings: PlanSettings, folder: str | None, world_size: int, *, as_json: bool) -> None:
    """Print what a run of ``settings`` on ``world_size`` ranks needs.

    Raises:
        ConfigError, CheckpointError: the model is not to be had, or cannot be split so; a setting without effect.
    """
    settings, workload = _workload(settings, folder)
    plan = make_plan(workload, mesh_of(settings, world_size))
    print(json.dumps(plan_as_json(plan), indent=2) if as_json else plan_as_table(plan))


def print_fitting(
    settings: PlanSettings,
    folder: str | None,
    limit: str,
    world_sizes: Sequence[int],
    *,
    ranks_per_host: int,
    as_json: bool,
) -> None:
    """Print the layouts of ``world_sizes`` ranks that need at most ``limit`` of each, best first.

    Raises:
        ConfigError: there is none, beside what ``print_plan`` raises.
    """
    memory = read_bytes(limit)
    settings, workload = _workload(settings, folder)
    parallel = settings.parallel
    choices = fitting(
        workload,
        memory,
        world_sizes=world_sizes,
        micro_batch_size=settings.training.micro_batch_size,
        ranks_per_host=ranks_per_host,
        like=Mesh(
            schedule=parallel.pipeline_schedule,
            virtual_stages=parallel.virtual_stages,
            recomputation=recomputation_of(settings),
        ),
    )
    ranks = ", ".join(map(str, world_sizes))
    if not choices:
        raise ConfigError(
            f"no layout of {ranks} ranks needs at most {shown_bytes(memory)} of each; use more ranks, a smaller batch "
            f"(training.global-batch-size is {workload.global_batch_size}) or shorter samples"
        )
    if as_json:
        print(json.dumps([plan_as_json(choice.plan) for choice in choices], indent=2))
        return
    print(fitting_as_table(choices[:_SHOWN]))
    left = len(choices) - _SHOWN
    more = f"{left} more fit. " if left > 0 else ""
    print(
        f"\n{more}Best first: the least extra work (recomputation, idle pipeline stages), then the fewest bytes that a "
        "rank sends in a step, then memory."
    )


def _workload(settings: PlanSettings, folder: str | None) -> tuple[PlanSettings, Workload]:
    on_cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    if on_cuda:
        settings = settings.on_device("cuda")
    settings, model = planned_model(settings, folder)
    settings.check_effect(model.num_layers)
    return settings, workload_of(settings, model, adaptation_of(settings.lora, model, folder))
