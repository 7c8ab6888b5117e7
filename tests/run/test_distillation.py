"""Distillation: ten steps are those of the dense formulas, at every layout, and the teacher stays as it is."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from run.test_dpo import BATCH, pairs_of, steps_of, write_lines
from run.test_run import interrupted_at
from storage.adapters.reference_steps import CLIP, DECAY, RATE, STEPS, WARMUP, reference_losses
from storage.adapters.tiny_models import save_model

from shardwise.core.errors import CheckpointError, ConfigError, DataError
from shardwise.data import DataLoader, ExampleEncoder, SampleRows, TokenSamples, example_of
from shardwise.data.json_records import Record
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.metrics import read_metrics
from shardwise.run.processes.ranks import Ranks
from shardwise.run.run import train
from shardwise.run.session import open_session
from shardwise.run.settings import (
    DistillSettings,
    FinetuneOptimizerSettings,
    LoraSettings,
    ParallelSettings,
    PretrainedSettings,
    SampleSettings,
    TeacherSettings,
    TrainingSettings,
)

LENGTH = 40
# What is taught how, and with which tolerance: the rotary angles of transformers are of fp32 whatever the weights are.
CASES = {
    "forward": (TeacherSettings(teacher="large", divergence="forward", temperature=2.0, alpha=0.7), 1e-10),
    "reverse": (TeacherSettings(teacher="large", divergence="reverse", temperature=1.5, alpha=1.0), 1e-10),
    "llama": (TeacherSettings(teacher="llama", divergence="reverse", alpha=0.3), 1e-5),
    "fewer ids": (TeacherSettings(teacher="narrow", temperature=2.0), 1e-10),
    "more ids": (TeacherSettings(teacher="wide", divergence="reverse"), 1e-10),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A student, teachers of other sizes and families, and ten steps by the dense formulas in fp64."""
    root = tmp_path_factory.mktemp("distillation")
    records = [
        {"prompt": pair["prompt"][0]["content"], "completion": pair["chosen"][0]["content"]} for pair in pairs_of(18)
    ]
    write_lines(root / "texts.jsonl", records)
    write_lines(root / "held-out.jsonl", records[:5])
    tokenizer = Tokenizer.train([json.dumps(records)], 290)
    sizes = {"gpt2": {}, "large": {"n_embd": 42, "n_layer": 3, "n_head": 7}, "llama": {}}
    sizes |= {"narrow": {"vocab_size": 293}, "wide": {"vocab_size": 320}, "cut": {"vocab_size": 289}}
    for seed, (name, changes) in enumerate(sizes.items()):
        kind = "llama" if name == "llama" else "gpt2"
        options = {"seed": seed, "vocab_size": 301, "dtype": torch.float64} | changes
        save_model(kind, root / name, **options)
        tokenizer.save(root / name)
    save_model("gpt2", root / "foreign", vocab_size=301)
    Tokenizer.train(["other words " * 9, json.dumps(records)], 290).save(root / "foreign")
    save_model("gpt2", root / "short", vocab_size=301, n_positions=16)
    tokenizer.save(root / "short")
    save_model("gpt2", root / "bare", vocab_size=301)
    encoder = ExampleEncoder(tokenizer, None)
    encoded = [encoder.encode(example_of(Record("here", record), "text")) for record in records]
    dataset = SampleRows(TokenSamples.of("texts", encoded, tokenizer.eos_id), LENGTH, packing=False)
    schedule = DataLoader(dataset, BATCH, TrainingSettings().seed).schedule
    batches = [schedule.global_batch(step) for step in range(STEPS)]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = {name: dense_steps(root, dataset, batches, settings) for name, (settings, _) in CASES.items()}
    torch.set_num_threads(num_threads)
    (root / "expected.json").write_text(json.dumps(expected))
    return root


