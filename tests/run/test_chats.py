"""Fine-tuning on chats: the same at every layout, packed and unpacked, and what transformers' model computes."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from storage.adapters.tiny_models import save_model

from shardwise.core.errors import CheckpointError, ConfigError, DataError
from shardwise.core.sharded_state import gather_parameter, sharded_state_dict
from shardwise.core.topology import Groups, Topology
from shardwise.data import DataLoader, Example
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.commands.shown_samples import shown_samples
from shardwise.run.metrics import read_metrics
from shardwise.run.processes.ranks import Ranks
from shardwise.run.run import train
from shardwise.run.session import open_session
from shardwise.run.settings import (
    FinetuneOptimizerSettings,
    FinetuneSettings,
    ParallelSettings,
    PretrainedSettings,
    SampleSettings,
    TrainingSettings,
)
from shardwise.run.tasks import task_of
from shardwise.run.utilisation import model_flops_per_token
from shardwise.storage.checkpoint.checkpoint import read_meta
from shardwise.training.hooks import StepHooks
from shardwise.training.trainer import Trainer

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KINDS = ("llama", "gpt2", "bloom")
STEPS = 10


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Tiny models with a tokenizer and a template, and chats."""
    root = tmp_path_factory.mktemp("chats")
    draw = random.Random(3)
    chats = []
    for number in range(24):
        turns = []
        for _ in range(draw.randint(1, 2)):
            left, right = draw.randint(0, 99), draw.randint(0, 99)
            turns += [
                {"role": "user", "content": f"{left}+{right}?"},
                {"role": "assistant", "content": f"{left + right}."},
            ]
        chats.append({"messages": turns, "number": number})
    (root / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    texts = [{"text": " ".join(turn["content"] for turn in chat["messages"])} for chat in chats]
    (root / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = Tokenizer.train([json.dumps(chats), "user\n assistant\n" * 9], 300, names)
    for kind in KINDS:
        save_model(kind, root / kind, vocab_size=301, dtype=torch.float64)
        tokenizer.save(root / kind)
        (root / kind / "chat_template.jinja").write_text(TEMPLATE)
    return root


def settings_of(root, out, kind="llama", *, parallel=None, samples=None, resume="never", **training):
    return FinetuneSettings(
        base=str(root / kind),
        data=(str(root / "chats.jsonl"),),
        out=str(out),
        resume=resume,
        device="cpu",
        model=PretrainedSettings(sequence_length=64),
        parallel=parallel or ParallelSettings(),
        optimizer=FinetuneOptimizerSettings(learning_rate=3e-3, warmup_steps=2),
        training=TrainingSettings(**({"steps": STEPS, "global_batch_size": 4, "dtype": "float64"} | training)),
        samples=samples or SampleSettings(packing=True),
    )


def open_run(settings, root, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(root / f"cache-{dist.get_world_size()}"))
    ranks = Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return open_session(settings, ranks)


def recorded(trainer):
    """Hooks with the gradients of each step to come: of whole parameters, by name, of the layers that are here."""
    hooks = StepHooks()
    hooks.steps = []

    def record(*_):
        shards = sharded_state_dict(trainer.model, group=trainer.tp_group)
        hooks.steps.append(
            {
                name: gather_parameter(shard.data.grad, shard.layout, group=trainer.tp_group).clone()
                for name, shard in shards.items()
                if isinstance(shard.data, torch.nn.Parameter)
            }
        )

    hooks.before_update = record
    return hooks


def on_one_rank(session):
    """The run's model and optimizer, whole on this rank alone."""
    alone = Topology.create(tp=1)
    groups = Groups(tp=alone.group("tp"), dp=alone.group("tp"))
    torch.default_generator.manual_seed(session.settings.training.seed)
    settings = FinetuneSettings.from_json(session.settings.to_json() | {"parallel": {}})
    model = session.task.source.build(settings, session.data, groups=groups, device=torch.device("cpu"))
    return Trainer(settings, model, groups), alone


def loss_by_transformers(session):
    """Of the first step's samples, each by itself, by the model that the run starts from."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(session.settings.base, dtype=torch.float64)
    total = 0.0
    with torch.no_grad():
        for index in session.loader.schedule.global_batch(0).tolist():
            row = session.loader.rows.row(index)
            tokens, labels = torch.from_numpy(row["tokens"]), torch.from_numpy(row["labels"])
            documents = torch.from_numpy(row["document_ids"]) if "document_ids" in row else torch.zeros_like(labels)
            for document in range(int(documents.max()) + 1):
                here = documents == document
                logits = model(tokens[here][None]).logits[0]
                total += float(F.cross_entropy(logits, labels[here], reduction="sum"))
    return total / session.loader.num_labels(0)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(2, 3)
def test_ten_steps_are_those_of_one_rank(group, root, tmp_path, monkeypatch):
    """Losses and gradients, over tensor-parallel ranks, stages, and data-parallel ranks that share the samples."""
    ranks = group.size()
    layouts = [(ParallelSettings(tp=ranks, sequence_parallel=True), True), (ParallelSettings(tp=ranks), False)]
    if ranks == 2:
        layouts += [(ParallelSettings(pp=2), True), (ParallelSettings(), True)]
    for parallel, packing in layouts:
        samples = SampleSettings(packing=packing)
        settings = settings_of(root, tmp_path / "run", parallel=parallel, samples=samples)
        session = open_run(settings, root, monkeypatch)
        first = loss_by_transformers(session) if group.rank() == 0 and layouts[0][0] is parallel else None
        one, alone = on_one_rank(session)
        ours, theirs = recorded(session.trainer), recorded(one)
        for step in range(STEPS):
            pairs = (session.trainer, ours), (one, theirs)
            split, whole = (trainer.train_step(step, session.loader, hooks) for trainer, hooks in pairs)
            assert split.loss == pytest.approx(whole.loss, rel=1e-9), (parallel, step)
            assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-8)
            assert step > 0 or first is None or whole.loss == pytest.approx(first, rel=1e-6)
            for name, gradient in ours.steps[step].items():
                expected = theirs.steps[step][name]
                assert (gradient - expected).norm() <= 1e-7 * expected.norm() + 1e-12, (parallel, step, name)
        assert len(ours.steps[0]) == len(theirs.steps[0]) or parallel.pp == 2
        assert first is None or whole.loss < 0.9 * first
        session.topology.destroy()
        alone.destroy()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_packed_is_unpacked(group, root, tmp_path, monkeypatch):
    """The loss and every gradient of all samples, with positions that are rotated, learned, and biases."""
    for kind in KINDS:
        results = []
        for packing in (False, True):
            samples = SampleSettings(packing=packing)
            settings = settings_of(root, tmp_path / "run", kind, parallel=ParallelSettings(tp=2), samples=samples)
            session = open_run(settings, root, monkeypatch)
            # One step of all rows.
            loader = DataLoader(session.loader.rows, len(session.loader.rows), seed=0)
            hooks = recorded(session.trainer)
            everything = dataclasses.replace(settings.training, global_batch_size=len(loader.rows))
            session.trainer.settings = dataclasses.replace(settings, training=everything)
            results.append((session.trainer.train_step(0, loader, hooks).loss, hooks.steps[0], len(loader.rows)))
            session.topology.destroy()
        (loss, gradients, num_samples), (packed_loss, packed, num_rows) = results
        assert num_rows < 0.8 * num_samples
        assert packed_loss == pytest.approx(loss, rel=1e-12)
        for name, gradient in gradients.items():
            assert (packed[name] - gradient).norm() <= 1e-10 * gradient.norm() + 1e-14, (kind, name)


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_packed_texts_are_kept_apart(group, root, tmp_path, monkeypatch):
    """The loss is that of each text by itself, as transformers' model has it."""
    settings = settings_of(root, tmp_path / "run", samples=SampleSettings(packing=True))
    settings = dataclasses.replace(settings, data=(str(root / "texts.jsonl"),))
    session = open_run(settings, root, monkeypatch)
    dataset, texts = session.loader.rows, (root / "texts.jsonl").read_text().splitlines()
    encoded = {
        tuple(session.task.method.encoder().encode(Example("", None, json.loads(each)["text"])).ids) for each in texts
    }
    found = set()
    for index in range(len(dataset)):
        tokens, labels, positions, documents = dataset.row(index).values()
        for document in range(documents.max() + 1):
            here = documents == document
            found.add((*tokens[here], labels[here][-1]))
            assert (positions[here] == range(here.sum())).all()
            assert (labels[here] >= 0).all(), "all of a text is learned"
    # One is cut to be measured on.
    assert len(found - encoded) <= 1
    assert len(dataset) < 0.8 * len(found)
    expected = loss_by_transformers(session)
    assert session.trainer.train_step(0, session.loader).loss == pytest.approx(expected, rel=1e-6)
    session.topology.destroy()
    one_stream = dataclasses.replace(settings, samples=SampleSettings(too_long="split"))
    with pytest.raises(ConfigError, match=r"--too-long split is for separate samples, .* add --packing"):
        open_run(one_stream, root, monkeypatch)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_run_resumes_with_its_samples_only(group, root, tmp_path, monkeypatch):
    whole = settings_of(root, tmp_path / "run", parallel=ParallelSettings(tp=2), steps=200)
    samples = SampleSettings(packing=True, epochs=0.65)
    session = open_run(dataclasses.replace(whole, samples=samples, peak_tflops=0.5), root, monkeypatch)
    settings, end = session.settings, session.loader.end
    assert settings.training.steps == 2
    assert 4 < end < 8
    train(session)
    meta = read_meta(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert meta["num_samples"] == end
    model = session.task.source.describe(session.data)
    for step, row in enumerate(read_metrics(tmp_path / "run" / "metrics.jsonl")):
        # Attention is counted within each sample, not over the row.
        flops = sum(n * model_flops_per_token(model, n) for n in session.loader.computed(step).tolist())
        seconds = session.loader.num_tokens(step) / row["tokens_per_second"]
        assert row["mfu"] == pytest.approx(flops / seconds / 1e12)
        assert row["learned_tokens_per_second"] < row["tokens_per_second"] < row["computed_tokens_per_second"]
    session.topology.destroy()
    last = SampleSettings(packing=True, learn="last")
    for samples in (SampleSettings(packing=True, mask_prompts=False), SampleSettings(), last):
        again = dataclasses.replace(settings, resume="auto", samples=samples)
        session = open_run(again, root, monkeypatch)
        with pytest.raises(
            CheckpointError, match=r"(mask_prompts|packing) was True and is False|learn was 'all' and is 'last'"
        ):
            train(session)
        session.topology.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("packing", [False, True])
def test_epochs_are_steps(group, root, tmp_path, monkeypatch, packing):
    samples = SampleSettings(packing=packing, epochs=1.5, held_out=(str(root / "chats.jsonl"),))
    session = open_run(settings_of(root, tmp_path / "run", samples=samples, steps=200), root, monkeypatch)
    rows = len(session.loader.rows)
    assert session.settings.training.steps == -(-session.loader.end // 4)
    assert session.loader.end == round(1.5 * rows)
    assert rows == 24 if not packing else rows < 18
    # Held out are all samples of the other file.
    assert session.data.held_out.num_labels == session.loader.rows.labels.sum()
    session.topology.destroy()


def test_records_of_other_keys_and_last_answers(root, tmp_path):
    """What a run would learn; the form is that of the training data and of the held-out data."""
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "hint": "", "answer": "2."}\n')
    messages = [{"role": role, "content": text} for role, text in (("user", "{question}"), ("assistant", "{answer}"))]
    (tmp_path / "form.json").write_text(json.dumps({"messages": [*messages, *messages]}))
    rows = (str(tmp_path / "rows.jsonl"),)
    for learn, times in (("all", 2), ("last", 1)):
        samples = SampleSettings(learn=learn, prompt_template=str(tmp_path / "form.json"), held_out=rows)
        settings = dataclasses.replace(settings_of(root, tmp_path / "run", samples=samples), data=rows)
        assert FinetuneSettings.from_json(settings.to_json()) == settings
        shown = "\n".join(shown_samples(settings, 1, colours=False))
        assert shown.count("[[2.<|im_end|>") == times, shown
        assert shown.count("1+1?") == 2
        data = task_of(settings).method.prepare()
        assert data.train.labels.tolist() == [times * 4] == data.held_out.rows.labels.tolist()
    plain = dataclasses.replace(settings, data=("stdlib",))
    with pytest.raises(ConfigError, match="--prompt-template is for records, and stdlib has none"):
        task_of(plain).method.prepare()
    with pytest.raises(
        ConfigError, match="--no-mask-prompts trains on all of the text, and --learn last on one answer"
    ):
        SampleSettings(mask_prompts=False, learn="last")


@pytest.mark.ranks(2)
def test_bad_data_is_one_error_on_every_rank(group, root, tmp_path, monkeypatch):
    bad = {
        "one.jsonl": ('{"messages": [{"role": "user"}]}', "line 1, message 1: no content"),
        "two.json": ('[{"messages": []}]', "'messages' has no message"),
        "three.jsonl": ('{"messages": [{"role": "user", "content": "x"}]}\n' * 3, "nothing can be learned from any"),
        "four.parquet": ("PAR1 is not enough", "is no Parquet file|is read with pyarrow, which is not installed"),
        "five.arrow": ("nothing", "is no Arrow file|is read with pyarrow, which is not installed"),
    }
    for name, (content, message) in bad.items():
        if group.rank() == 0:
            (root / name).write_text(content)
        dist.barrier(group=group)
        other = SampleSettings(held_out=(str(root / "chats.jsonl"),))
        settings = dataclasses.replace(settings_of(root, tmp_path / "run", samples=other), data=(str(root / name),))
        with pytest.raises((DataError, ConfigError), match=message):
            open_run(settings, root, monkeypatch)
