"""What a run needs of each rank, by arithmetic; nothing is started."""

import os
from collections.abc import Sequence
from os import PathLike
from typing import Annotated, Any

import torch

from shardwise.core.errors import ConfigError
from shardwise.run.plan.fit import Choice, adaptation_of, fitting, mesh_of, planned_model, recomputation_of, workload_of
from shardwise.run.plan.memory_plan import Plan, make_plan
from shardwise.run.plan.report import read_bytes, shown_bytes
from shardwise.run.plan.workload import Mesh, Workload
from shardwise.run.settings import PlanSettings
from shardwise.training.bounds import (
    DEFAULT_RANKS_PER_HOST,
    LOCAL_RANKS,
    RANKS,
    check_value,
    checks_arguments,
    from_keywords,
)


@checks_arguments
def plan_run(
    model_dir: str | PathLike[str] | None = None, *, ranks: Annotated[int | None, RANKS] = None, **settings: Any
) -> Plan:
    """What each rank of a run needs: bytes of weights, gradients, optimizer state and activations, and bytes sent.

    Args:
        model_dir: Hugging Face folder with the config.json of the model; that of the settings if None.
        ranks: how many; tp x pp if None.
        settings: those of ``train``, and of adapters those of ``finetune``.

    Returns:
        The plan; ``plan_as_table`` in ``shardwise.run.plan.report`` writes it for people.

    Raises:
        ConfigError: the model is not to be had, or cannot be split so; a setting without effect.
        CheckpointError: there is no ``config.json``, or it cannot be read.
    """
    made = from_keywords(PlanSettings, settings)
    return plan_of(made, model_dir, ranks or made.parallel.tp * made.parallel.pp)


@checks_arguments
def fit_run(
    memory: str,
    model_dir: str | PathLike[str] | None = None,
    *,
    ranks: int | Sequence[int],
    ranks_per_host: Annotated[int, LOCAL_RANKS] = DEFAULT_RANKS_PER_HOST,
    **settings: Any,
) -> list[Choice]:
    """The layouts of a run that fit, best first.

    Args:
        memory: of a rank, such as "80GiB" or "16GB".
        model_dir: see ``plan_run``.
        ranks: how many, or several numbers to choose from.
        ranks_per_host: the largest tp, since ranks that split layers exchange the most.
        settings: see ``plan_run``.

    Returns:
        Layouts, each with its plan.

    Raises:
        ConfigError: there is none, and as ``plan_run`` does.
        CheckpointError: see ``plan_run``.
    """
    world_sizes = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    for number in world_sizes:
        check_value("ranks", number, int, RANKS)
    made = from_keywords(PlanSettings, settings)
    return choices_of(made, model_dir, memory, world_sizes, ranks_per_host=ranks_per_host)


def plan_of(settings: PlanSettings, folder: str | PathLike[str] | None, world_size: int) -> Plan:
    """What a run of ``settings`` on ``world_size`` ranks needs. Raises as ``plan_run``."""
    settings, workload = _workload(settings, folder)
    return make_plan(workload, mesh_of(settings, world_size))


def choices_of(
    settings: PlanSettings,
    folder: str | PathLike[str] | None,
    limit: str,
    world_sizes: Sequence[int],
    *,
    ranks_per_host: int,
) -> list[Choice]:
    """The layouts of ``world_sizes`` ranks that need at most ``limit`` of each, best first. Raises as ``fit_run``."""
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
    if not choices:
        ranks = ", ".join(map(str, world_sizes))
        raise ConfigError(
            f"no layout of {ranks} ranks needs at most {shown_bytes(memory)} of each; use more ranks, a smaller batch "
            f"(training.global-batch-size is {workload.global_batch_size}) or shorter samples"
        )
    return choices


def _workload(settings: PlanSettings, given: str | PathLike[str] | None) -> tuple[PlanSettings, Workload]:
    folder = None if given is None else os.fspath(given)
    on_cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    if on_cuda:
        settings = settings.on_device("cuda")
    settings, model = planned_model(settings, folder)
    settings.check_effect(model.num_layers)
    return settings, workload_of(settings, model, adaptation_of(settings.lora, model, folder))
