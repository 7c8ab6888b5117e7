"""Runs of every kind in small: what they are for a plan, and a real run of them on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.core.sharding.balanced import local_rows
from shardwise.core.topology import Groups, Topology
from shardwise.models.config import ModelConfig
from shardwise.models.experts import Experts
from shardwise.nn.quantization import Quantization, QuantizedTensor
from shardwise.nn.replicated import named_param_layouts
from shardwise.plan.workload import Adaptation, Mesh, Workload, mesh_of
from shardwise.run.settings import (
    DpoSettings,
    FinetuneSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    PretrainedSettings,
    RecomputeSettings,
    RunSettings,
    Settings,
    TrainingSettings,
)
from shardwise.training.trainer import Trainer

NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
LLAMA: dict[str, Any] = NO_DROPOUT | {
    "activation_func": F.silu,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}
GPT: dict[str, Any] = NO_DROPOUT
BERT: dict[str, Any] = GPT | {
    "kind": "bert",
    "norm_position": "post",
    "embedding_layernorm": True,
    "final_layernorm": False,
    "num_tokentypes": 2,
    "add_binary_head": False,
}
# A plan assumes even loads.
EXPERTS: dict[str, Any] = LLAMA | {
    "experts": Experts(num=4, per_token=2, ffn_hidden_size=352, aux_loss=0.01, forces_balance=True)
}
LENGTH = 256
# Of the measured run, and of one before it that takes in what PyTorch and the system keep from a first step.
LARGE = {"hidden_size": 256, "num_attention_heads": 8, "kv_channels": 32, "ffn_hidden_size": 704, "vocab_size": 4099}
SMALL = {"hidden_size": 32, "num_attention_heads": 8, "kv_channels": 4, "ffn_hidden_size": 88, "vocab_size": 401}


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        ranks: number of ranks.
        kind: fields of the model that are not sizes.
        parallel, recompute, training, optimizer: settings that are not the defaults.
        layers: of the model.
        make: kind of the run's settings: ``"train"``, ``"finetune"`` or ``"dpo"``.
        more: other fields of the settings.
        adaptation: adapters.
    """

    ranks: int = 1
    kind: dict[str, Any] = field(default_factory=lambda: LLAMA)
    parallel: dict[str, Any] = field(default_factory=dict)
    recompute: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    layers: int = 4
    make: str = "train"
    more: dict[str, Any] = field(default_factory=dict)
    adaptation: Adaptation | None = None

    def workload(self, *, small: bool = False) -> Workload:
        """The workload, or a smaller one of the same kind."""
        sizes = SMALL if small else LARGE | self.sizes
        model = ModelConfig(
            num_layers=self.layers, num_query_groups=4, max_sequence_length=LENGTH, **self.kind, **sizes
        )
        return Workload(self._settings(small), model, adaptation=self.adaptation)

    @property
    def mesh(self) -> Mesh:
        """How the ranks share the work."""
        return mesh_of(self.workload().settings, self.ranks)

    def _settings(self, small: bool) -> RunSettings:
        length = 32 if small else LENGTH
        common: dict[str, Any] = {
            "data": ("text",),
            "parallel": ParallelSettings(**self.parallel),
            "recompute": RecomputeSettings(**self.recompute),
            "training": TrainingSettings(
                **({"global_batch_size": 4, "micro_batch_size": 2, "dtype": "float32"} | self.training)
            ),
        }
        if self.make == "train":
            experts = {"num_experts": self.kind["experts"].num} if "experts" in self.kind else {}
            model = ModelSettings(num_layers=self.layers, num_heads=8, sequence_length=length, **experts)
            return Settings(model=model, optimizer=OptimizerSettings(**self.optimizer), **common)
        kinds = {"finetune": FinetuneSettings, "dpo": DpoSettings}
        return kinds[self.make](base="model", model=PretrainedSettings(sequence_length=length), **common, **self.more)


