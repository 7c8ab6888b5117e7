"""Preferences: ten steps are those of trl, at every layout, and the reference is computed once."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.program import run as run_program
from run.test_chats import TEMPLATE
from run.test_run import interrupted_at
from run.trl_pairs import BETA, KINDS
from storage.adapters.reference_steps import CLIP, DECAY, RATE, STEPS, WARMUP, reference_losses
from storage.adapters.tiny_models import save_model

from shardwise.core.atomic_files import write_atomically
from shardwise.core.errors import CheckpointError, ConfigError, DivergenceError
from shardwise.data import DataLoader, PairRows, PreferenceEncoder, TokenSamples, preference_of
from shardwise.data.json_records import Record
from shardwise.data.tokenizer import ChatTemplate, Tokenizer
from shardwise.nn.loss import preference_loss
from shardwise.run.metrics import read_metrics
from shardwise.run.processes.ranks import Ranks
from shardwise.run.run import train
from shardwise.run.session import open_session
from shardwise.run.settings import (
    DpoSettings,
    FinetuneOptimizerSettings,
    LoraSettings,
    ParallelSettings,
    PreferenceSettings,
    PretrainedSettings,
    SampleSettings,
    TrainingSettings,
)
from shardwise.run.tasks.preference import FILE_NAME, log_probs

BATCH = 4


def pairs_of(count):
    """Explicit prompts of messages, whose answers have different lengths."""
    draw = random.Random(5)
    pairs = []
    for number in range(count):
        left, right = draw.randint(0, 99), draw.randint(0, 99)
        sums = [f"{left + right + wrong}." + " Sure." * draw.randint(0, 3) for wrong in (0, number % 7 + 1)]
        prompt = [{"role": "user", "content": f"{left}+{right}?"}]
        answers = [[{"role": "assistant", "content": text}] for text in sums]
        pairs.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    return pairs


def write_lines(path, records):
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    write_atomically(path, lambda file: file.write(content))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models, pairs, and ten steps of the paper's formula on transformers' model in fp64."""
    root = tmp_path_factory.mktemp("preferences")
    pairs = pairs_of(18)
    write_lines(root / "pairs.jsonl", pairs)
    write_lines(root / "held-out.jsonl", pairs[:5])
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = Tokenizer.train([json.dumps(pairs), "user\n assistant\n" * 9], 300, names)
    for kind in ("gpt2", "llama"):
        save_model(kind, root / kind, vocab_size=301, dtype=torch.float64)
        tokenizer.save(root / kind)
        (root / kind / "chat_template.jinja").write_text(TEMPLATE)
    encoder = PreferenceEncoder(tokenizer, ChatTemplate(TEMPLATE))
    encoded = [each for pair in pairs for each in encoder.encode_all(preference_of(Record("here", pair)))]
    dataset = PairRows(TokenSamples.of("pairs", encoded, tokenizer.eos_id), 60)
    batches = [DataLoader(dataset, BATCH, TrainingSettings().seed).schedule.global_batch(step) for step in range(STEPS)]
    # For models as small as these, more only wait for each other.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = {kind: paper_steps(root, dataset, batches, kind, **options) for kind, options in KINDS.items()}
    torch.set_num_threads(num_threads)
    (root / "expected.json").write_text(json.dumps(expected))
    (root / "batches.json").write_text(json.dumps([batch.tolist() for batch in batches]))
    return root


def dense_log_probs(model, dataset, index):
    """Of both answers of a pair, each by itself, and how many tokens they have."""
    row = dataset.row(index)
    tokens, labels = torch.from_numpy(row["tokens"]), torch.from_numpy(row["labels"])
    of_labels = model(tokens).logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return of_labels.masked_fill(labels < 0, 0.0).sum(1), (labels >= 0).sum(1)


def paper_steps(root, dataset, batches, kind, label_smoothing=0.0):
    """Loss and rewards of ten steps, by the formulas of the papers."""
    policy, reference = (transformers_model(root) for _ in range(2))
    steps = []

    def loss_of(model, batch):
        losses, rewards = [], []
        for index in batch.tolist():
            log_probs, counts = dense_log_probs(model, dataset, index)
            with torch.no_grad():
                before, _ = dense_log_probs(reference, dataset, index)
            chosen, rejected = log_probs - before
            d = BETA * (chosen - rejected)
            if kind == "sigmoid":
                loss = -torch.log(1 / (1 + torch.exp(-d)))
            elif kind == "robust":
                right, wrong = -torch.log(1 / (1 + torch.exp(-d))), -torch.log(1 / (1 + torch.exp(d)))
                loss = ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
            elif kind == "hinge":
                loss = torch.clamp(1 - d, min=0)
            else:
                loss = (chosen / counts[0] - rejected / counts[1] - 1 / (2 * BETA)) ** 2
            losses.append(loss)
            rewards.append([BETA * chosen.item(), BETA * rejected.item(), d.item(), float(chosen > rejected)])
        steps.append(np.mean(rewards, axis=0).tolist())
        return torch.stack(losses).mean()

    losses = reference_losses(policy, batches, loss_of)
    return [[loss, *rewards] for loss, rewards in zip(losses, steps, strict=True)]


