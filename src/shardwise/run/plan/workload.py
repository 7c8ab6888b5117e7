"""A planned run: a model and its training, the mesh that shares the work, and both from the settings of a run."""

import dataclasses
import os
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Literal

import torch

from shardwise.core.errors import ConfigError
from shardwise.kernels.dispatch import ELEMENTWISE
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.description import ModelDescription
from shardwise.models.recomputation import Recomputation
from shardwise.nn.quantization import Quantization
from shardwise.run.build import describe
from shardwise.run.settings import LoraSettings, PlanSettings, RunSettings
from shardwise.storage.adapters.config_file import read_adapter_config
from shardwise.storage.huggingface.pretrained import config_to_json, read_config
from shardwise.training.optimizer.mixed_precision import PRECISIONS


@dataclass(frozen=True)
class Adaptation:
    """Adapters that are trained, and their frozen base.

    Attributes:
        config: of the adapters, whose targets are names of Hugging Face's.
        architecture: the ``model_type`` whose names these are.
        quantization: of the frozen weights of linear layers; their own dtype if None.
    """

    config: LoraConfig
    architecture: str
    quantization: Quantization | None = None


@dataclass(frozen=True)
class Workload:
    """A model, and how it is trained, at any number of ranks.

    Attributes:
        model: a ``"gpt"``.
        sequence_length: tokens in a sample.
        global_batch_size: samples in a step.
        element_bytes: of a parameter, and of an element in the forward.
        has_masters: gradients are summed in fp32, and the optimizer updates fp32 copies of the parameters.
        optimizer: ``"adamw"`` or ``"muon"``.
        fuses_loss: output layer and loss are one (``linear_fused``).
        loss_memory_budget: bytes of logits from which on the fused loss takes slices of the vocabulary.
        dropout_is_global: masks are those of one rank at every layout, and take a byte an element.
        fuses_swiglu_from: elements of gate and up from which on SwiGLU is one loop that keeps nothing between them;
            None for never.
        adaptation: adapters on a frozen model; all of it is trained if None.
    """

    model: ModelDescription
    sequence_length: int
    global_batch_size: int
    element_bytes: int = 4
    has_masters: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    fuses_loss: bool = True
    loss_memory_budget: int = 2 << 30
    dropout_is_global: bool = True
    fuses_swiglu_from: int | None = None
    adaptation: Adaptation | None = None

    def __post_init__(self) -> None:
        if self.model.kind != "gpt":
            raise ConfigError(f"a {self.model.kind} model is not trained here; only causal models are planned")

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of an element of a gradient that is summed over micro-batches."""
        return 4 if self.has_masters else self.element_bytes


@dataclass(frozen=True)
class Mesh:
    """How ranks share the work.

    Attributes:
        tp, pp, dp: ranks that split each layer, pipeline stages, ranks that see different samples.
        sequence_parallel: activations between tensor-parallel regions are split along the sequence.
        schedule: of the pipeline.
        virtual_stages: parts of the model on each stage.
        micro_batch_size: samples per forward and backward on a rank.
        zero: 1 splits the optimizer's state and the fp32 weights over the data-parallel ranks.
        fsdp: splits parameters, gradients and state over them.
        recomputation: in the backward.

    Raises:
        ConfigError: zero and fsdp together.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    virtual_stages: int = 1
    micro_batch_size: int = 1
    zero: int = 0
    fsdp: bool = False
    recomputation: Recomputation = field(default_factory=Recomputation)

    def __post_init__(self) -> None:
        if self.zero and self.fsdp:
            raise ConfigError("zero 1 splits optimizer state, which fsdp does too; choose one")

    @cached_property
    def world_size(self) -> int:
        """All ranks."""
        return self.tp * self.pp * self.dp

    @cached_property
    def splits_sequence(self) -> bool:
        """False on one rank, where there is nothing to split."""
        return self.sequence_parallel and self.tp > 1

    @cached_property
    def splits_state(self) -> bool:
        """True for ``zero`` with several data-parallel ranks."""
        return self.zero > 0 and self.dp > 1

    @cached_property
    def shards_fully(self) -> bool:
        """True for ``fsdp`` with several data-parallel ranks."""
        return self.fsdp and self.dp > 1

    def num_micro_batches(self, workload: Workload) -> int:
        """Micro-batches of a step, on each data-parallel rank."""
        return workload.global_batch_size // (self.dp * self.micro_batch_size)

    def check(self, workload: Workload) -> None:
        """Raise ConfigError if the model or the batch cannot be split so."""
        model, batch = workload.model, workload.global_batch_size
        if self.shards_fully and workload.adaptation is not None and workload.adaptation.quantization is not None:
            raise ConfigError(f"fsdp cannot split a base in {workload.adaptation.quantization}; choose one of the two")
        if model.num_attention_heads < self.tp:
            raise ConfigError(f"tp {self.tp} is more than the {model.num_attention_heads} attention heads; lower it")
        if model.vocab_size < self.tp:
            raise ConfigError(f"tp {self.tp} is more than the {model.vocab_size} ids of the vocabulary; lower it")
        if model.num_layers < self.pp * self.virtual_stages:
            raise ConfigError(
                f"the model's {model.num_layers} layers are fewer than the {self.pp * self.virtual_stages} parts of pp "
                f"{self.pp} x virtual stages {self.virtual_stages}; each needs a layer"
            )
        if batch % (self.dp * self.micro_batch_size) != 0:
            raise ConfigError(
                f"the global batch of {batch} samples is not a multiple of dp {self.dp} x micro-batches of "
                f"{self.micro_batch_size}"
            )
        if self.virtual_stages > 1 and self.num_micro_batches(workload) % self.pp != 0:
            raise ConfigError(
                f"{self.num_micro_batches(workload)} micro-batches are not a multiple of pp {self.pp}, as interleaved "
                "stages need"
            )

    def __str__(self) -> str:
        parts = [f"tp {self.tp}"]
        parts += [f"pp {self.pp}"] * (self.pp > 1) + [f"dp {self.dp}"] * (self.dp > 1)
        parts += ["sequence parallel"] * self.splits_sequence
        parts += ["zero 1"] * bool(self.zero) + ["fsdp"] * self.fsdp
        recomputed = self.recomputation.granularity != "none"
        return ", ".join(parts) + f", recompute {self.recomputation}" * recomputed


