"""Train and save a small BLOOM (ALiBi, LayerNorm after the embedding, tied output) on the same four ranks.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/mpu_walkthrough/bloom.py [FOLDER]

Five layers on two stages, three heads and 101 ids on two ranks: sizes need not divide evenly. The model is written into
FOLDER (default: a temporary folder) in the format of Hugging Face's transformers, and read again.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from by_rank import by_rank, four_ranks, print_once, row
from torch import Tensor

from shardwise import Groups, parallel_state
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.schedules import get_forward_backward_func
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.mlp import gelu_tanh
from shardwise.storage.huggingface import load_pretrained, save_pretrained
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.adamw import AdamW

VOCABULARY, LENGTH = 101, 16
STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 6, 4, 2


@dataclass(frozen=True)
class Training:
    """Results of training on one rank.

    Attributes:
        model: this rank's stage.
        losses: mean over the tokens of each step; on the last stage.
    """

    model: GPTModel
    losses: list[float]


def bloom() -> GPTModel:
    """Make this rank's part of the model, with the same values for any number of ranks and stages."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=5,
        hidden_size=24,
        num_attention_heads=3,
        activation_func=gelu_tanh,
        embedding_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )
    return GPTModel(
        config,
        TransformerLayerSpec(),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="alibi",
    )


def batch() -> Tensor:
    """Return ids, ``[m, b, s + 1]``: sequences that count up in steps of 1, 2, 3... from different starts."""
    count = MICRO_BATCHES * MICRO_BATCH_SIZE
    steps = torch.arange(1, count + 1)[:, None]
    ids = (7 * steps + steps * torch.arange(LENGTH + 1)) % VOCABULARY
    return ids.view(MICRO_BATCHES, MICRO_BATCH_SIZE, LENGTH + 1)


def mean_loss(losses: Tensor) -> tuple[Tensor, float]:
    """Return the loss for the backward pass, and its value for the report."""
    loss = losses.mean()
    return loss, loss.item()


def forward_step(data: Iterator[Tensor], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """Run the next micro-batch through this stage; return the output and the loss function of the last stage."""
    ids = next(data)
    return model(ids[:, :-1], labels=ids[:, 1:]), mean_loss


def train() -> Training:
    """Train for a few steps of AdamW on one batch."""
    model, groups = bloom(), Groups.of(parallel_state.get_topology())
    optimizer = AdamW(model, learning_rate=1e-2, weight_decay=0.0, betas=(0.9, 0.95), epsilon=1e-8)
    losses = []
    for _ in range(STEPS):
        reported = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batch()),
            model=model,
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
        )
        finalize_gradients_(model, tp_group=groups.tp, dp_group=groups.dp, embd_group=groups.embd)
        optimizer.step()
        optimizer.zero_grad()
        if reported:
            losses.append(sum(reported) / MICRO_BATCHES)
    return Training(model, losses)


def round_trip(model: GPTModel, folder: Path) -> bool:
    """Write the model as a Hugging Face folder, read it again, and return whether all values are equal."""
    save_pretrained(model, folder)
    again = load_pretrained(folder, groups=model.groups)
    pairs = zip(model.state_dict().items(), again.state_dict().items(), strict=True)
    return all(name == other and torch.equal(value, read) for (name, value), (other, read) in pairs)


def lines(training: Training, *, is_equal: bool) -> list[str]:
    """Return this rank's lines of the output."""
    model = training.model
    layers = [layer.layer_number for layer in model.decoder.layers]
    parts = ["embedding"] * model.pre_process + [f"layers {layers[0]} to {layers[-1]}"]
    parts += ["final norm and output layer"] * model.post_process
    heads = model.decoder.layers[0].self_attention.linear_proj.weight.size(1) // 8
    return [
        f"holds {', '.join(parts)}: {sum(param.numel() for param in model.parameters()):,} values, {heads} of 3 heads",
        *([f"loss {row(torch.tensor(training.losses))}"] if training.losses else []),
        f"written for transformers and read again, bit-equal: {is_equal}",
    ]


def main() -> None:
    """Run on this rank."""
    with four_ranks():
        training = train()
        with tempfile.TemporaryDirectory() as temporary:
            folder = [sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/bloom"]
            dist.broadcast_object_list(folder, src=0)
            text = by_rank(lines(training, is_equal=round_trip(training.model, Path(folder[0]))))
        print_once(text)


if __name__ == "__main__":
    main()
