"""The training step of a model of transformers, split by its plan: by ``parallelize``, and by transformers itself."""

from __future__ import annotations

import importlib
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import parallelize
from shardwise.core.topology import Groups, Topology
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.clipping import clip_grad_norm_
from steps.baselines import by_mesh, clip_together_, make_adamw, split_parameters
from steps.problem import MAX_GRAD_NORM, NORM_EPSILON, ROTARY_BASE, LlamaSizes, Problem, Step, halves
from steps.shardwise_step import make_optimizer

_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attention.w{each}": f"self_attn.{each}_proj" for each in "qkvo"},
    **{f"feed_forward.w{number}": f"mlp.{each}_proj" for number, each in ((1, "gate"), (2, "down"), (3, "up"))},
}


def make_by_plan(problem: Problem, topology: Topology) -> Step:
    """Create a step of the model that ``shardwise.parallelize`` splits."""
    tp_group = topology.group("tp")
    model = parallelize(_whole_model(problem), Groups.of(topology))
    optimizer = make_optimizer(model)

    def step() -> tuple[Tensor, Tensor]:
        loss = _loss(model, problem)
        loss.backward()
        finalize_gradients_(model, tp_group=tp_group, dp_group=None)
        norm = clip_grad_norm_(model, MAX_GRAD_NORM, tp_group=tp_group)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def make_by_transformers(problem: Problem) -> Step:
    """Create a step of the model that transformers splits over all ranks."""
    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    distributed = importlib.import_module("transformers.distributed.configuration_utils")
    whole = _whole_model(problem)
    with tempfile.TemporaryDirectory() as own_folder:
        # save_pretrained writes on rank 0 alone.
        folders = [own_folder]
        dist.broadcast_object_list(folders)
        (folder,) = folders
        whole.save_pretrained(folder)
        dist.barrier()
        model = (
            type(whole)
            .from_pretrained(folder, distributed_config=distributed.DistributedConfig(tp_size=dist.get_world_size()))
            .train()
        )
        dist.barrier()
    matrices, norms = split_parameters(model)
    optimizer = make_adamw(matrices, norms)

    def step() -> tuple[Tensor, Tensor]:
        loss = _loss(model, problem)
        loss.backward()
        norm = clip_together_(by_mesh(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def _loss(model: Any, problem: Problem) -> Tensor:
    # The labels are shifted already.
    loss: Tensor = model(
        input_ids=problem.ids, labels=problem.labels, shift_labels=problem.labels, use_cache=False
    ).loss
    return loss


def _whole_model(problem: Problem) -> Any:
    import transformers

    sizes: LlamaSizes = problem.sizes
    config = transformers.LlamaConfig(
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        intermediate_size=sizes.ffn_hidden_size,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.sequence_length,
        tie_word_embeddings=sizes.tie_embeddings,
        rms_norm_eps=NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        attn_implementation="sdpa",
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    values = {}
    for name, value in problem.weights.items():
        prefix, own = "", name.removesuffix(".weight")
        if own.startswith("layers."):
            number, _, own = own.removeprefix("layers.").partition(".")
            prefix = f"model.layers.{number}."
        is_rotated = own in ("attention.wq", "attention.wk")
        values[f"{prefix}{_NAMES[own]}.weight"] = halves(value, sizes) if is_rotated else value
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values[name])
    return model.train()
