"""A planned run: a model and its training, the mesh that shares the work, and both from the settings of a run."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.data import Batch
from shardwise.data.tokenizer import PaddedTokenizer
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.config import ModelConfig
from shardwise.models.description import ModelChunks, build_model, chunks_of, model_config
from shardwise.models.language_model import LanguageModel
from shardwise.models.recomputation import Recomputation
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn.quantization import Quantization
from shardwise.run.build import config_fields, describe
from shardwise.run.settings import (
    DpoSettings,
    FinetuneSettings,
    LoraSettings,
    PlanSettings,
    RecomputeSettings,
    RunSettings,
)
from shardwise.run.tasks.preference import PreferenceObjective
from shardwise.run.tasks.pretrained_model import (
    adapters_of,
    check_by_plan,
    check_continues_texts,
    resolved,
    unquantized,
    with_dropout,
    with_new_tokens,
)
from shardwise.storage.adapters import adapters_vocab_size, add_lora_
from shardwise.storage.huggingface.architectures import ARCHITECTURES
from shardwise.storage.huggingface.loading import BaseQuantization, make_room_
from shardwise.storage.huggingface.mapping import compose
from shardwise.storage.huggingface.pretrained import config_from_json, config_to_json, read_config
from shardwise.training.bounds import refuse
from shardwise.training.objective import Objective
from shardwise.training.optimizer.mixed_precision import PRECISIONS


@dataclass(frozen=True)
class Adaptation:
    """Adapters that are trained, and their frozen base.

    ``architecture`` is the ``model_type`` whose names the targets are. Without ``quantization`` the base keeps its
    dtype. If it ``is_resized``, the model has more ids than the base, or fewer.
    """

    config: LoraConfig
    architecture: str
    quantization: Quantization | None = None
    is_resized: bool = False


@dataclass(frozen=True)
class Workload:
    """A model, and how it is trained, at any number of ranks.

    A mesh replaces the settings of parallelism and recomputation. All of the model is trained without ``adaptation``.
    """

    settings: RunSettings
    model: ModelConfig
    device_type: str = "cpu"
    adaptation: Adaptation | None = None

    @cached_property
    def global_batch_size(self) -> int:
        """Samples in a step."""
        return self.settings.training.global_batch_size

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the hidden states."""
        return PRECISIONS[self.settings.training.dtype].params_dtype.itemsize

    def at(self, mesh: Mesh) -> Workload:
        """The workload with the settings of a mesh."""
        settings = self.settings
        parallel = dataclasses.replace(
            settings.parallel,
            tp=mesh.tp,
            pp=mesh.pp,
            cp=mesh.cp,
            cp_comm_type=settings.parallel.cp_comm_type if mesh.cp > 1 else "auto",
            sequence_parallel=mesh.sequence_parallel,
            tp_comm_overlap=settings.parallel.tp_comm_overlap and mesh.splits_sequence,
            pipeline_schedule=mesh.schedule,
            virtual_stages=mesh.virtual_stages,
            zero=mesh.zero,
            fsdp=mesh.fsdp,
            ep=mesh.ep,
            etp=mesh.expert_tp if settings.parallel.exact and self.model.num_experts else mesh.etp,
        )
        training = dataclasses.replace(settings.training, micro_batch_size=mesh.micro_batch_size)
        recompute = RecomputeSettings(**vars(mesh.recomputation))
        return dataclasses.replace(
            self, settings=dataclasses.replace(settings, parallel=parallel, training=training, recompute=recompute)
        )

    def build(self, groups: Groups) -> LanguageModel | ModelChunks:
        """Build this rank's part of the model as the run does, without initial values."""
        fields = config_fields(self.settings, groups)
        fields["sequence_parallel"] &= groups.tp.size() > 1
        model = _built(self.model, groups, self.adaptation, **fields)
        if self.adaptation is not None:
            assert isinstance(model, TransformerModel)
            add_lora_(model, self.adaptation.config, ARCHITECTURES[self.adaptation.architecture])
        return model

    def objective(self, groups: Groups) -> Objective | None:
        """The objective of a step; None for the cross entropy of each token."""
        settings = self.settings
        if not isinstance(settings, DpoSettings):
            return None
        return PreferenceObjective(settings.preference, groups.data.group)

    def batch(self, samples: int, with_lengths: bool) -> Batch:
        """A micro-batch of the run, of its longest rows."""
        settings, s = self.settings, self.settings.sequence_length
        rows = samples * (2 if isinstance(settings, DpoSettings) else 1)
        tokens = torch.zeros(rows, s, dtype=torch.int64)
        packs = isinstance(settings, FinetuneSettings) and settings.samples.packing
        return Batch(
            tokens,
            tokens,
            position_ids=tokens if packs else None,
            document_ids=tokens if packs else None,
            lengths=tokens[:, 0] if with_lengths else None,
            reference=torch.zeros(rows, dtype=torch.float64) if isinstance(settings, DpoSettings) else None,
        )


