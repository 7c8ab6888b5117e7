"""Runs that train adapters of experts and routers: any layout gives the results of one rank, in files of peft."""

from __future__ import annotations

import argparse
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from run.run_processes import run_command
from safetensors.torch import load_file
from storage.adapters.tiny_models import read_adapters, save_model

from shardwise.cli.main import main
from shardwise.core.errors import ConfigError
from shardwise.data.tokenizer import Tokenizer
from shardwise.doctor.comparison import compare
from shardwise.models.adapters import LoraConfig
from shardwise.run.metrics import read_metrics
from shardwise.run.settings import LoraSettings

LAYOUTS = {
    "tp 2, ep 2, sp": (2, "--tp", "2", "--ep", "2", "--etp", "1", "--sequence-parallel"),
    "tp 2, etp 2, ep 2": (4, "--tp", "2", "--ep", "2"),
    "ep 2, zero": (2, "--ep", "2", "--zero", "1"),
    "ep 2, pp 2": (4, "--pp", "2", "--ep", "2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    text = Path(argparse.__file__).read_text()[:20_000]
    (folder / "text.txt").write_text(text)
    for kind in ("mixtral", "qwen2_moe", "glm4_moe"):
        save_model(kind, folder / kind, vocab_size=301)
        Tokenizer.train([text], 290).save(folder / kind)
    return folder


def finetune(folder, kind, out, num_ranks, *more, data=None):
    run_command(
        folder, num_ranks, "finetune", folder / kind, "--out", out, "--device", "cpu",
        *(data or ("--data", folder / "text.txt")),
        *("--model.sequence-length", "16", "--training.steps", "4", "--training.global-batch-size", "4"),
        *("--training.save-every", "2", "--training.keep-checkpoints", "9", "--lora-rank", "4"),
        *("--optimizer.learning-rate", "0.01", *more),
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def one(folder):
    return finetune(folder, "mixtral", folder / "one", 1)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_trains_as_one_rank(folder, one, tmp_path, layout):
    comparison = compare(one, finetune(folder, "mixtral", tmp_path / "run", *LAYOUTS[layout]))
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)


@pytest.mark.slow
def test_the_balance_loss_of_a_folder(folder, tmp_path):
    """The loss that all layers have together, and the loads of padded rows, are those of one rank."""
    shutil.copytree(folder / "mixtral", folder / "balanced")
    config = json.loads((folder / "balanced" / "config.json").read_text())
    config |= {"output_router_logits": True, "router_aux_loss_coef": 0.2}
    (folder / "balanced" / "config.json").write_text(json.dumps(config))
    pairs = [{"prompt": "What is " * (k % 5 + 1), "completion": f"{k} " * (k % 3 + 1)} for k in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    data = ("--data", tmp_path / "pairs.jsonl")
    runs = [
        finetune(folder, "balanced", tmp_path / name, *layout, data=data)
        for name, layout in (("one", (1,)), ("fsdp", (2, "--ep", "2", "--fsdp")), ("cp", (4, "--cp", "2", "--tp", "2")))
    ]
    metrics = [[row for row in read_metrics(run / "metrics.jsonl") if "loss" in row] for run in runs]
    assert all(row["auxiliary_loss"] > 0.2 for row in metrics[0])
    for run, rows in zip(runs[1:], metrics[1:], strict=True):
        comparison = compare(runs[0], run)
        assert comparison.verdict == "rounding", "\n".join(comparison.lines)
        for row, expected in zip(rows, metrics[0], strict=True):
            for name in ("auxiliary_loss", "expert_load_max", "expert_load_min", "router_entropy"):
                assert row[name] == pytest.approx(expected[name], rel=1e-4), name


@pytest.mark.slow
def test_a_stage_without_experts(folder, tmp_path):
    """GLM's first layer is dense; the stages still agree on adapters, the norm and the metrics of experts."""
    runs = [finetune(folder, "glm4_moe", tmp_path / f"{pp}", pp, "--pp", f"{pp}") for pp in (1, 2)]
    comparison = compare(*runs)
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)
    files = [load_file(run / "adapter_model.safetensors") for run in runs]
    assert files[0].keys() == files[1].keys()


@pytest.mark.slow
def test_a_checkpoint_goes_on_at_another_layout(folder, one, tmp_path):
    out = tmp_path / "run"
    first = (4, "--tp", "2", "--ep", "2", "--training.steps", "2")
    finetune(folder, "mixtral", out, *first)
    names = {name for file in out.glob("checkpoints/step-00000002/*.safetensors") for name in load_file(file)}
    assert all("lora" in name for name in names)
    assert any(".experts.lora.down.lora_A" in name for name in names)
    finetune(folder, "mixtral", out, 4, "--pp", "2", "--ep", "2", "--resume", "auto")
    comparison = compare(one, out)
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)


@pytest.mark.slow
def test_adapters_of_sharded_experts_are_merged(folder, tmp_path):
    """The model that is left computes without them, as the run's own sample shows."""
    merged = [
        finetune(folder, "mixtral", tmp_path / f"{n}", n, "--lora-merge", *more) for n, *more in ((1,), (2, "--fsdp"))
    ]
    samples = [(out / "sample.txt").read_text() for out in merged]
    assert samples[0] == samples[1]
    files = [load_file(out / "model.safetensors") for out in merged]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        torch.testing.assert_close(files[1][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_peft_opens_what_a_run_leaves(folder, one):
    """The default targets of Mixtral, and named parameters of Qwen 2 MoE, are the merged models."""
    import transformers

    chosen = ("--lora-targets", "q_proj", "--lora-target-parameters", "experts.down_proj", "gate.weight")
    named = finetune(folder, "qwen2_moe", folder / "named", 2, "--ep", "2", *chosen)
    ids = torch.arange(24).view(2, 12)
    for kind, out, parameters in (
        ("mixtral", one, ["down_proj", "gate.weight", "gate_up_proj"]),
        ("qwen2_moe", named, ["experts.down_proj", "gate.weight"]),
    ):
        assert json.loads((out / "adapter_config.json").read_text())["target_parameters"] == parameters
        merged = folder / f"{kind}-merged"
        assert main(["export-hf", str(out), "--out", str(merged), "--merge"]) == 0
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            base, whole = (
                transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager")
                for path in (folder / kind, merged)
            )
            plain = base(ids).logits
            adapted, expected = read_adapters(base, out)(ids).logits, whole.eval()(ids).logits
        assert (adapted - expected).norm() < 1e-5 * plain.norm(), kind
        assert (adapted - plain).norm() > 1e-3 * plain.norm(), kind
        assert main(["generate", str(out), "--prompt", "import", "--max-new-tokens", "3", "--device", "cpu"]) == 0


def test_flags_of_parameters():
    settings = LoraSettings(lora_rank=2, lora_targets=(), lora_target_parameters=("gate.weight",))
    assert settings.config() == LoraConfig(r=2, lora_alpha=4, target_modules=(), target_parameters=("gate.weight",))
    assert settings.describe() == "adapters of rank 2 (gate.weight)"
    with pytest.raises(ConfigError, match="--lora-target-parameters without --lora-rank"):
        LoraSettings(lora_target_parameters=("gate.weight",))
    with pytest.raises(ConfigError, match=r"lora_dropout is 0\.1, which adapters of experts and routers do not have"):
        LoraSettings(lora_rank=2, lora_dropout=0.1, lora_target_parameters=("gate.weight",))
