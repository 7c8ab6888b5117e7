"""A rank that has room for 1.3 times its shard of a model (``ulimit -v``) loads it, trains adapters and saves them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from harness.groups import alone
from harness.model_options import LLAMA, NO_DROPOUT
from run.test_state_within_a_limit import within

from shardwise.core.topology import Groups, Topology
from shardwise.data import Batch
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.run.out_of_memory import is_out_of_memory
from shardwise.run.settings import FinetuneSettings, LoraSettings, TrainingSettings
from shardwise.storage.adapters import add_lora_, save_adapter
from shardwise.storage.huggingface import load_pretrained, save_pretrained
from shardwise.storage.huggingface.pretrained import PretrainedFolder
from shardwise.training.trainer import Trainer

SEQUENCE = 8


def write_model(folder, groups, **sizes):
    """A Hugging Face folder with a Llama-like model; the bytes of this rank's shard."""
    config = ModelConfig(**LLAMA, **NO_DROPOUT, perform_initialization=False, **sizes)
    model = GPT(
        config, 301, SEQUENCE, groups=groups, position_embedding_type="rope", share_embeddings_and_output_weights=False
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            # The same on every rank, since some are whole.
            param.uniform_(-0.05, 0.05, generator=generator)
    save_pretrained(model, folder, architecture="llama")
    return sum(param.nbytes for param in model.parameters())


def finetune(folder, out, groups, *, adapters):
    """Load, train two steps and save; returns the losses."""
    settings = FinetuneSettings(
        base=str(folder),
        data=("text",),
        training=TrainingSettings(steps=2, global_batch_size=1),
        lora=LoraSettings(lora_rank=4) if adapters else LoraSettings(),
    )
    model = load_pretrained(folder, groups=groups, device="cpu")
    assert isinstance(model, GPT)
    architecture = PretrainedFolder(folder).architecture
    if adapters:
        add_lora_(model, settings.lora.config(), architecture)
    trainer = Trainer(settings, model, groups)
    tokens = torch.arange(SEQUENCE).unsqueeze(0)
    losses = [trainer.step(step, [Batch(tokens, tokens + 1)], SEQUENCE).loss for step in range(2)]
    if adapters:
        save_adapter(model, out, architecture)
    return losses


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_model_that_little_more_than_fits_is_tuned(group, tmp_path):
    topology = Topology.create(tp=group.size())
    groups = Groups.of(topology)
    # What a first run leaves in the process (threads, their arenas, modules) is none of the model's.
    tiny = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24}
    write_model(tmp_path / "tiny", groups, **tiny)
    finetune(tmp_path / "tiny", tmp_path / "tiny_adapter", groups, adapters=True)
    sizes = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "ffn_hidden_size": 2816}
    shard = write_model(tmp_path / "model", groups, **sizes)
    assert shard > 150e6
    dist.barrier(group=group)
    with within(int(1.3 * shard)):
        losses = finetune(tmp_path / "model", tmp_path / "adapter", groups, adapters=True)
    assert all(map(math.isfinite, losses))
    assert losses[0] != losses[1]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists() or group.rank() > 0
    topology.destroy()
    # Gradients of all weights have no room in such a limit. Each rank trains a whole model of its own, because ranks of
    # one model run out of memory in different calls, and one would wait for the other.
    sizes["num_layers"] = 4
    own = alone(group)
    groups = Groups(tp=own, dp=own)
    whole = write_model(tmp_path / f"whole_{group.rank()}", groups, **sizes)
    with within(int(1.3 * whole)), pytest.raises((RuntimeError, MemoryError)) as failure:
        finetune(tmp_path / f"whole_{group.rank()}", tmp_path / "out", groups, adapters=False)
    assert is_out_of_memory(failure.value)
