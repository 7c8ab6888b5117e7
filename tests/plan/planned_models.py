"""Small models of every kind that a run may train, and how they are planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from harness.live_bytes import LiveBytes

from shardwise.core.sharding.balanced import local_rows
from shardwise.core.topology import Groups
from shardwise.data import Batch
from shardwise.models.config import ModelConfig
from shardwise.models.description import ModelChunks, chunks_of
from shardwise.models.transformer.heads import LatentAttention
from shardwise.models.transformer_model import TransformerModel
from shardwise.plan.plan import RankPlan, make_plan
from shardwise.plan.rehearsal import Rehearsals
from shardwise.plan.workload import Adaptation, Workload, mesh_of
from shardwise.run.build import config_fields
from shardwise.run.settings import (
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RecomputeSettings,
    Settings,
    TrainingSettings,
)
from shardwise.storage.huggingface import build_model, model_config
from shardwise.training.gradients.fully_sharded import FullyShardedModel
from shardwise.training.optimizer.optimizer import LocalShards, ZeroOptimizer
from shardwise.training.trainer import Trainer

LLAMA: dict[str, Any] = {
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "num_query_groups": 2,
}
BIASES = {"add_bias_linear": True}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": BIASES | {"share_embeddings_and_output_weights": True},
    "llama": LLAMA,
    "mistral": LLAMA | {"window_size": (3, 0)},
    "qwen3": LLAMA | {"qk_layernorm": True, "kv_channels": 10},
    "bloom": BIASES
    | {"embedding_layernorm": True, "position_embedding_type": "alibi", "share_embeddings_and_output_weights": True},
    "gemma": LLAMA
    | {
        "norm_position": "sandwich",
        "attention_logit_softcap": 50.0,
        "final_logit_softcap": 30.0,
        "window_size": (3, 0),
        "windowed_layers": (True, False, True),
        "window_rotary_base": 100.0,
        "embedding_multiplier": 2.0,
    },
    "olmo2": LLAMA
    | {"norm_position": "branch", "qk_layernorm": True, "qk_layernorm_over_heads": True, "clip_qkv": 0.5},
    "smollm3": LLAMA | {"rotary_layers": (True, False, True), "residual_multiplier": 0.5},
    "gpt_neox": BIASES | {"position_embedding_type": "rope", "parallel_residual": True},
    "opt": BIASES | {"position_offset": 2},
    "one key-value head": {"num_query_groups": 1},
    "latent": {name: value for name, value in LLAMA.items() if name != "num_query_groups"}
    | {"latent": LatentAttention(10, 4, 6, 5, query_rank=14), "kv_channels": 10},
}
# What 2, 3 and 4 ranks divide, and what none of them does.
EVEN = {"num_attention_heads": 12, "hidden_size": 36, "ffn_hidden_size": 48, "vocab_size": 312, "kv_channels": 6}
UNEVEN = {"num_attention_heads": 8, "hidden_size": 32, "ffn_hidden_size": 43, "vocab_size": 301, "kv_channels": 4}
S, B = 13, 3
SMALL = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 43,
    "vocab_size": 301,
    "sequence_length": 16,
}


def described(kind: str, *, sizes: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """A model of ``kind``, in sizes of nobody."""
    fields = {"num_layers": 3, "max_sequence_length": 16, "add_bias_linear": False}
    fields |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, **(EVEN if sizes is None else sizes)}
    fields = fields | {"num_query_groups": fields["num_attention_heads"]} | KINDS[kind] | changes
    return ModelConfig(**fields)


RECOMPUTATIONS = {
    "full": {"granularity": "full", "method": "uniform", "num_layers": 2},
    "block": {"granularity": "full", "method": "block", "num_layers": 2},
    "core_attn": {"granularity": "selective", "modules": ("core_attn",)},
    "layernorm, mlp_act": {"granularity": "selective", "modules": ("layernorm", "mlp_act")},
    "mlp": {"granularity": "selective", "modules": ("mlp",)},
}


def settings_of(
    architecture: str = "llama",
    *,
    dtype: str = "float32",
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    recompute: dict[str, Any] | None = None,
    optimizer: str = "adamw",
    **parallel: Any,
) -> Settings:
    """Settings of a new, small model."""
    training = {"dtype": dtype, "global_batch_size": 8, "micro_batch_size": 1} | (training or {})
    return Settings(
        data=("text",),
        device="cpu",
        model=ModelSettings(architecture=architecture, **(SMALL | (model or {}))),
        parallel=ParallelSettings(**parallel),
        recompute=RecomputeSettings(**(recompute or {})),
        optimizer=OptimizerSettings(name=optimizer),
        training=TrainingSettings(**training),
    )


def workload_of(
    model: ModelConfig,
    *,
    sequence_length: int = S,
    training: dict[str, Any] | None = None,
    adaptation: Adaptation | None = None,
    **options: Any,
) -> Workload:
    """``model`` in training, one micro-batch of a few samples a step."""
    training = {"global_batch_size": B, "micro_batch_size": B} | (training or {})
    sizes = {"sequence_length": sequence_length, "num_layers": model.num_layers}
    settings = settings_of(model=sizes, training=training, **options)
    return Workload(settings, model, adaptation=adaptation)


def planned(
    workload: Workload, world_size: int = 1, ranks: Iterable[int] = (0,), rehearsals: Rehearsals | None = None
) -> dict[int, RankPlan]:
    """The plans of ranks of the workload's own layout; call it outside of ranks."""
    rehearsals, mesh = rehearsals or Rehearsals(workload), mesh_of(workload.settings, world_size)
    plans = {rank: make_plan(workload, mesh, rank=rank, rehearsals=rehearsals) for rank in ranks}
    return {rank: plan.stages[0] for rank, plan in plans.items()}


