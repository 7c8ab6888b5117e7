"""Which layouts fit into the memory of a rank, best first.

The way from a run's settings to the workload, the mesh and the model of its plan.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.core.errors import ConfigError
from shardwise.kernels.dispatch import ELEMENTWISE
from shardwise.models.description import ModelDescription
from shardwise.run.build import describe
from shardwise.run.plan.memory_plan import Plan, make_plan
from shardwise.run.plan.workload import Adaptation, Mesh, Recomputation, Workload
from shardwise.run.settings import LoraSettings, PlanSettings, RunSettings
from shardwise.storage.adapters.config_file import read_adapter_config
from shardwise.storage.huggingface.pretrained import config_to_json, read_config
from shardwise.training.optimizer.mixed_precision import PRECISIONS

# From what costs nothing to what costs a forward.
_RECOMPUTATIONS = (
    Recomputation(),
    Recomputation("selective", modules=("layernorm", "mlp_act")),
    Recomputation("full"),
)


@dataclass(frozen=True)
class Choice:
    """A layout that fits.

    Attributes:
        plan: of the layout.
    """

    plan: Plan

    @property
    def extra_work(self) -> float:
        """What recomputation and the pipeline's idle time add to a step, as a share of its work."""
        return self.plan.repeated_work + self.plan.idle_share

    @property
    def order(self) -> tuple[float, int, bool, int]:
        """Least first: extra work to a thousandth, bytes that a rank sends in a step, whether anything at all is
        recomputed, and bytes of the worst rank.
        """
        recomputes = self.plan.mesh.recomputation.granularity is not None
        return round(self.extra_work, 3), self.plan.sent, recomputes, self.plan.worst.total


def fitting(
    workload: Workload,
    limit: int,
    *,
    world_sizes: Sequence[int],
    micro_batch_size: int | None = None,
    ranks_per_host: int = 8,
    like: Mesh | None = None,
) -> list[Choice]:
    """The layouts whose worst rank needs at most ``limit`` bytes, best first.

    Args:
        workload: what is trained.
        limit: bytes of a rank.
        world_sizes: numbers of ranks.
        micro_batch_size: as given; if None the largest of those that halve a data-parallel rank's samples (with
            pipeline stages: 1) that fits.
        ranks_per_host: the largest tp, whose ranks exchange the most.
        like: whose pipeline schedule and virtual stages are taken, and its recomputation where there is one.

    Returns:
        In the order of ``Choice.order``.
    """
    like = like or Mesh()
    choices = []
    for mesh in _layouts(workload, world_sizes, ranks_per_host, like):
        for samples in _micro_batch_sizes(workload, mesh, micro_batch_size):
            try:
                plan = make_plan(workload, replace(mesh, micro_batch_size=samples))
            except ConfigError:
                continue
            if plan.worst.total <= limit:
                choices.append(Choice(plan))
                break
    return sorted(choices, key=lambda choice: choice.order)


def _layouts(workload: Workload, world_sizes: Sequence[int], ranks_per_host: int, like: Mesh) -> Iterator[Mesh]:
    model = workload.model
    again = (like.recomputation,) if like.recomputation.granularity is not None else _RECOMPUTATIONS
    for world_size in world_sizes:
        for tp in _divisors(world_size, min(ranks_per_host, model.num_attention_heads)):
            for pp in _divisors(world_size // tp, model.num_layers):
                dp = world_size // (tp * pp)
                for sequence_parallel in (False, True)[: 1 + (tp > 1)]:
                    for zero, fsdp in _sharded(workload, like, dp, pp):
                        for recomputation in again:
                            yield replace(
                                like,
                                tp=tp,
                                pp=pp,
                                dp=dp,
                                sequence_parallel=sequence_parallel,
                                virtual_stages=like.virtual_stages if pp > 1 else 1,
                                schedule=like.schedule if pp > 1 else "1f1b",
                                zero=zero,
                                fsdp=fsdp,
                                recomputation=recomputation,
                            )


def _sharded(workload: Workload, like: Mesh, dp: int, pp: int) -> Iterator[tuple[int, bool]]:
    yield 0, False
    if dp > 1:
        yield 1, False
    # fully_shard sums a layer's gradients when its backward ends.
    if dp > 1 and not (pp > 1 and like.schedule == "zero-bubble"):
        yield 0, True


def _divisors(number: int, largest: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, largest) + 1) if number % divisor == 0]


def _micro_batch_sizes(workload: Workload, mesh: Mesh, given: int | None) -> Iterator[int]:
    if given is not None or mesh.pp > 1:
        yield given or 1
        return
    samples = workload.global_batch_size // mesh.dp
    while samples:
        yield samples
        samples = samples // 2 if samples % 2 == 0 else int(samples > 1)


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