def transformers_model(root):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(root / "gpt2", dtype=torch.float64)


def settings_of(root, out, kind="gpt2", *, parallel=None, preference=None, resume="never", lora=None, **training):
    return DpoSettings(
        base=str(root / kind),
        data=(str(root / "pairs.jsonl"),),
        out=str(out),
        resume=resume,
        device="cpu",
        model=PretrainedSettings(sequence_length=60),
        parallel=parallel or ParallelSettings(),
        optimizer=FinetuneOptimizerSettings(
            learning_rate=RATE, warmup_steps=WARMUP, clip_grad_norm=CLIP, weight_decay=DECAY
        ),
        training=TrainingSettings(**({"steps": STEPS, "global_batch_size": BATCH, "dtype": "float64"} | training)),
        samples=SampleSettings(held_out=(str(root / "held-out.jsonl"),)),
        preference=preference or PreferenceSettings(beta=BETA),
        lora=lora or LoraSettings(),
    )


def open_run(settings, root, monkeypatch, *, with_reference=True):
    monkeypatch.setenv("SHARDWISE_CACHE", str(root / f"cache-{dist.get_world_size()}"))
    ranks = Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    session = open_session(settings, ranks)
    if with_reference:
        session.task.method.before(session)
    return session


def steps_of(session):
    """Loss and rewards of ten steps."""
    results = [session.trainer.train_step(step, session.loader) for step in range(STEPS)]
    return [[result.loss, *result.others] for result in results]


def same_steps(actual, expected, what=""):
    """All but which answer has the higher reward in the first step, where rewards are 0 but for rounding."""
    actual, expected = np.array(actual), np.array(expected)
    actual[0, 4] = expected[0, 4]
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10, err_msg=what)


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_each_loss_is_that_of_its_paper(group, root, tmp_path, monkeypatch):
    expected = json.loads((root / "expected.json").read_text())
    for kind, options in KINDS.items():
        preference = PreferenceSettings(beta=BETA, loss_type=kind, **options)
        session = open_run(settings_of(root, tmp_path / kind, preference=preference), root, monkeypatch)
        same_steps(steps_of(session), expected[kind], kind)
        session.topology.destroy()
    assert expected["sigmoid"][-1][0] < 0.95 * expected["sigmoid"][0][0], "nothing is learned"


