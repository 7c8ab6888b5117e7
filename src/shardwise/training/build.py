"""From settings to a model."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from shardwise.config import ModelConfig
from shardwise.models.chunks import ModelChunks
from shardwise.models.gpt import GPT
from shardwise.topology import Groups
from shardwise.training.settings import ModelSettings, Settings

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def ffn_hidden_size(model: ModelSettings) -> int:
    """Width of the MLP; where it is not set, such that both architectures have about the same number of weights."""
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    if model.architecture == "gpt":
        return 4 * model.hidden_size
    return -(-8 * model.hidden_size // 3 // 32) * 32


def build_model(
    settings: Settings,
    vocab_size: int,
    *,
    groups: Groups,
    device: torch.device,
    vp_stage: int | None = None,
) -> GPT:
    """The model that ``settings`` describe, or this rank's stage of it, on ``device``, with initial weights.

    Weights are drawn on the CPU, so that a run starts from the same ones on every device, and from the default
    generator: seed it first.

    Args:
        settings: of the run.
        vocab_size: the tokenizer's.
        groups: the model's process groups, whose sizes say how it is split.
        device: where the model goes.
        vp_stage: which of the stage's chunks, with interleaving.
    """
    model = settings.model
    llama = model.architecture == "llama"
    stage, pp = groups.stage, groups.num_stages
    # Nothing is interleaved on one stage, as of the whole model that parity is proved against.
    num_chunks = settings.parallel.virtual_stages if pp > 1 else 1
    config = ModelConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_query_groups,
        ffn_hidden_size=ffn_hidden_size(model),
        normalization="RMSNorm" if llama else "LayerNorm",
        gated_linear_unit=llama,
        activation_func=F.silu if llama else F.gelu,
        add_bias_linear=not llama,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        delay_wgrad_compute=pp > 1 and settings.parallel.pipeline_schedule == "zero-bubble",
        sequence_parallel=settings.parallel.sequence_parallel,
        fuse_output_layer_and_loss=settings.training.loss == "linear_fused",
        use_cpu_initialization=True,
        params_dtype=DTYPES[settings.training.dtype],
        # Nguyen and Salazar 2019 (arXiv:1910.05895), "small init": about 0.02 at the width of GPT-2, more for narrower
        # models, which learn nothing for a hundred steps otherwise.
        init_method_std=math.sqrt(2 / (5 * model.hidden_size)),
    )
    built = GPT(
        config,
        vocab_size,
        model.sequence_length,
        pre_process=stage == 0 and not vp_stage,
        post_process=stage == pp - 1 and (vp_stage or 0) == num_chunks - 1,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope" if llama else "learned_absolute",
        groups=groups,
        vp_stage=vp_stage,
    )
    return built.to(device)


def build_chunks(settings: Settings, vocab_size: int, *, groups: Groups, device: torch.device) -> ModelChunks:
    """All of this rank's chunks, by ``build_model``."""
    state = torch.default_generator.get_state()
    chunks = []
    for chunk in range(settings.parallel.virtual_stages):
        # Each starts as a part of the one model that begins here.
        torch.default_generator.set_state(state)
        chunks.append(build_model(settings, vocab_size, groups=groups, device=device, vp_stage=chunk))
    return ModelChunks(chunks)