def lora(quantization: Quantization | None = None) -> dict[str, Any]:
    """Fields of a case that trains adapters of all linear layers."""
    lora = LoraSettings(lora_rank=16, base_quantization=quantization or "none")
    return {"make": "finetune", "more": {"lora": lora}, "adaptation": Adaptation(lora.config(), "llama", quantization)}


class Run:
    """A real run of a case on this rank."""

    def __init__(self, case: Case, groups: Groups, *, small: bool = False) -> None:
        mesh = case.mesh
        self.workload = case.workload(small=small).at(mesh)
        self.model = self.workload.build(groups)
        _initialize_(self.model)
        self.trainer = Trainer(self.workload.settings, self.model, groups, self.workload.objective(groups))
        # As a run that goes on from a checkpoint: a first step that a loss scale skips would make no state.
        for _, param, layout in named_param_layouts(self.model, groups.tp.size()):
            if param.requires_grad:
                self.trainer.optimizer.state_of(param, layout)
        number = mesh.num_micro_batches(self.workload)
        self.batches = [self.workload.batch(mesh.micro_batch_size, self.trainer._needs_lengths) for _ in range(number)]

    def steps(self) -> None:
        """A short step, whose last messages may last into the next, and a whole one."""
        mesh = self.workload.settings.parallel
        self.trainer.step(0, self.batches[: mesh.pp])
        self.trainer.step(1, self.batches)
        # The gathers of updated weights hold memory until they are waited for.
        self.trainer.wait_for_weights()


def _initialize_(model: nn.Module) -> None:
    """Give all parameters values, the same on every rank that holds them, without a temporary of a parameter's size."""
    with torch.no_grad():
        for param in model.parameters():
            if isinstance(param, QuantizedTensor):
                param.codes.fill_(3)
                param.scales.fill_(0.01)
            elif param.dim() < 2:
                local_rows(param).fill_(1.0)
            else:
                local_rows(param).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(1))


def groups_of(case: Case) -> Groups:
    """The process groups of a case, on all ranks of the default group."""
    mesh = case.mesh
    return Groups.of(Topology.create(tp=mesh.tp, pp=mesh.pp, cp=mesh.cp, ep=mesh.ep, etp=mesh.expert_tp))