LAYOUTS = {
    2: (
        (ParallelSettings(tp=2), {}),
        (ParallelSettings(tp=2, sequence_parallel=True), {"micro_batch_size": 1, "loss": "linear_fused"}),
        (ParallelSettings(pp=2), {}),
        (ParallelSettings(zero=1), {"micro_batch_size": 1}),
        (ParallelSettings(fsdp=True), {}),
        (ParallelSettings(cp=2, zero=1), {}),
    ),
    3: ((ParallelSettings(cp=3), {"micro_batch_size": 1}),),
}


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
def test_ten_steps_at_every_layout(group, root, tmp_path, monkeypatch):
    """Losses and rewards over tensor-parallel ranks, stages, and ranks that share the pairs or their positions."""
    expected = json.loads((root / "expected.json").read_text())["sigmoid"]
    for number, (parallel, training) in enumerate(LAYOUTS[group.size()]):
        session = open_run(settings_of(root, tmp_path / str(number), parallel=parallel, **training), root, monkeypatch)
        same_steps(steps_of(session), expected, str(parallel))
        session.topology.destroy()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_adapters_begin_at_their_reference(group, root, tmp_path, monkeypatch):
    """At first nothing has become likelier; the steps are the same at tp 2, and go on from adapters as from a model."""
    results = {}
    for tp, lora in ((1, LoraSettings(lora_rank=3)), (2, LoraSettings(lora_rank=3)), (2, "again")):
        out = tmp_path / f"{tp}-{lora == 'again'}"
        if lora == "again":
            lora = LoraSettings(lora_from=str(tmp_path / "2-False"))
        settings = settings_of(root, out, "llama", parallel=ParallelSettings(tp=tp), lora=lora)
        session = open_run(settings, root, monkeypatch)
        results[out.name] = steps_of(session)
        session.task.write(session)
        session.topology.destroy()
        loss, *rewards, _ = results[out.name][0]
        assert [loss, *rewards] == pytest.approx([np.log(2), 0, 0, 0], abs=1e-12)
    same_steps(results["2-False"], results["1-False"])
    assert results["2-True"][-1][0] != results["2-False"][-1][0] < 0.99 * np.log(2)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_resumed_run_keeps_its_reference(group, root, tmp_path, monkeypatch):
    """What is read again is what the first start computed, at any layout; the steps and what is measured are equal."""
    whole = settings_of(root, tmp_path / "whole", parallel=ParallelSettings(tp=2), steps=6, save_every=2, eval_every=3)
    session = open_run(whole, root, monkeypatch)
    reference = session.loader.rows.reference
    assert np.isfinite(reference).all()
    assert (reference < 0).all()
    uninterrupted = train(session)
    assert not np.allclose(log_probs(session.trainer, session.loader.rows), reference)
    session.topology.destroy()
    broken = dataclasses.replace(whole, out=str(tmp_path / "broken"))
    session = open_run(broken, root, monkeypatch)
    interrupted_at(5, session)
    session.topology.destroy()
    dist.barrier(group=group)
    session = open_run(dataclasses.replace(broken, resume="auto"), root, monkeypatch)
    assert np.array_equal(session.loader.rows.reference, reference)
    resumed = train(session)
    dist.barrier(group=group)
    assert resumed.held_out == uninterrupted.held_out
    rows = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "broken")}
    reported = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    assert [[row[name] for name in reported] for row in rows["broken"]] == [
        [row[name] for name in reported] for row in rows["whole"]
    ]
    assert {f"held_out_{name}" for name in reported} == uninterrupted.held_out.keys() < rows["whole"][-1].keys()
    assert "bits_per_byte" not in rows["whole"][0]
    assert "held-out pairs: loss 0." in session.task.report(session, resumed)
    session.topology.destroy()
    # Computed anew over data-parallel ranks, and over stages.
    for parallel in (ParallelSettings(), ParallelSettings(pp=2)):
        other = settings_of(root, tmp_path / f"other-{parallel.pp}", parallel=parallel)
        session = open_run(other, root, monkeypatch)
        np.testing.assert_allclose(session.loader.rows.reference, reference, rtol=1e-12)
        session.topology.destroy()
    other = dataclasses.replace(broken, resume="auto", preference=PreferenceSettings(beta=0.2))
    session = open_run(other, root, monkeypatch)
    with pytest.raises(CheckpointError, match=r"is of another run: preference\.beta was 0\.3 and is 0\.2"):
        train(session)
    session.topology.destroy()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_reference_of_something_else_is_refused(group, root, tmp_path, monkeypatch):
    settings = settings_of(root, tmp_path / "run", parallel=ParallelSettings(tp=2))
    open_run(settings, root, monkeypatch).topology.destroy()
    path = tmp_path / "run" / FILE_NAME
    written = path.read_bytes()
    others = {
        "log-probabilities of another model .base_sha256 was": dataclasses.replace(settings, base=str(root / "llama")),
        "log-probabilities of other pairs than this run's .train": dataclasses.replace(
            settings, data=(str(root / "held-out.jsonl"),)
        ),
        "of other pairs than this run's .held_out": dataclasses.replace(
            settings, samples=SampleSettings(held_out=(str(root / "pairs.jsonl"),))
        ),
        "log-probabilities of other pairs": dataclasses.replace(settings, model=PretrainedSettings(sequence_length=16)),
    }
    for message, other in others.items():
        with pytest.raises(CheckpointError, match=message):
            open_run(other, root, monkeypatch)
    dist.barrier(group=group)
    for content in (written[:-8], written[:-8] + b"\xff" * 8, b""):
        if group.rank() == 0:
            path.write_bytes(content)
        dist.barrier(group=group)
        with pytest.raises(CheckpointError, match="is damaged"):
            open_run(settings, root, monkeypatch)
        dist.barrier(group=group)
    open_run(dataclasses.replace(settings, resume="restart"), root, monkeypatch).topology.destroy()
    dist.barrier(group=group)
    assert path.read_bytes()[-8:] == written[-8:]
    open_run(settings, root, monkeypatch).topology.destroy()
    session = open_run(
        dataclasses.replace(settings, out=str(tmp_path / "nan")), root, monkeypatch, with_reference=False
    )
    next(session.trainer.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(DivergenceError, match=r"gives 18 of 18 pairs \(train\) no finite log-probability"):
        session.task.method.before(session)
    assert not (tmp_path / "nan" / FILE_NAME).exists()
    session.topology.destroy()


@pytest.mark.slow
@pytest.mark.matrix
def test_pairs_and_steps_are_those_of_trl(root):
    chats = pairs_of(18)
    implicit = [{name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")} for pair in chats]
    texts = [
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5 5"},
        {"prompt": "sum un", "chosen": "done<|endoftext|>", "rejected": "told"},
    ]
    begun = [{"chosen": "It is 4 now", "rejected": "It is 5"}, {"chosen": "no more", "rejected": "no less"}]
    forms = [chats, implicit, texts, begun]
    batches = json.loads((root / "batches.json").read_text())
    cases = {"model": str(root / "gpt2"), "template": TEMPLATE, "forms": forms, "batches": batches}
    (root / "cases.json").write_text(json.dumps(cases))
    run_program(sys.executable, Path(__file__).parent / "trl_pairs.py", root)
    theirs = json.loads((root / "trl.json").read_text())
    encoder = PreferenceEncoder(Tokenizer.load(root / "gpt2"), ChatTemplate(TEMPLATE))
    for records, samples in zip(forms, theirs["forms"], strict=True):
        for record, sample in zip(records, samples, strict=True):
            for encoded, name in zip(
                encoder.encode_all(preference_of(Record("here", record))), ("chosen_ids", "rejected_ids"), strict=True
            ):
                assert encoded.ids[~encoded.learned].tolist() == sample["prompt_ids"], record
                assert encoded.ids[encoded.learned].tolist() == sample[name], record
    expected = json.loads((root / "expected.json").read_text())
    names = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    for kind, steps in expected.items():
        # It computes log-probabilities in fp32, of which the sum over an answer is a hundred or so.
        of_trl = np.array([theirs["steps"][kind][name] for name in names]).T
        np.testing.assert_allclose(of_trl[:, :4], np.array(steps)[:, :4], rtol=1e-3, atol=2e-4, err_msg=kind)
        assert (of_trl[:, 4] == np.array(steps)[:, 4]).mean() > 0.8


def test_bad_settings():
    options = {"base": "x", "data": ("y",)}
    for made, message in (
        (lambda: PreferenceSettings(beta=float("nan")), "--beta is nan; it must be a number, over 0"),
        (lambda: PreferenceSettings(beta=0), "--beta is 0; it must be over 0"),
        (lambda: PreferenceSettings(label_smoothing=0.5), "--label-smoothing is 0.5"),
        (
            lambda: PreferenceSettings(loss_type="ipo", label_smoothing=0.1),
            "cannot be used with --loss-type ipo; use sigmoid or robust",
        ),
        (lambda: DpoSettings(**options, samples=SampleSettings(packing=True)), "dpo cannot be used with --packing"),
        (lambda: DpoSettings(**options, samples=SampleSettings(learn="last")), "dpo cannot be used with --learn last"),
        (
            lambda: DpoSettings(**options, samples=SampleSettings(mask_prompts=False)),
            "dpo cannot be used with --no-mask-prompts",
        ),
        (
            lambda: DpoSettings(**options, samples=SampleSettings(too_long="split")),
            "dpo cannot be used with --too-long split",
        ),
        (lambda: DpoSettings(**options, parallel=ParallelSettings(exact=True)), "dpo cannot be used with --exact"),
    ):
        with pytest.raises(ConfigError, match=message):
            made()
    assert DpoSettings(**options).optimizer.learning_rate == 1e-6
    assert DpoSettings(**options, lora=LoraSettings(lora_rank=1)).optimizer.learning_rate == 1e-5
    once = DpoSettings(**options)
    assert DpoSettings.from_json(once.to_json()) == once
    one = torch.ones(1)
    for loss_options, message in (
        ({"beta": float("nan")}, "beta is nan"),
        ({"label_smoothing": float("nan")}, "label_smoothing is nan"),
        ({"kind": "dpo"}, "kind is 'dpo'; choose one of sigmoid"),
        ({"kind": "ipo"}, "pass num_chosen and num_rejected"),
        ({"kind": "hinge", "label_smoothing": 0.1}, "'hinge' has none"),
    ):
        with pytest.raises(ConfigError, match=message):
            preference_loss(one, one, **loss_options)
