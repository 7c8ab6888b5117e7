"""The training step of Shardwise, with the same weights as the baselines."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.topology import Groups, Topology
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.tensor_parallel.layers import named_param_layouts
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.clipping import clip_grad_norm_
from steps.problem import (
    ADAM_EPSILON,
    BETAS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NORM_EPSILON,
    ROTARY_BASE,
    WEIGHT_DECAY,
    LlamaSizes,
    Problem,
    Step,
    Weights,
    fuse_qkv,
    halves,
)

_NAMES = {
    "embedding.word_embeddings.weight": "tok_embeddings.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "self_attention.linear_proj.weight": "attention.wo.weight",
    "pre_mlp_layernorm.weight": "ffn_norm.weight",
    "mlp.linear_fc2.weight": "feed_forward.w2.weight",
    "decoder.final_layernorm.weight": "norm.weight",
    "output_layer.weight": "output.weight",
}


def make_shardwise(problem: Problem, topology: Topology, *, sequence_parallel: bool = False) -> Step:
    """Create a step with tensor parallelism, with or without sequence parallelism."""
    tp_group, dp_group = topology.group("tp"), topology.group("dp")
    model = make_model(problem, topology, sequence_parallel=sequence_parallel)
    optimizer = make_optimizer(model)

    def step() -> tuple[Tensor, Tensor]:
        loss = model(problem.ids, labels=problem.labels).mean()
        loss.backward()
        finalize_gradients_(model, tp_group=tp_group, dp_group=dp_group)
        norm = clip_grad_norm_(model, MAX_GRAD_NORM, tp_group=tp_group)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def make_model(problem: Problem, topology: Topology, *, sequence_parallel: bool = False) -> GPT:
    """Create this rank's part of the model, with the weights of ``problem``."""
    sizes, tp_group = problem.sizes, topology.group("tp")
    config = ModelConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_heads,
        ffn_hidden_size=sizes.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=NORM_EPSILON,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        sequence_parallel=sequence_parallel,
        perform_initialization=False,
    )
    model = GPT(
        config,
        sizes.vocab_size,
        sizes.sequence_length,
        share_embeddings_and_output_weights=sizes.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=ROTARY_BASE,
        groups=Groups.of(topology),
    )
    with torch.no_grad():
        for name, param, layout in named_param_layouts(model, tp_group.size()):
            param.copy_(layout.take(_whole_weight(name, problem.weights, sizes), tp_group.rank()))
    return model


def make_optimizer(model: nn.Module) -> AdamW:
    """Create the optimizer, with the same settings as in the other variants."""
    return AdamW(model, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, betas=BETAS, epsilon=ADAM_EPSILON)


def _whole_weight(name: str, weights: Weights, sizes: LlamaSizes) -> Tensor:
    """Return the whole weight with the name ``name`` in Shardwise's model."""
    prefix = ""
    if name.startswith("decoder.layers."):
        number, _, name = name.removeprefix("decoder.layers.").partition(".")
        prefix = f"layers.{number}."
    if name == "self_attention.linear_qkv.weight":
        wq, wk, wv = (weights[f"{prefix}attention.{w}.weight"] for w in ("wq", "wk", "wv"))
        return fuse_qkv([halves(wq, sizes), halves(wk, sizes), wv], sizes.head_dim)
    if name == "mlp.linear_fc1.weight":
        return torch.cat([weights[f"{prefix}feed_forward.{w}.weight"] for w in ("w1", "w3")])
    return weights[prefix + _NAMES[name]]
