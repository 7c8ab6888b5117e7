"""Build a model from settings."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.topology import Groups
from shardwise.models.config import ModelConfig
from shardwise.models.description import ModelChunks, chunks_of, model_arguments
from shardwise.models.experts import Experts
from shardwise.models.gpt import GPT
from shardwise.run.settings import ModelSettings, RunSettings, Settings
from shardwise.storage.huggingface import model_config
from shardwise.training.optimizer.mixed_precision import PRECISIONS


def describe(model: ModelSettings, vocab_size: int) -> ModelConfig:
    """Return the description of the model in the settings, including the initialization of its weights."""
    llama = model.architecture == "llama"
    # The default gives both architectures about the same number of weights.
    usual_ffn_hidden_size = -(-8 * model.hidden_size // 3 // 32) * 32 if llama else 4 * model.hidden_size
    ffn_hidden_size = model.ffn_hidden_size or usual_ffn_hidden_size
    experts = None
    if model.num_experts is not None:
        per_token = model.num_experts_per_tok
        experts = Experts(
            num=model.num_experts,
            per_token=per_token,
            # A multiple of 8, for grouped products (``kernels.grouped``).
            ffn_hidden_size=model.expert_ffn_hidden_size or -(-ffn_hidden_size // (8 * per_token)) * 8,
            selection_bias=model.router_bias_rate > 0,
            bias_rate=model.router_bias_rate,
            # The experts of a token together start at the scale of an MLP.
            init_scale=per_token,
            capacity_factor=model.expert_capacity_factor,
            drops_by=model.expert_drops_by,
            aux_loss=model.router_aux_loss,
            balances=model.router_balance,
            z_loss=model.router_z_loss,
            forces_balance=model.router_force_balance,
        )
    return ModelConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.hidden_size // model.num_heads,
        # No layer has another MLP.
        ffn_hidden_size=ffn_hidden_size if experts is None else experts.ffn_hidden_size,
        vocab_size=vocab_size,
        max_sequence_length=model.sequence_length,
        activation_func=F.silu if llama else F.gelu,
        gated_linear_unit=llama,
        normalization="RMSNorm" if llama else "LayerNorm",
        add_bias_linear=not llama,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope" if llama else "learned_absolute",
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        # "Small init" of Nguyen and Salazar 2019 (arXiv:1910.05895): about 0.02 at the width of GPT-2, larger for
        # narrower models. With 0.02, narrow models learn nothing for a hundred steps.
        init_method_std=math.sqrt(2 / (5 * model.hidden_size)),
        experts=experts,
    )


# Settings of parallelism that are fields of a model's config.
_PARALLEL = ("sequence_parallel", "tp_comm_overlap", "cp_comm_type", "ep_comm_type")


def config_fields(settings: RunSettings, groups: Groups) -> dict[str, Any]:
    """Return the fields of a model's config that set how it is trained and split, not its architecture."""
    parallel, pp = settings.parallel, groups.num_stages
    precision = PRECISIONS[settings.training.dtype]
    # One stage has nothing to interleave. An example is the whole model of the parity proof.
    chunks = parallel.virtual_stages if pp > 1 else 1
    return {
        "params_dtype": precision.params_dtype,
        # A fully sharded weight has no whole gradient to add to, and an exact run sums gradients by a tree.
        "gradient_accumulation_fusion": precision.has_masters
        and parallel.parts is None
        and not parallel.shards_fully(1 if groups.dp is None else groups.dp.size()),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "delay_wgrad_compute": pp > 1 and parallel.pipeline_schedule == "zero-bubble",
        **{name: getattr(parallel, name) for name in _PARALLEL},
        "exact_parts": parallel.parts,
        "fuse_output_layer_and_loss": settings.training.loss == "linear_fused",
        "recompute": settings.recompute,
        # With CPU initialization, adapters start from the same values on every device, as weights always do.
        "use_cpu_initialization": True,
    }


def build_model(settings: RunSettings, vocab_size: int, *, groups: Groups, device: torch.device) -> GPT | ModelChunks:
    """Build the model of ``settings``, or this rank's stage of it, on ``device`` with initial weights.

    The weights are drawn from the CPU's default generator and are therefore the same on every device. Seed it first.
    """
    assert isinstance(settings, Settings)
    description = describe(settings.model, vocab_size)
    config = model_config(description, **config_fields(settings, groups))
    state, chunks = torch.default_generator.get_state(), []
    for vp_stage in chunks_of(config):
        # All chunks start from the same generator state, as parts of one model.
        torch.default_generator.set_state(state)
        arguments = model_arguments(config, groups=groups, vp_stage=vp_stage)
        with device:
            chunks.append(GPT(config, **arguments))
    return ModelChunks(chunks) if len(chunks) > 1 else chunks[0]
