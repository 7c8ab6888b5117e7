"""A model of a billion parameters on one GPU: training, decoding, and the time for which a save blocks training."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint import GOAL, KINDS, Saver
from common import measure_in_rounds, ratios_of

from gpus.measuring import Limits, Row, busy_share, synchronize
from shardwise.core.topology import Groups
from shardwise.data import Batch
from shardwise.models.generation.generation import generate
from shardwise.models.generation.sampling import Sampling
from shardwise.models.gpt import GPT
from shardwise.run.build import build_model
from shardwise.run.settings import ModelSettings, Settings, TrainingSettings
from shardwise.training.trainer import Trainer


@dataclass(frozen=True)
class ModelRunSizes:
    """Sizes of the model, which follow Llama 3.2 1B, and of the measurements."""

    num_layers: int = 16
    hidden_size: int = 2_048
    num_heads: int = 32
    num_query_groups: int = 8
    ffn_hidden_size: int = 8_192
    vocab_size: int = 128_256
    sequence_length: int = 4_096
    samples: int = 4
    steps: int = 10
    new_tokens: int = 128
    saved_bytes: int = 4 << 30


def settings_of(sizes: ModelRunSizes) -> Settings:
    """Return the settings of a run of ``shardwise train`` in bf16 with fp32 master weights."""
    return Settings(
        data=("none",),
        model=ModelSettings(
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_query_groups=sizes.num_query_groups,
            ffn_hidden_size=sizes.ffn_hidden_size,
            vocab_size=sizes.vocab_size,
            sequence_length=sizes.sequence_length,
        ),
        training=TrainingSettings(
            steps=1000, global_batch_size=sizes.samples, micro_batch_size=sizes.samples, dtype="bfloat16"
        ),
    )


def measure_model(device: torch.device, sizes: ModelRunSizes, world: dist.ProcessGroup, limits: Limits) -> list[Row]:
    """Measure tokens per second, utilisation and idle time of training, and then decoding with the same weights."""
    settings = settings_of(sizes)
    groups = Groups(tp=world, dp=world)
    model = build_model(settings, sizes.vocab_size, groups=groups, device=device)
    assert isinstance(model, GPT)
    trainer = Trainer(settings, model, groups)
    num_parameters = sum(param.numel() for param in model.parameters())
    tokens = torch.randint(sizes.vocab_size, (sizes.samples, sizes.sequence_length + 1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    done = 0

    def step() -> None:
        nonlocal done
        trainer.step(done, [batch])
        done += 1

    for _ in range(3):
        step()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(sizes.steps):
        step()
    synchronize(device)
    seconds = (time.perf_counter() - begun) / sizes.steps
    rate = sizes.samples * sizes.sequence_length / seconds
    # Forward and backward pass of each weight, and of causal attention, which takes half the FLOPs of all pairs.
    flops = 6 * num_parameters + 6 * sizes.num_layers * sizes.hidden_size * sizes.sequence_length
    section = f"training, {num_parameters / 1e9:.2f}B parameters, bf16, {sizes.sequence_length} tokens"
    rows = [
        Row(section, "tokens", f"{rate:,.0f} per second"),
        Row(section, "utilisation", f"{rate * flops / limits.flops:.1%}", note="of the measured rate of bf16 products"),
    ]
    if (busy := busy_share(step, device)) is not None:
        rows.append(Row(section, "idle", f"{1 - busy:.1%}", note="of one step under the profiler"))
    return rows + _decoding(model, device, sizes, limits)


def _decoding(model: GPT, device: torch.device, sizes: ModelRunSizes, limits: Limits) -> list[Row]:
    def decode(num_tokens: int) -> float:
        synchronize(device)
        begun = time.perf_counter()
        new = generate(model, list(range(16)), max_new_tokens=num_tokens, sampling=Sampling(temperature=0.0))
        synchronize(device)
        assert len(new) == num_tokens
        return time.perf_counter() - begun

    decode(sizes.new_tokens)
    # Subtract the time for reading the prompt and the first token.
    seconds = max(1e-9, decode(sizes.new_tokens) - decode(1)) / max(1, sizes.new_tokens - 1)
    num_bytes = sum(param.nbytes for param in model.parameters())
    share = num_bytes / seconds / limits.bandwidth
    section = "decoding, one sequence"
    return [
        Row(section, "tokens", f"{1 / seconds:,.1f} per second"),
        Row(section, "bandwidth", f"{share:.1%}", note="of the weights' bytes, and of the measured bandwidth"),
    ]


def measure_saving(device: torch.device, sizes: ModelRunSizes) -> list[Row]:
    """Run the measurement of ``checkpoint.py`` in three rounds, on the default process group."""
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), sizes.saved_bytes, str(device))
        saver.check()
        (ratio,) = ratios_of(measure_in_rounds(KINDS, saver.seconds, num_rounds=3, num_warmup_rounds=0), [KINDS])
    spread = ratio.spread
    value = f"{spread.median:.3f} ({spread.min:.3f} to {spread.max:.3f})"
    what = f"blocked, of a synchronous save of {saver.num_bytes / 2**30:.1f} GiB"
    met = spread.median <= GOAL if device.type == "cuda" else None
    return [Row("saving", what, value, str(GOAL), met)]