def workload_of(settings: RunSettings, model: ModelDescription, adaptation: Adaptation | None = None) -> Workload:
    """The workload of a run of ``settings`` that trains ``model``: adapters, or all weights if None."""
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


def _adaptation_of(lora: LoraSettings, model: ModelDescription, folder: str | None) -> Adaptation | None:
    if not lora.is_on:
        return None
    config = lora.config() if lora.lora_from is None else read_adapter_config(lora.lora_from)
    # Without a folder the names are those of the architecture that a new model is exported as.
    name = config_to_json(model)["model_type"] if folder is None else read_config(Path(folder)).architecture.model_type
    kind = lora.base_quantization
    return Adaptation(config, name, None if kind == "none" else kind)


def mesh_of(settings: RunSettings, world_size: int) -> Mesh:
    """The mesh of ``world_size`` ranks for a run of ``settings``.

    Raises:
        ConfigError: they cannot share it.
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
        recomputation=settings.recompute,
    )


def planned_workload(settings: PlanSettings, model_dir: str | PathLike[str] | None) -> tuple[PlanSettings, Workload]:
    """The settings with the numbers that are not given, and the workload: of their model or of a Hugging Face folder's.

    Of the folder only ``config.json`` is read.

    Raises:
        ConfigError: settings that contradict the folder; a model or a sequence that is not to be had.
        CheckpointError: there is no ``config.json``, or it cannot be read.
    """
    if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()):
        settings = settings.on_device("cuda")
    if model_dir is None:
        folder, settings = None, settings.resolved(None)
        model = describe(settings.model, settings.model.vocab_size)
    else:
        folder = os.fspath(model_dir)
        for name, value in settings.model.changed():
            if name not in ("model.sequence-length", "model.dropout"):
                raise ConfigError(f"{name} {value} is given, and the model of {folder}; leave one out")
        model = read_config(Path(folder)).description
        settings, longest = settings.resolved(model.max_sequence_length), model.max_sequence_length
        if settings.sequence_length > longest:
            raise ConfigError(
                f"model.sequence-length {settings.sequence_length} is more than {longest}, the longest sequence of "
                f"{folder}"
            )
        if dropout := settings.model.dropout:
            model = dataclasses.replace(model, hidden_dropout=dropout, attention_dropout=dropout)
    settings.check_effect(model.num_layers)
    return settings, workload_of(settings, model, _adaptation_of(settings.lora, model, folder))