def _built(
    description: ModelConfig, groups: Groups, adaptation: Adaptation | None, **fields: Any
) -> LanguageModel | ModelChunks:
    fields = {"pipeline_model_parallel_size": groups.num_stages, **fields}
    config = model_config(description, perform_initialization=False, **fields)
    where, quantization = torch.device("cpu"), None if adaptation is None else adaptation.quantization
    models = [build_model(config, groups=groups, device=where, vp_stage=chunk) for chunk in chunks_of(config)]
    if adaptation is not None and quantization is not None:
        architecture = ARCHITECTURES[adaptation.architecture]
        table = architecture.table
        keeps = unquantized(adaptation.config, architecture, is_resized=adaptation.is_resized)
        for model in models:
            parts = {
                key: (shard, compose(table, key, shard.layout.global_shape, description))
                for key, shard in model.sharded_state_dict().items()
            }
            make_room_(model, parts, BaseQuantization(quantization, keeps), where)
    return models[0] if len(models) == 1 else ModelChunks(models)


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
        ep: ranks that divide the experts of a layer.
        etp: ranks that split each expert; ``tp`` if None.
        cp: ranks of ``dp`` that share the positions of the same samples.

    Raises:
        ConfigError: zero and fsdp together.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    virtual_stages: int = 1
    micro_batch_size: int = 1
    zero: int = 0
    fsdp: bool = False
    recomputation: Recomputation = field(default_factory=Recomputation)
    ep: int = 1
    etp: int | None = None
    cp: int = 1

    def __post_init__(self) -> None:
        if self.zero and self.fsdp:
            raise ConfigError("zero 1 splits optimizer state, which fsdp does too; choose one")

    @cached_property
    def world_size(self) -> int:
        """All ranks."""
        return self.tp * self.pp * self.dp

    @cached_property
    def num_sample_ranks(self) -> int:
        """Ranks, or groups of ranks, that see different samples."""
        return self.dp // self.cp

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

    @property
    def expert_tp(self) -> int:
        """Ranks that split each expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def without_recomputation(self) -> Mesh:
        """The mesh of a run that recomputes nothing."""
        return dataclasses.replace(self, recomputation=Recomputation())

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks of a rank's group.

        Args:
            rank: number of the rank.
            axis: ``"tp"``, ``"dp"``, ``"pp"``, ``"embd"``, the stages of a tied weight, ``"ep"``, the ranks that hold
                all experts of a layer, ``"expert_dp"``, those with the same parts of them, or ``"cp"``.
        """
        width = self.tp * self.dp
        inner = self.tp if axis in ("tp", "dp") else self.ep * self.expert_tp
        if axis in ("tp", "ep"):
            first = rank - rank % inner
            return tuple(range(first, first + inner))
        if axis == "cp":
            first = rank - rank // self.tp % self.cp * self.tp
            return tuple(range(first, first + self.tp * self.cp, self.tp))
        if axis in ("dp", "expert_dp"):
            first = rank - rank % width + rank % inner
            return tuple(range(first, first - rank % inner + width, inner))
        stages = tuple(range(rank % width, self.world_size, width))
        return stages if axis == "pp" else (stages[0], stages[-1])

    def num_micro_batches(self, workload: Workload) -> int:
        """Micro-batches of a step, on each data-parallel rank."""
        return workload.global_batch_size // (self.num_sample_ranks * self.micro_batch_size)

    def check(self, workload: Workload) -> None:
        """Raise ConfigError if the model or the batch cannot be split so."""
        model, batch = workload.model, workload.global_batch_size
        if self.shards_fully and workload.adaptation is not None and workload.adaptation.quantization is not None:
            raise ConfigError(f"fsdp cannot split a base in {workload.adaptation.quantization}; choose one of the two")
        if model.transformers_config is not None:
            refuse(
                "a model that transformers computes, split by its own plan, has no {}",
                (self.pp > 1, "pipeline stages"),
                (self.cp > 1, "context parallelism"),
                (self.splits_sequence, "sequence parallelism"),
                (self.fsdp, "fsdp"),
                (
                    self.recomputation.granularity != "none" and not self.recomputation.is_of_each_layer,
                    f"recomputation {self.recomputation}",
                ),
            )
        if model.num_attention_heads < self.tp:
            raise ConfigError(f"tp {self.tp} is more than the {model.num_attention_heads} attention heads; lower it")
        if model.vocab_size < self.tp:
            raise ConfigError(f"tp {self.tp} is more than the {model.vocab_size} ids of the vocabulary; lower it")
        if model.num_layers < self.pp * self.virtual_stages:
            raise ConfigError(
                f"the model's {model.num_layers} layers are fewer than the {self.pp * self.virtual_stages} parts of pp "
                f"{self.pp} x virtual stages {self.virtual_stages}; each needs a layer"
            )
        if batch % (self.num_sample_ranks * self.micro_batch_size) != 0:
            raise ConfigError(
                f"the global batch of {batch} samples is not a multiple of dp {self.num_sample_ranks} x micro-batches "
                f"of {self.micro_batch_size}"
            )
        if self.virtual_stages > 1 and self.num_micro_batches(workload) % self.pp != 0:
            raise ConfigError(
                f"{self.num_micro_batches(workload)} micro-batches are not a multiple of pp {self.pp}, as interleaved "
                "stages need"
            )
        workload.at(self).settings.parallel.check_experts(self.world_size, model.num_experts or None)

    def __str__(self) -> str:
        parts = [f"tp {self.tp}"]
        sizes = {"pp": self.pp, "cp": self.cp, "dp": self.num_sample_ranks}
        parts += [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
        parts += [f"ep {self.ep}"] * (self.ep > 1) + [f"etp {self.etp}"] * (self.etp not in (None, self.tp))
        parts += ["sequence parallel"] * self.splits_sequence
        parts += ["zero 1"] * bool(self.zero) + ["fsdp"] * self.fsdp
        recomputed = self.recomputation.granularity != "none"
        return ", ".join(parts) + f", recompute {self.recomputation}" * recomputed


_LARGEST = 4096


def workload_of(settings: RunSettings, model: ModelConfig, folder: str | None = None) -> Workload:
    """The workload of a run of ``settings`` that trains ``model``, whose folder is that of the settings if None.

    Raises:
        ConfigError: the model has more layers or experts than a plan goes through.
    """
    for name, number in (("layers", model.num_layers), ("experts", model.num_experts)):
        if number > _LARGEST:
            raise ConfigError(
                f"the model has {number:,} {name}, and a plan, which goes through each, takes at most {_LARGEST:,}; "
                f"plan a model of fewer {name}"
            )
    lora = getattr(settings, "lora", None)
    folder = folder or getattr(settings, "base", None)
    return Workload(
        settings,
        model,
        "cuda" if settings.device == "cuda" else "cpu",
        None if lora is None else _adaptation_of(lora, model, folder),
    )


def _adaptation_of(lora: LoraSettings, model: ModelConfig, folder: str | None) -> Adaptation | None:
    if not lora.is_on:
        return None
    # Without a folder the names are those of the architecture that a new model is exported as.
    source = config_from_json(config_to_json(model)) if folder is None else read_config(Path(folder))
    num_rows, kind = source.description.vocab_size, lora.base_quantization
    config = adapters_of(lora, source, range(num_rows, model.vocab_size))
    assert config is not None
    quantization = None if kind == "none" else kind
    return Adaptation(config, source.architecture.model_type, quantization, is_resized=model.vocab_size != num_rows)


def mesh_of(settings: RunSettings, world_size: int) -> Mesh:
    """The mesh of ``world_size`` ranks for a run of ``settings``; ConfigError if they cannot share it."""
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
        cp=parallel.cp,
        micro_batch_size=settings.micro_batch_size(dp // parallel.cp),
        zero=parallel.zero if dp > 1 else 0,
        fsdp=parallel.shards_fully(dp),
        recomputation=settings.recompute,
        ep=parallel.ep,
        etp=parallel.expert_tp if parallel.exact else parallel.etp,
    )


def planned_workload(settings: RunSettings, model_dir: str | PathLike[str] | None = None) -> Workload:
    """The workload of a run of ``settings``, in which the numbers that are not given are filled in.

    Of the folders of the model and the adapters only ``config.json``, ``adapter_config.json`` and the adapters' shapes
    are read, and the tokenizer if the model gets rows for new tokens.
    ``model_dir`` is the model's folder for ``PlanSettings``; ``FinetuneSettings`` name it themselves.
    """
    if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()):
        settings = dataclasses.replace(settings.on_device("cuda"), device="cuda")
    else:
        settings = settings.on_device("cpu")
    if isinstance(settings, FinetuneSettings):
        path = Path(settings.base)
        config = read_config(path, settings.model.implementation)
        check_continues_texts(config, path)
        check_by_plan(settings, config.description)
        model, num_rows = config.description, config.description.vocab_size
        if (adapters := settings.lora.lora_from) is not None:
            num_rows = adapters_vocab_size(adapters, config.architecture, num_rows)
        if settings.resize_vocab:
            num_rows = with_new_tokens(settings, num_rows, PaddedTokenizer.load(path).vocab_size)
        model = config.architecture.with_vocabulary(model, num_rows)
        settings = resolved(settings, model, path)
        return workload_of(settings, with_dropout(model, settings.model.dropout))
    assert isinstance(settings, PlanSettings)
    if model_dir is None:
        settings = settings.resolved(None)
        model = describe(settings.model, settings.model.vocab_size)
        settings.check_effect(model.num_layers)
        return workload_of(settings, model)
    folder = os.fspath(model_dir)
    for name, value in settings.model.changed():
        if name not in ("model.sequence-length", "model.dropout"):
            raise ConfigError(
                f"{name} {value} cannot be used with the model of {folder}, which has its own; leave {name} out"
            )
    model = read_config(Path(folder)).description
    settings, longest = settings.resolved(model.max_sequence_length), model.max_sequence_length
    if settings.sequence_length > longest:
        raise ConfigError(
            f"model.sequence-length {settings.sequence_length} is more than {longest}, the longest sequence of {folder}"
        )
    settings.check_effect(model.num_layers)
    return workload_of(settings, with_dropout(model, settings.model.dropout or None), folder)
