"""Set up a run on every rank."""

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.core.communication.agreement import agree, gather_objects
from shardwise.core.communication.overlap import OverlapMethod, Pass, overlap_methods
from shardwise.core.communication.transports import transport_name
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups, Topology
from shardwise.data import DataLoader, SampleRows
from shardwise.kernels.dispatch import agree_on_kernels
from shardwise.models.config import ModelConfig
from shardwise.models.description import ModelChunks
from shardwise.models.experts.routing import RoutingRecorder, RoutingReplay
from shardwise.models.language_model import LanguageModel
from shardwise.nn.replicated import named_param_layouts, replicas_of
from shardwise.run.exact.environment import check_arithmetic, use_deterministic_algorithms
from shardwise.run.exact.trials import check_device, check_updates
from shardwise.run.out_of_memory import MemoryShortage
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import RunSettings
from shardwise.run.tasks import task_of
from shardwise.run.tasks.task import Session, Task
from shardwise.run.utilisation import Utilisation, model_flops_per_token, peak_of
from shardwise.training.hooks import StepRouting
from shardwise.training.optimizer.mixed_precision import PRECISIONS
from shardwise.training.trainer import StepResult, Trainer


def open_session(settings: RunSettings, ranks: Ranks, make_task: Callable[[Any], Task] = task_of) -> Session:
    """Set up a run; every rank calls."""
    task = agree(lambda: make_task(settings), group=ranks.control)
    data = task.read(ranks)
    settings = task.settings = task.settings.on_device(ranks.device.type)
    if ranks.device.type == "cuda":
        uses_tf32 = PRECISIONS[settings.training.dtype].uses_tf32
        torch.set_float32_matmul_precision("high" if uses_tf32 else "highest")
    settings.check_world(ranks.world_size)
    if settings.parallel.exact:
        use_deterministic_algorithms(ranks.device)
    loader = DataLoader(data.train, settings.training.global_batch_size, settings.training.seed, end=task.num_samples)
    axes = {name: getattr(settings.parallel, name) for name in ("tp", "pp", "cp", "ep")}
    topology = Topology.create(**axes, etp=settings.parallel.expert_tp, validate=settings.validate)
    groups = Groups.of(topology)
    torch.default_generator.manual_seed(settings.training.seed)
    described = task.source.describe(data)
    settings.parallel.check_experts(ranks.world_size, None if described.experts is None else described.experts.num)
    shortage = MemoryShortage.of(settings, described, ranks)
    # Over all ranks, not only ranks that share layers, because the banner reports on all ranks.
    params_dtype = PRECISIONS[settings.training.dtype].params_dtype
    agree_on_kernels(torch.empty(0, dtype=params_dtype, device=ranks.device), group=ranks.control)
    with shortage.explained():
        model = task.source.build(settings, data, groups=groups, device=ranks.device)
        trainer = Trainer(settings, model, groups, task.method.objective(data, groups, ranks.device))
    routing: StepRouting | None = replay_of(settings, model)
    if settings.record_routing is not None:
        routing = RoutingRecorder(model, settings.record_routing)
    if settings.parallel.exact:
        check_arithmetic(ranks.device, group=ranks.control)
        if ranks.is_first:
            print(f"exact: trying the run's operations on {ranks.device} before the first step", file=sys.stderr)
        agree(lambda: _try_device(settings, model, groups, loader, shortage), group=ranks.control)
    overlap: list[tuple[Pass, OverlapMethod]] = []
    if settings.parallel.tp_comm_overlap:
        is_even, has_bias = settings.sequence_length % groups.tp.size() == 0, model.config.add_qkv_bias
        overlap = overlap_methods(group=groups.tp, device=ranks.device, even=is_even, column_has_bias=has_bias)
    num_parameters, num_trained = count_parameters(model, topology)
    return Session(
        task,
        settings,
        ranks,
        topology,
        data,
        loader,
        trainer,
        routing,
        overlap=overlap,
        transport=transport_name(groups.tp, ranks.device),
        num_parameters=num_parameters,
        num_trained=num_trained,
        utilisation=_utilisation(task, ranks, described),
        shortage=shortage,
    )


def replay_of(settings: RunSettings, model: LanguageModel | ModelChunks) -> RoutingReplay | None:
    """Return the replay of the routing that the settings name, if any; every rank of the model calls."""
    return None if settings.replay_routing is None else RoutingReplay(model, settings.replay_routing)


def _try_device(
    settings: RunSettings,
    model: LanguageModel | ModelChunks,
    groups: Groups,
    loader: DataLoader,
    shortage: MemoryShortage,
) -> None:
    with shortage.explained():
        check_device(
            model,
            micro_batch_size=settings.micro_batch_size(groups.data.samples[1]),
            sequence_length=settings.sequence_length,
            is_packed=isinstance(loader.rows, SampleRows) and loader.rows.packing,
            context=groups.data.ranks_of_sample,
        )
        check_updates(model, settings)


def _utilisation(task: Task, ranks: Ranks, model: ModelConfig) -> Utilisation:
    settings = task.settings
    count = partial(model_flops_per_token, model, trains_weights=task.source.trains_weights)
    try:
        count(settings.sequence_length)
    except ConfigError as error:
        return Utilisation(lambda length: 0, None, f"not compared: {error}")
    dtype = PRECISIONS[settings.training.dtype].params_dtype
    peak = peak_of(ranks.device, dtype, settings.peak_tflops)
    peaks = gather_objects(peak.flops, "the peak of its device", group=ranks.control)
    return Utilisation(count, None if None in peaks else sum(peaks), peak.source)


def metrics_of(session: Session, result: StepResult) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of a step: those of the objective, and the others. Speed and memory are not among them."""
    others = {"grad_norm": result.grad_norm, "learning_rate": result.learning_rate, **result.routing}
    if result.loss_scale is not None:
        others |= {"loss_scale": result.loss_scale, "skipped": float(result.is_skipped)}
    reported = session.trainer.objective.reported((result.loss, *result.others), session.data.bits_per_nat)
    return reported, others


def count_parameters(model: nn.Module, topology: Topology) -> tuple[int, int]:
    """Count the parameters of the whole model over all ranks and stages, and the trained ones; every rank calls."""
    replicas = replicas_of(model)
    own = [
        (math.prod(layout.global_shape), param.requires_grad)
        for _, param, layout in named_param_layouts(model, topology.size("tp"))
        if not replicas[param].is_copy
    ]
    counts = sum(number for number, _ in own), sum(number for number, trained in own if trained)
    if topology.size("pp") > 1:
        of_stages = gather_objects(counts, "the number of parameters", group=topology.group("pp"))
        counts = sum(number for number, _ in of_stages), sum(number for _, number in of_stages)
    return counts