def built(workload: Workload, groups: Groups, device: str = "cpu") -> TransformerModel | ModelChunks:
    """The model of a workload as a run builds it, with initial values."""
    torch.default_generator.manual_seed(1)
    config = model_config(workload.model, **config_fields(workload.settings, groups))
    chunks = [
        build_model(config, groups=groups, device=torch.device(device), vp_stage=chunk) for chunk in chunks_of(config)
    ]
    return ModelChunks(chunks) if len(chunks) > 1 else chunks[0]


def state_of(trainer: Trainer) -> dict[str, int]:
    """Bytes of a trainer's weights, gradients, fp32 copies and optimizer state."""
    params = [param for chunk in trainer._chunks for param in chunk.parameters()]
    gradients = getattr(trainer.gradients, "buffers", [param.grad for param in params if param.grad is not None])
    if isinstance(trainer.gradients, FullyShardedModel):
        params, gradients = map(local_rows, params), map(local_rows, gradients)
    kept = list(state_tensors(trainer.optimizer))
    return {
        "weights": bytes_of(params),
        "gradients": bytes_of(gradients),
        "masters": bytes_of(tensor for tensor, is_copy in kept if is_copy),
        "optimizer": bytes_of(tensor for tensor, is_copy in kept if not is_copy),
    }


def state_tensors(optimizer: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """What an optimizer keeps, and whether each is a copy of a parameter."""
    if isinstance(optimizer, LocalShards | ZeroOptimizer):
        optimizer = optimizer.optimizer
    if hasattr(optimizer, "_masters"):
        yield from ((tensor, True) for tensor in optimizer._masters.values())
        yield from state_tensors(optimizer.optimizer)
    elif hasattr(optimizer, "_momenta"):
        yield from ((tensor, False) for tensor in optimizer._momenta.values())
        yield from state_tensors(optimizer._adamw)
    else:
        yield from ((tensor, False) for state in optimizer.state.values() for tensor in state.values())


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of each storage once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def kept_in_a_step(trainer: Trainer, batch: Batch) -> int:
    """Bytes of the tensors that the forward of a step on one micro-batch makes and the backward finds."""
    begin, backward, counts = trainer.gradients.begin, torch.Tensor.backward, list[int]()

    def counted(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            counts.append(made.count())
            function(*args)

        return call

    trainer.gradients.begin, torch.Tensor.backward = counted(begin), counted(backward)
    try:
        with LiveBytes() as made:
            trainer.step(0, [batch])
    finally:
        torch.Tensor.backward = backward
    before, after = counts
    return after - before
