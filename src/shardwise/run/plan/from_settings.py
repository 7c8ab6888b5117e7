"""The way from a run's settings to the workload, the mesh and the model of its plan."""

import dataclasses
from pathlib import Path

from shardwise.core.errors import ConfigError
from shardwise.kernels.dispatch import ELEMENTWISE
from shardwise.run.build import describe
from shardwise.run.plan.workload import Adaptation, Mesh, Recomputation, Workload
from shardwise.run.settings import LoraSettings, PlanSettings, RunSettings
from shardwise.storage.adapters.config_file import read_adapter_config
from shardwise.storage.huggingface.description import ModelDescription
from shardwise.storage.huggingface.pretrained import config_to_json, read_config
from shardwise.training.optimizer.mixed_precision import PRECISIONS


def workload_of(settings: RunSettings, model: ModelDescription, adaptation: Adaptation | None = None) -> Workload:
    """What a run of ``settings`` trains.

    Args:
        settings: of the run.
        model: that it trains.
        adaptation: the adapters beside it; all of its weights are trained if None.
    """
    precision = PRECISIONS[settings.training.dtype]
    on_cpu = settings.device != "cuda" and precision.params_dtype in ELEMENTWISE.dtypes
    return Workload(
        model,
        sequence_length=settings.sequence_length,
        global_batch_size=settings.training.global_batch_size,
        element_bytes=precision.params_dtype.itemsize,
        has_masters=precision.has_masters,
        optimizer=settings.optimizer.name,
        fuses_loss=settings.training.loss == "linear_fused",
        dropout_is_global=settings.training.rng == "global",
        fuses_swiglu_from=ELEMENTWISE.min_size if on_cpu else None,
        adaptation=adaptation,
    )


def adaptation_of(lora: LoraSettings, model: ModelDescription, folder: str | None = None) -> Adaptation | None:
    """The adapters of a run, and what they stand beside; None where it has none.

    Args:
        lora: settings of the run.
        model: that it starts from.
        folder: of the model; if None the names are those of the architecture that a new model is exported as.

    Raises:
        ConfigError: a target that names nothing, or adapters of a kind that is not offered.
        CheckpointError: a folder that cannot be read.
    """
    if not lora.is_on:
        return None
    config = lora.config() if lora.lora_from is None else read_adapter_config(lora.lora_from)
    name = config_to_json(model)["model_type"] if folder is None else read_config(Path(folder)).architecture.model_type
    kind = lora.base_quantization
    return Adaptation(config, name, None if kind == "none" else kind)


def mesh_of(settings: RunSettings, world_size: int) -> Mesh:
    """How ``world_size`` ranks share a run of ``settings``.

    Raises:
        ConfigError: they cannot.
    """
    settings.check_world(world_size)
    parallel = settings.parallel
    dp = world_size // (parallel.tp * parallel.pp)
    return Mesh(
        tp=parallel.tp,
        pp=parallel.pp,
        dp=dp,
        sequence_parallel=parallel.sequence_parallel,
        schedule=parallel.pipeline_schedule,
        virtual_stages=parallel.virtual_stages,
        micro_batch_size=settings.micro_batch_size(dp),
        zero=parallel.zero if dp > 1 else 0,
        fsdp=parallel.shards_fully(dp),
        recomputation=recomputation_of(settings),
    )


def recomputation_of(settings: RunSettings) -> Recomputation:
    """What a run of ``settings`` recomputes."""
    recompute = settings.recompute
    if recompute.granularity == "none":
        return Recomputation()
    modules = recompute.modules if recompute.granularity == "selective" else ()
    return Recomputation(recompute.granularity, recompute.method, recompute.num_layers, modules)


def planned_model(settings: PlanSettings, folder: str | None) -> tuple[PlanSettings, ModelDescription]:
    """The settings with the numbers that are not given, and the model: theirs or that of a Hugging Face folder.

    Of the folder ``config.json`` alone is read.

    Raises:
        ConfigError: settings that contradict the folder; a model or a sequence that is not to be had.
        CheckpointError: there is no ``config.json``, or it cannot be read.
    """
    if folder is None:
        settings = settings.resolved(None)
        return settings, describe(settings.model, settings.model.vocab_size)
    for name, value in settings.model.changed():
        if name not in ("model.sequence-length", "model.dropout"):
            raise ConfigError(f"{name} {value} is given, and the model of {folder}; leave one out")
    description = read_config(Path(folder)).description
    settings = settings.resolved(description.max_sequence_length)
    if settings.sequence_length > description.max_sequence_length:
        raise ConfigError(
            f"model.sequence-length {settings.sequence_length} is more than {description.max_sequence_length}, the "
            f"longest sequence of {folder}"
        )
    dropout = settings.model.dropout
    if dropout:
        description = dataclasses.replace(description, hidden_dropout=dropout, attention_dropout=dropout)
    return settings, description
