"""Train a small Llama with tensor and data parallelism, from a text file to a checkpoint, with Shardwise's Python API.

    export OMP_NUM_THREADS=1
    python examples/train.py README.md                                       # one rank
    torchrun --nproc-per-node 2 examples/train.py README.md --tp 2 --out split    # each layer split over two ranks
    torchrun --nproc-per-node 4 examples/train.py README.md --tp 2 --steps 40     # two copies; resumes the first run

The losses are the same in every layout, and a checkpoint can be loaded in any other layout.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwise import Groups, Topology
from shardwise.core.communication.collectives import all_reduce
from shardwise.data import DataLoader, TokenRows, TokenStream
from shardwise.models import GPT, ModelConfig
from shardwise.storage import checkpoint
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.clipping import clip_grad_norm_
from shardwise.training.optimizer.optimizer import optimizer_state

SEQUENCE, GLOBAL_BATCH, MICRO_BATCH, SEED = 64, 8, 2, 1234
END_OF_TEXT = 256  # The bytes are tokens 0 to 255.


def make_model(groups: Groups, device: torch.device) -> GPT:
    """Make a Llama: rotary positions, RMSNorm, SwiGLU, no biases. Each rank makes only its shards."""
    config = ModelConfig(
        num_layers=2,
        hidden_size=96,
        num_attention_heads=6,
        num_query_groups=3,
        ffn_hidden_size=256,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
    )
    torch.manual_seed(SEED)  # Initial weights depend on the seed, not on the layout.
    with device:
        return GPT(config, END_OF_TEXT + 1, SEQUENCE, groups=groups, position_embedding_type="rope")


def make_loader(text: Path) -> DataLoader:
    """Make a loader of batches of the file's bytes. All ranks have the same loader and request their own samples."""
    data = text.read_bytes()
    tokens = np.append(np.frombuffer(data, np.uint8).astype(np.uint16), np.uint16(END_OF_TEXT))
    stream = TokenStream(text.name, tokens, END_OF_TEXT, len(data))
    return DataLoader(TokenRows(stream, SEQUENCE), GLOBAL_BATCH, SEED)


def train_step(step: int, model: GPT, optimizer: AdamW, loader: DataLoader, groups: Groups) -> tuple[float, float]:
    """Run forward, backward and update. Return the loss of the global batch and the norm of its gradient."""
    assert groups.dp is not None
    device = next(model.parameters()).device
    optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in loader.batch(step, groups.dp.rank(), groups.dp.size(), MICRO_BATCH):
        tokens, labels = batch.tokens.to(device), batch.labels.to(device)
        # The model returns each token's loss, [b, s], the same on all tensor-parallel ranks. No rank holds all logits.
        loss = model(tokens, labels=labels).sum() / loader.num_labels(step)
        loss.backward()
        total += loss.detach()
    # Sum every gradient over dp, and over tp where tp ranks hold the same weight and a part of its gradient.
    finalize_gradients_(model, tp_group=groups.tp, dp_group=groups.dp)
    norm = clip_grad_norm_(model, 1.0, tp_group=groups.tp)
    optimizer.step()
    return all_reduce(total, group=groups.dp).item(), norm.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, default=Path("checkpoints"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # One rank needs no torchrun.
    dist.init_process_group(**{} if "RANK" in os.environ else alone)  # NCCL on CUDA, gloo on a CPU.
    topology = Topology.create(tp=options.tp)  # The remaining ranks are data parallel.
    groups = Groups.of(topology)
    model, loader = make_model(groups, device), make_loader(options.text)
    optimizer = AdamW(model, learning_rate=3e-3, weight_decay=0.1, betas=(0.9, 0.95), epsilon=1e-8)

    # The state has shards with their positions in the whole tensors, so that any layout can load it.
    weights = model.sharded_state_dict()
    state, first = weights | optimizer_state(weights, optimizer), 0
    world = dist.group.WORLD
    if (newest := checkpoint.latest(options.out)) is not None:
        first = checkpoint.load(newest, state, group=world)["step"]
        optimizer.set_step_(first)
    for step in range(first, options.steps):
        loss, norm = train_step(step, model, optimizer, loader, groups)
        if dist.get_rank() == 0:
            print(f"step {step:3d}  loss {loss:.6f}  gradient norm {norm:.6f}", flush=True)
    checkpoint.save(options.out, options.steps, state, {"step": options.steps}, group=world)
    topology.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
