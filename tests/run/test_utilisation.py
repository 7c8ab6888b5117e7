"""What a run says of its use of the hardware."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from plan.planned_models import described
from run.test_run import open_tiny
from run.tiny import tiny_settings
from torch.utils.flop_counter import FlopCounterMode

from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.topology import Groups
from shardwise.models.transformer.heads import GlobalHeads
from shardwise.run.metrics import read_metrics
from shardwise.run.run import train
from shardwise.run.utilisation import Utilisation, model_flops_per_token, peak_memory, peak_of
from shardwise.storage.huggingface import build_model, model_config


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "latent", "global"])
def test_model_flops_are_those_of_the_products(group, kind):
    s, b = 16, 3
    model = described("qwen3" if kind == "global" else kind)
    if kind == "global":
        model = dataclasses.replace(model, global_heads=GlobalHeads(1, 20, keys_are_values=True))
    with torch.device("meta"):
        built = build_model(model_config(model, attention_backend="local"), groups=Groups(tp=group))
        hidden = torch.zeros(s, b, model.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        rotary = None if built.rotary is None else built.rotary(torch.arange(s, device="meta"), torch.float32)
        sequence = SequenceView(s)
        built._logits(built.decoder(hidden, rotary=rotary, sequence=sequence), sequence).sum().backward()
    assert counter.get_total_flops() == b * s * model_flops_per_token(model, s)


def test_frozen_weights_have_no_gradient_to_compute():
    model = described("llama")
    own = 12 * 3 * 12 * 6 * 32
    trained, frozen = (model_flops_per_token(model, 32, trains_weights=trains) for trains in (True, False))
    assert 4 * (trained - own) == 6 * (frozen - own)


def test_a_window_bounds_the_keys_of_its_layers():
    model = described("llama")
    assert model.num_layers == 3
    windowed = dataclasses.replace(model, window_size=(7, 0), windowed_layers=(True, False, True))
    whole, short = (model_flops_per_token(model, length) for length in (32, 8))
    assert model_flops_per_token(windowed, 32) * 3 == whole + 2 * short
    assert model_flops_per_token(windowed, 8) == short
    everywhere = dataclasses.replace(model, window_size=(7, 0))
    assert model_flops_per_token(everywhere, 32) == short


def test_the_peak_is_given_known_or_measured(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert peak_of(cpu, torch.float32, 2.5).flops == 2.5e12
    measured = peak_of(cpu, torch.float32)
    assert 1e7 < measured.flops < 1e14
    assert "measured on products" in measured.source
    for name, dtype, tflops in (
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.0),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA L40S", torch.float16, 362.0),
        ("NVIDIA L4", torch.float16, 121.0),
        ("NVIDIA L40", torch.float16, None),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("NVIDIA RTX A1000", torch.bfloat16, None),
        ("NVIDIA H200", torch.float64, None),
        ("Somebody's GPU", torch.bfloat16, None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        peak = peak_of(gpu, dtype)
        assert peak.flops == (None if tflops is None else tflops * 1e12), name
        assert name in peak.source
        assert ("give --peak-tflops" in peak.source) == (tflops is None)


def test_utilisation_is_the_share_of_all_ranks_peak():
    lengths = np.array([10, 30, 10])
    assert Utilisation(lambda length: 2 * length, 2e3, "as given").metrics(lengths, 1.0) == {"mfu": 1.1}
    assert Utilisation(lambda length: 2 * length, None, "not known").metrics(lengths, 4.0) == {}
    assert (
        Utilisation(lambda length: 2 * length, 2e12, "as given").line() == "peak   2.00 TFLOP/s of all ranks, as given"
    )


def test_resident_memory_is_that_of_this_process():
    name, before = peak_memory(torch.device("cpu"))
    assert name == "peak_resident_bytes"
    size = 64 << 20
    held = torch.ones(before + size, dtype=torch.uint8)
    assert peak_memory(torch.device("cpu"))[1] >= before + size
    del held


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_metrics_have_both_of_all_ranks(group, tmp_path, monkeypatch):
    settings = dataclasses.replace(tiny_settings(tmp_path, tp=2, steps=3), peak_tflops=0.5)
    if group.rank() == 1:
        held = torch.ones(256 << 20, dtype=torch.uint8)
        assert held[-1] == 1
        del held
    session = open_tiny(settings, monkeypatch, tmp_path)
    train(session)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 3
    # The ranks' peaks are 0.5 TFLOP/s each; a step is 4 samples of 24 tokens.
    flops = 4 * 24 * model_flops_per_token(session.task.source.describe(session.data), 24)
    for row in rows:
        assert row["peak_resident_bytes"] > 256 << 20
        assert row["mfu"] == pytest.approx(flops * row["tokens_per_second"] / (4 * 24) / 1e12)
        assert row["computed_tokens_per_second"] == row["learned_tokens_per_second"] == row["tokens_per_second"]


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_peak_that_cannot_be_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match="peak-tflops"):
        dataclasses.replace(tiny_settings(tmp_path), peak_tflops=value)
