"""The program of distillation: ten steps are those of the dense formulas, and a bad teacher is refused."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.forked import run_forked
from run.run_processes import be_rank
from run.test_dpo import BATCH, pairs_of, steps_of, write_lines
from storage.adapters.reference_steps import CLIP, DECAY, RATE, STEPS, WARMUP, reference_losses
from storage.adapters.tiny_models import save_model

from shardwise.core.errors import ConfigError, DataError
from shardwise.data import DataLoader, ExampleEncoder, SampleRows, TokenSamples, example_of
from shardwise.data.json_records import Record
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.processes.ranks import Ranks
from shardwise.run.session import open_session
from shardwise.run.settings import (
    FinetuneOptimizerSettings,
    FinetuneSettings,
    ParallelSettings,
    PretrainedSettings,
    SampleSettings,
    TrainingSettings,
)

SCRIPT = Path(__file__).parents[2] / "examples" / "distill.py"
LENGTH, ALPHA, TEMPERATURE = 40, 0.7, 2.0
# Teachers of other sizes, with as many ids as the student, fewer and more.
TEACHERS = {
    "large": {"n_embd": 42, "n_layer": 3, "n_head": 7},
    "narrow": {"vocab_size": 293},
    "wide": {"vocab_size": 320},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A student, teachers, and ten steps by the dense formulas in fp64."""
    root = tmp_path_factory.mktemp("distillation")
    records = [
        {"prompt": pair["prompt"][0]["content"], "completion": pair["chosen"][0]["content"]} for pair in pairs_of(18)
    ]
    write_lines(root / "texts.jsonl", records)
    write_lines(root / "held-out.jsonl", records[:5])
    tokenizer = Tokenizer.train([json.dumps(records)], 290)
    for seed, (name, changes) in enumerate(
        {"student": {}, "cut": {"vocab_size": 289}, "foreign": {}, **TEACHERS}.items()
    ):
        save_model("gpt2", root / name, seed=seed, dtype=torch.float64, **{"vocab_size": 301} | changes)
        tokenizer.save(root / name)
    Tokenizer.train(["other words " * 9, json.dumps(records)], 290).save(root / "foreign")
    save_model("gpt2", root / "bare", vocab_size=301)
    encoder = ExampleEncoder(tokenizer, None)
    encoded = [encoder.encode(example_of(Record("here", record), "text")) for record in records]
    dataset = SampleRows(TokenSamples.of("texts", encoded, tokenizer.eos_id), LENGTH, packing=False)
    schedule = DataLoader(dataset, BATCH, TrainingSettings().seed).schedule
    batches = [schedule.global_batch(step) for step in range(STEPS)]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = {name: dense_steps(root, dataset, batches, name) for name in TEACHERS}
    torch.set_num_threads(num_threads)
    (root / "expected.json").write_text(json.dumps(expected))
    return root


def dense_steps(root, dataset, batches, name):
    """Loss, cross entropy and divergence of ten steps."""
    import transformers

    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(root / each, dtype=torch.float64).eval()
        for each in ("student", name)
    )
    steps = []

    def loss_of(model, batch):
        rows = [dataset.row(index) for index in batch.tolist()]
        tokens, labels = (torch.stack([torch.from_numpy(row[key]) for row in rows]) for key in ("tokens", "labels"))
        counts = labels != -100
        logits = model(tokens).logits[counts]
        with torch.no_grad():
            taught = teacher(tokens).logits[counts]
        num_shared = min(logits.size(-1), taught.size(-1))
        p, q = ((each[:, :num_shared] / TEMPERATURE).softmax(-1) for each in (logits, taught))
        divergence = (q * (q.log() - p.log())).sum(-1).mean()
        cross_entropy = F.cross_entropy(logits, labels[counts])
        steps.append([cross_entropy.item(), divergence.item()])
        return ALPHA * TEMPERATURE**2 * divergence + (1 - ALPHA) * cross_entropy

    losses = reference_losses(student, batches, loss_of)
    return [[loss, *others] for loss, others in zip(losses, steps, strict=True)]