def dense_steps(root, dataset, batches, settings):
    """Loss, cross entropy and divergence of ten steps."""
    import transformers

    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float64).eval()
        for name in ("gpt2", settings.teacher)
    )
    t, steps = settings.temperature, []

    def loss_of(model, batch):
        rows = [dataset.row(index) for index in batch.tolist()]
        tokens, labels = (torch.stack([torch.from_numpy(row[name]) for row in rows]) for name in ("tokens", "labels"))
        counts = labels != -100
        logits = model(tokens).logits[counts]
        with torch.no_grad():
            taught = teacher(tokens).logits[counts]
        num_shared = min(logits.size(-1), taught.size(-1))
        p, q = ((each[:, :num_shared] / t).softmax(-1) for each in (logits, taught))
        q, p = (q, p) if settings.divergence == "forward" else (p, q)
        divergence = (q * (q.log() - p.log())).sum(-1).mean()
        cross_entropy = F.cross_entropy(logits, labels[counts])
        steps.append([cross_entropy.item(), divergence.item()])
        return settings.alpha * t**2 * divergence + (1 - settings.alpha) * cross_entropy

    losses = reference_losses(student, batches, loss_of)
    return [[loss, *others] for loss, others in zip(losses, steps, strict=True)]


def settings_of(
    root, out, settings=CASES["forward"][0], *, parallel=None, samples=None, lora=None, resume="never", **training
):
    return DistillSettings(
        base=str(root / "gpt2"),
        data=(str(root / "texts.jsonl"),),
        out=str(out),
        resume=resume,
        device="cpu",
        model=PretrainedSettings(sequence_length=LENGTH),
        parallel=parallel or ParallelSettings(),
        optimizer=FinetuneOptimizerSettings(
            learning_rate=RATE, warmup_steps=WARMUP, clip_grad_norm=CLIP, weight_decay=DECAY
        ),
        training=TrainingSettings(**({"steps": STEPS, "global_batch_size": BATCH, "dtype": "float64"} | training)),
        samples=dataclasses.replace(samples or SampleSettings(), held_out=(str(root / "held-out.jsonl"),)),
        lora=lora or LoraSettings(),
        distillation=dataclasses.replace(settings, teacher=str(root / settings.teacher)),
    )


def open_run(settings, root, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(root / f"cache-{dist.get_world_size()}"))
    ranks = Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return open_session(settings, ranks)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(1, 2, 3)