CASES: dict[str, Case] = {
    "one rank": Case(kind=GPT),
    "tp 2": Case(2, parallel={"tp": 2}),
    "tp 3": Case(3, parallel={"tp": 3}),
    "tp 4": Case(4, parallel={"tp": 4}),
    "tp 2, sp": Case(2, parallel={"tp": 2, "sequence_parallel": True}),
    "pp 2, gpipe": Case(
        2, parallel={"pp": 2, "pipeline_schedule": "gpipe"}, training={"global_batch_size": 4, "micro_batch_size": 1}
    ),
    "pp 2, 1f1b": Case(2, parallel={"pp": 2}, training={"global_batch_size": 4, "micro_batch_size": 1}),
    "pp 2, interleaved": Case(
        2,
        parallel={"pp": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2},
        training={"global_batch_size": 4, "micro_batch_size": 1},
    ),
    "pp 2, zero-bubble": Case(
        2,
        parallel={"pp": 2, "pipeline_schedule": "zero-bubble"},
        training={"global_batch_size": 4, "micro_batch_size": 1},
    ),
    "dp 2": Case(2),
    "dp 2, zero 1": Case(2, parallel={"zero": 1}),
    "dp 2, fsdp": Case(2, parallel={"fsdp": True}),
    "full, uniform 1": Case(recompute={"granularity": "full"}),
    "full, uniform 2": Case(2, parallel={"tp": 2, "sequence_parallel": True},
                            recompute={"granularity": "full", "num_layers": 2}),
    "full, block 2": Case(recompute={"granularity": "full", "method": "block", "num_layers": 2}),
    "core_attn": Case(recompute={"granularity": "selective", "modules": ("core_attn",)}),
    "layernorm, mlp_act": Case(2, parallel={"tp": 2},
                               recompute={"granularity": "selective", "modules": ("layernorm", "mlp_act")}),
    "mlp": Case(recompute={"granularity": "selective", "modules": ("mlp",)}),
    "bf16": Case(training={"dtype": "bfloat16"}),
    "bf16, gpt, tp 2": Case(2, kind=GPT, parallel={"tp": 2}, training={"dtype": "bfloat16"}),
    "bf16, dp 2, zero 1": Case(2, parallel={"zero": 1}, training={"dtype": "bfloat16"}),
    "bf16, pp 2": Case(2, parallel={"pp": 2}, training={"dtype": "bfloat16", "micro_batch_size": 1}),
    "float16": Case(training={"dtype": "float16"}),
    "pure bf16": Case(training={"dtype": "pure-bfloat16"}),
    "dropout": Case(2, kind=GPT | {"hidden_dropout": 0.1, "attention_dropout": 0.1}, parallel={"tp": 2}),
    "muon": Case(2, parallel={"tp": 2}, optimizer={"name": "muon"}),
    "exact, 8 micro-batches": Case(
        parallel={"exact": True}, training={"global_batch_size": 8, "micro_batch_size": 1}
    ),
    "exact, dp 2, zero 1, 6 micro-batches": Case(
        2, parallel={"exact": True, "zero": 1}, training={"global_batch_size": 12, "micro_batch_size": 1}
    ),
    "exact, experts, ep 2, 4 micro-batches": Case(
        2,
        kind=EXPERTS,
        parallel={"exact": True, "ep": 2},
        training={"global_batch_size": 8, "micro_batch_size": 1},
    ),
    "exact, pp 2, 8 micro-batches": Case(
        2, parallel={"exact": True, "pp": 2}, training={"global_batch_size": 8, "micro_batch_size": 1}
    ),
    "adapters": Case(2, parallel={"tp": 2}, **lora()),
    "adapters, nf4": Case(**lora("nf4")),
    "adapters, int8": Case(**lora("int8"), training={"dtype": "bfloat16"}),
    "dpo": Case(2, parallel={"tp": 2}, make="dpo"),
    "cp 2": Case(2, parallel={"cp": 2}),
    "cp 2, window, zero 1": Case(2, kind=LLAMA | {"window_size": (31, 0)}, parallel={"cp": 2, "zero": 1}),
    "cp 2, fsdp": Case(2, parallel={"cp": 2, "fsdp": True}),
    "cp 3": Case(3, parallel={"cp": 3}),
    "cp 3, a2a": Case(3, parallel={"cp": 3, "cp_comm_type": "a2a"}),
    "cp 2, tp 2, sp": Case(4, parallel={"cp": 2, "tp": 2, "sequence_parallel": True}),
    "cp 2, pp 2": Case(4, parallel={"cp": 2, "pp": 2}, training={"micro_batch_size": 1}),
    "experts": Case(kind=EXPERTS),
    "experts, ep 2": Case(2, kind=EXPERTS, parallel={"ep": 2}),
    "experts, ep 2, bf16, zero 1": Case(
        2, kind=EXPERTS, parallel={"ep": 2, "zero": 1}, training={"dtype": "bfloat16"}
    ),
    "experts, tp 2, ep 2, etp 1, sp": Case(
        2, kind=EXPERTS, parallel={"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}
    ),
    "experts, ep 2, fsdp": Case(2, kind=EXPERTS, parallel={"ep": 2, "fsdp": True}),
    "experts, tp 2, ep 2, pp 2": Case(
        4, kind=EXPERTS, parallel={"tp": 2, "ep": 2, "etp": 1, "pp": 2}, training={"micro_batch_size": 1}
    ),
    "experts, ep 2, pp 2, zero-bubble": Case(
        4,
        kind=EXPERTS,
        parallel={"ep": 2, "pp": 2, "pipeline_schedule": "zero-bubble"},
        training={"global_batch_size": 8, "micro_batch_size": 1},
    ),
    "experts, tp 2, ep 2": Case(4, kind=EXPERTS, parallel={"tp": 2, "ep": 2}),
}  # fmt: skip