def open_run(root, out, teacher, parallel, monkeypatch, **training):
    script = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
    settings = FinetuneSettings(
        base=str(root / "student"),
        data=(str(root / "texts.jsonl"),),
        out=str(out),
        device="cpu",
        model=PretrainedSettings(sequence_length=LENGTH),
        parallel=parallel,
        optimizer=FinetuneOptimizerSettings(
            learning_rate=RATE, warmup_steps=WARMUP, clip_grad_norm=CLIP, weight_decay=DECAY
        ),
        training=TrainingSettings(steps=STEPS, global_batch_size=BATCH, dtype="float64", **training),
        samples=SampleSettings(held_out=(str(root / "held-out.jsonl"),)),
    )
    monkeypatch.setenv("SHARDWISE_CACHE", str(root / f"cache-{dist.get_world_size()}"))
    ranks = Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    options = {"alpha": ALPHA, "temperature": TEMPERATURE}
    return open_session(settings, ranks, lambda each: script.task_of(each, root / teacher, **options))


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_ten_steps_are_those_of_the_dense_formulas(group, root, tmp_path, monkeypatch):
    """The teacher stays as it is."""
    expected = json.loads((root / "expected.json").read_text())
    for teacher, parallel, training in (
        ("large", ParallelSettings(tp=2), {}),
        ("narrow", ParallelSettings(tp=2, sequence_parallel=True), {"micro_batch_size": 1}),
        ("wide", ParallelSettings(zero=1), {"micro_batch_size": 1}),
        ("large", ParallelSettings(cp=2), {}),
    ):
        session = open_run(root, tmp_path / "run", teacher, parallel, monkeypatch, **training)
        taught = session.trainer.objective.teacher
        before = {key: param.clone() for key, param in taught.named_parameters()}
        np.testing.assert_allclose(
            steps_of(session), expected[teacher], rtol=1e-9, atol=1e-10, err_msg=f"{teacher} {parallel}"
        )
        assert all(param.grad is None and torch.equal(param, before[key]) for key, param in taught.named_parameters())
        session.topology.destroy()
    assert expected["large"][-1][2] < 0.95 * expected["large"][0][2], "nothing is learned"


@pytest.mark.ranks(2)
def test_a_teacher_that_does_not_fit_is_refused(group, root, tmp_path, monkeypatch):
    for teacher, parallel, error, message in (
        ("cut", ParallelSettings(tp=2), ConfigError, "cut has another tokenizer than .*student, or fewer ids"),
        ("foreign", ParallelSettings(tp=2), ConfigError, "foreign has another tokenizer than"),
        ("bare", ParallelSettings(tp=2), DataError, "tokenizer"),
        ("large", ParallelSettings(pp=2), ConfigError, "no pipeline stages and no exact form"),
    ):
        with pytest.raises(error, match=message):
            open_run(root, tmp_path / "run", teacher, parallel, monkeypatch)


def run_script(arguments, rank, store):
    """As one of two ranks under torchrun."""
    os.environ["SHARDWISE_CACHE"] = str(store.parent / "cache")
    be_rank(rank, 2, store)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


@pytest.mark.slow
def test_the_program_on_two_ranks(root, tmp_path):
    given = ("--teacher", root / "wide", "--data", root / "texts.jsonl", "--out", tmp_path / "taught", "--steps", "2")
    arguments = [str(SCRIPT), str(root / "student"), *map(str, given), "--tp", "2"]
    done = run_forked(run_script, [(arguments, rank, tmp_path / "store") for rank in range(2)], tmp_path)
    assert [code for code, _ in done] == [0, 0], done
    assert "bits per byte" in done[0][1]
    assert "divergence" in done[0][1]
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "taught")
