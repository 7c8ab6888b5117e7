"""Exact fine-tuning leaves the same bits at each layout: rows as wide as their samples, packed ones, adapters."""

import json

import pytest
from run.run_processes import hashes, run_in_processes
from storage.adapters.tiny_models import save_model

from shardwise.cli.main import main
from shardwise.core.errors import ConfigError
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.settings import (
    FinetuneOptimizerSettings,
    FinetuneSettings,
    LoraSettings,
    ParallelSettings,
    PretrainedSettings,
    SampleSettings,
    TrainingSettings,
)
from shardwise.run.tasks import task_of

SIZES = {"hidden_size": 64, "intermediate_size": 136, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A tiny Llama whose vocabulary parts fit, and samples of many lengths, all short."""
    root = tmp_path_factory.mktemp("exact")
    save_model("llama", root / "base", vocab_size=304, **SIZES)
    records = [{"prompt": f"{number}:", "completion": " " + "ab" * (number % 11)} for number in range(40)]
    (root / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    Tokenizer.train(["ab: 0123456789"], 260).save(root / "base")
    return root


@pytest.mark.slow
def test_a_run_without_a_length_of_its_own(root, tmp_path, monkeypatch, capsys):
    """It has the model's, which is checked once it is known."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    flags = ["--data", str(root / "samples.jsonl"), "--out", str(tmp_path / "run"), "--device", "cpu", "--exact"]
    flags += ["--training.steps", "1", "--training.global-batch-size", "2", "--training.eval-every", "1"]
    assert main(["finetune", str(root / "base"), *flags]) == 0
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["model"]["sequence_length"] == 64
    capsys.readouterr()
    assert main(["finetune", str(root / "base"), *flags, "--exact-parts", "128", "--resume", "restart"]) == 2
    said = "it has 64 tokens; the largest exact-parts that works is 64"
    assert said in capsys.readouterr().err


def test_ranks_that_share_samples_need_rows_of_one_length(root):
    settings = FinetuneSettings(
        base=str(root / "base"),
        data=(str(root / "samples.jsonl"),),
        parallel=ParallelSettings(exact=True, cp=2),
        model=PretrainedSettings(sequence_length=64),
    )
    with pytest.raises(ConfigError, match=r"parallel\.cp 2 needs rows of one length, .*; use --packing"):
        task_of(settings).method.prepare()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("packing", "lora_rank", "parallel"),
    [
        (False, 4, {"tp": 2, "sequence_parallel": True, "pp": 2}),
        (True, None, {"tp": 4}),
        (True, 4, {"cp": 2, "tp": 2, "sequence_parallel": True}),
    ],
)
def test_layouts(root, tmp_path, packing, lora_rank, parallel):
    length = 32 * parallel.get("cp", 1)

    def run(name, world_size, **parallel):
        settings = FinetuneSettings(
            base=str(root / "base"),
            data=(str(root / "samples.jsonl"),),
            out=str(tmp_path / name),
            device="cpu",
            model=PretrainedSettings(sequence_length=length, dropout=0.1),
            parallel=ParallelSettings(exact=True, **parallel),
            optimizer=FinetuneOptimizerSettings(learning_rate=1e-2, warmup_steps=1),
            training=TrainingSettings(steps=3, global_batch_size=4, micro_batch_size=1, eval_every=1, save_every=3),
            samples=SampleSettings(packing=packing),
            lora=LoraSettings(lora_rank=lora_rank),
        )
        run_in_processes(settings, world_size, tmp_path / f"{name}-ranks")
        return hashes(tmp_path / name)

    expected = run("one", 1)
    assert {"loss of step 2", "grad_norm of step 2", "held_out_bits_per_byte of step 2"} <= expected.keys()
    assert run("split", 4, **parallel) == expected