def test_ten_steps_are_those_of_the_dense_formulas(group, root, tmp_path, monkeypatch):
    """Both directions, with masks, temperatures and a teacher of another family; over every kind of ranks."""
    expected = json.loads((root / "expected.json").read_text())
    layouts = [(name, ParallelSettings(tp=group.size()), {}) for name in CASES]
    if group.size() == 2:
        layouts += [
            ("fewer ids", ParallelSettings(tp=2, sequence_parallel=True), {"micro_batch_size": 1}),
            ("more ids", ParallelSettings(zero=1), {"micro_batch_size": 1}),
            ("reverse", ParallelSettings(fsdp=True), {}),
            ("llama", ParallelSettings(cp=2), {}),
        ]
    elif group.size() == 3:
        layouts = [("forward", ParallelSettings(cp=3), {})]
    for name, parallel, training in layouts:
        settings, tolerance = CASES[name]
        session = open_run(
            settings_of(root, tmp_path / "run", settings, parallel=parallel, **training), root, monkeypatch
        )
        teacher = session.trainer.objective.teacher
        before = {key: param.clone() for key, param in teacher.named_parameters()}
        np.testing.assert_allclose(
            steps_of(session), expected[name], rtol=10 * tolerance, atol=tolerance, err_msg=f"{name} {parallel}"
        )
        for key, param in teacher.named_parameters():
            assert param.grad is None, key
            assert torch.equal(param, before[key]), key
        session.topology.destroy()
    assert expected["forward"][-1][2] < 0.95 * expected["forward"][0][2], "nothing is learned"


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_packed_adapters_and_a_narrow_teacher(group, root, tmp_path, monkeypatch):
    """Packed rows give the loss of unpacked ones; the teacher keeps its own dtype; a resumed run is the same run."""
    if group.rank() == 0:
        model = save_model("gpt2", root / "bf16", seed=9, vocab_size=301, dtype=torch.bfloat16)
        del model
        (root / "bf16" / "tokenizer.json").write_bytes((root / "gpt2" / "tokenizer.json").read_bytes())
        (root / "bf16" / "tokenizer_config.json").write_bytes((root / "gpt2" / "tokenizer_config.json").read_bytes())
    dist.barrier(group=group)
    losses = []
    for packing in (False, True):
        samples = SampleSettings(packing=packing)
        settings = settings_of(root, tmp_path / "run", parallel=ParallelSettings(tp=2), samples=samples)
        session = open_run(settings, root, monkeypatch)
        loader = DataLoader(session.loader.rows, len(session.loader.rows), seed=0)
        everything = dataclasses.replace(settings.training, global_batch_size=len(loader.rows))
        session.trainer.settings = dataclasses.replace(settings, training=everything)
        result = session.trainer.train_step(0, loader)
        losses.append([result.loss, *result.others, result.grad_norm])
        session.topology.destroy()
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-10)
    narrow = TeacherSettings(teacher="bf16", alpha=0.5)
    whole = settings_of(
        root,
        tmp_path / "whole",
        narrow,
        parallel=ParallelSettings(tp=2),
        lora=LoraSettings(lora_rank=2),
        steps=4,
        save_every=2,
        dtype="float32",
    )
    session = open_run(whole, root, monkeypatch)
    assert {param.dtype for param in session.trainer.objective.teacher.parameters()} == {torch.bfloat16}
    uninterrupted = train(session)
    session.topology.destroy()
    broken = dataclasses.replace(whole, out=str(tmp_path / "broken"))
    session = open_run(broken, root, monkeypatch)
    interrupted_at(3, session)
    session.topology.destroy()
    dist.barrier(group=group)
    session = open_run(dataclasses.replace(broken, resume="auto"), root, monkeypatch)
    resumed = train(session)
    dist.barrier(group=group)
    assert resumed.held_out == uninterrupted.held_out
    names = ("loss", "cross_entropy", "divergence", "bits_per_byte")
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "broken")]
    assert [[row[name] for name in names] for row in rows[0]] == [[row[name] for name in names] for row in rows[1]]
    assert rows[0][0]["loss"] == pytest.approx(0.5 * rows[0][0]["cross_entropy"] + 0.5 * rows[0][0]["divergence"])
    session.topology.destroy()
    other = dataclasses.replace(whole.distillation, teacher=str(root / "large"))
    session = open_run(dataclasses.replace(broken, resume="auto", distillation=other), root, monkeypatch)
    with pytest.raises(CheckpointError, match=r"of another run: .*teacher_sha256 was"):
        train(session)
    session.topology.destroy()


@pytest.mark.ranks(2)
def test_a_teacher_that_does_not_fit_is_refused(group, root, tmp_path, monkeypatch):
    for name, error, message in (
        ("cut", ConfigError, r"the teacher .*cut has 289 ids, fewer than the 29\d of its tokenizer and that of .*gpt2"),
        ("foreign", ConfigError, r"the tokenizer of the teacher .*foreign is another one: id \d+ is .* there and"),
        ("short", ConfigError, r"model\.sequence-length 40 is more than 16, the longest sequence of the teacher"),
        ("bare", DataError, "tokenizer"),
        ("nowhere", CheckpointError, "nowhere"),
    ):
        settings = settings_of(root, tmp_path / "run", TeacherSettings(teacher=name), parallel=ParallelSettings(tp=2))
        with pytest.raises(error, match=message):
            open_run(settings, root, monkeypatch)


def test_bad_settings_of_distillation():
    options = {"base": "x", "data": ("y",)}
    for made, message in (
        (lambda: DistillSettings(**options), "no model to learn from"),
        (lambda: TeacherSettings(teacher="t", alpha=float("nan")), "--alpha is nan"),
        (lambda: TeacherSettings(teacher="t", alpha=0), "--alpha is 0"),
        (lambda: TeacherSettings(teacher="t", temperature=0), "--temperature is 0"),
        (lambda: TeacherSettings(teacher="t", divergence="both"), "--divergence"),
        (lambda: distilling(parallel=ParallelSettings(pp=2)), "distill has no --pp over 1: the teacher has no stages"),
        (lambda: distilling(parallel=ParallelSettings(exact=True)), "distill has no --exact"),
    ):
        with pytest.raises(ConfigError, match=message):
            made()
    assert DistillSettings.from_json(distilling().to_json()) == distilling()


def distilling(**options):
    return DistillSettings(base="x", data=("y",), distillation=TeacherSettings(teacher="t"), **options)
