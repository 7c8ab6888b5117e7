"""Fine-tuning for labels: the losses of transformers' model at every layout, metrics, heads of adapters, bad input."""

from __future__ import annotations

import json
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from storage.adapters.reference_steps import CLIP, DECAY, RATE, STEPS, WARMUP, reference_losses
from storage.adapters.tiny_models import config_of

from shardwise.cli.main import main
from shardwise.core.errors import ConfigError, DataError
from shardwise.data import Batch, LabelledText, Labels, labels_of
from shardwise.data.tokenizer import Tokenizer
from shardwise.models.classification import Classification
from shardwise.run.processes.ranks import Ranks
from shardwise.run.session import open_session
from shardwise.run.settings import (
    FinetuneOptimizerSettings,
    FinetuneSettings,
    LabelSettings,
    ParallelSettings,
    TrainingSettings,
)
from shardwise.run.tasks.labelling import HeldOutLabels

WORDS = {"bad": ("poor", "dull"), "good": ("fine", "great"), "so": ("plain", "usual")}
NAMES = tuple(WORDS)


def bert_tokenizer(folder, words):
    """A word-level tokenizer with BERT's frame."""
    import tokenizers
    import transformers

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(folder)
    return len(vocabulary)


def bert_config(vocab_size, **changes):
    """Of a tiny BERT without dropout."""
    import transformers

    return transformers.BertConfig(
        vocab_size=vocab_size,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=30,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **changes,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Classifiers by transformers with their tokenizers, and texts with labels; for BERT some of two texts."""
    import transformers

    root = tmp_path_factory.mktemp("labels")
    draw = random.Random(3)
    records = []
    for number in range(30):
        label = draw.choice(NAMES)
        record = {"text": " ".join(draw.choice(WORDS[label]) for _ in range(draw.randint(1, 5))), "label": label}
        records.append(record)
        # No two texts are alike.
        record["text"] += f" {number}"
    (root / "llama.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for record in records[::3]:
        record["text_pair"] = "plain fine"
    (root / "bert.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    torch.manual_seed(0)
    sizes = {"num_labels": 3, "id2label": dict(enumerate(NAMES)), "label2id": {name: n for n, name in enumerate(NAMES)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        words = [*(word for group in WORDS.values() for word in group), *map(str, range(30))]
        config = bert_config(bert_tokenizer(root / "bert", words), **sizes)
        transformers.BertForSequenceClassification(config).double().save_pretrained(root / "bert")
        config.architectures = None
        transformers.BertForMaskedLM(config).double().save_pretrained(root / "bert-lm")
        bert_tokenizer(root / "bert-lm", words)
        llama = config_of("llama", vocab_size=301, **sizes | {"pad_token_id": 1})
        transformers.LlamaForSequenceClassification(llama).double().save_pretrained(root / "llama")
        plain = config_of("llama", vocab_size=301)
        transformers.LlamaForCausalLM(plain).double().save_pretrained(root / "llama-lm")
    tokenizer = Tokenizer.train([record["text"] for record in records], 270, ("<|endoftext|>", "<pad>"))
    for name in ("llama", "llama-lm"):
        tokenizer.save(root / name)
    return root


def settings_of(root, out, kind, parallel=None, **changes):
    labels = {"pad_token": "<pad>"} if kind == "llama-lm" else {}
    return FinetuneSettings(
        base=str(root / kind),
        data=(str(root / f"{kind.removesuffix('-lm')}.jsonl"),),
        out=str(out),
        device="cpu",
        labels=LabelSettings(**{"task": "sequence-classification"} | labels | changes.pop("labels", {})),
        parallel=parallel or ParallelSettings(),
        optimizer=FinetuneOptimizerSettings(
            learning_rate=RATE, warmup_steps=WARMUP, weight_decay=DECAY, clip_grad_norm=CLIP
        ),
        training=TrainingSettings(steps=STEPS, global_batch_size=4, dtype="float64"),
        **changes,
    )


def open_run(settings, root, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(root / "cache"))
    ranks = Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return open_session(settings, ranks)


def loss_by_transformers(model, batch):
    options = {"token_type_ids": batch.tokentype_ids, "attention_mask": batch.attention_mask}
    if batch.attention_mask is None:
        options = {"attention_mask": batch.tokens != 1}
    return model(input_ids=batch.tokens, labels=batch.labels[:, 0], **options).loss


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_ten_steps_are_those_of_transformers(group, root, tmp_path, monkeypatch, kind):
    import transformers

    ranks = group.size()
    layouts = [
        ParallelSettings(tp=ranks, sequence_parallel=True),
        ParallelSettings(tp=ranks),
        ParallelSettings(cp=ranks),
    ]
    if ranks == 2:
        layouts += [ParallelSettings(pp=2), ParallelSettings()]
    expected = None
    for parallel in layouts:
        session = open_run(settings_of(root, tmp_path / "run", kind, parallel), root, monkeypatch)
        if expected is None:
            model = transformers.AutoModelForSequenceClassification.from_pretrained(root / kind, dtype=torch.float64)
            batches = [next(session.loader.batch(step)) for step in range(STEPS)]
            expected = reference_losses(model.eval(), batches, loss_by_transformers)
        losses = [session.trainer.train_step(step, session.loader).loss for step in range(STEPS)]
        assert losses == pytest.approx(expected, rel=2e-6), parallel
        assert set(session.trainer.evaluate(session.data.held_out)) == {
            "held_out_accuracy",
            "held_out_f1",
            "held_out_loss",
        }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama-lm", "bert-lm"])
def test_a_trained_head_is_what_peft_and_transformers_read(root, tmp_path, monkeypatch, kind, capsys):
    """From a model without the head: adapters and the head, and all weights; labelled and measured alike."""
    import peft
    import transformers

    monkeypatch.setenv("SHARDWISE_CACHE", str(root / "cache"))
    out, data = tmp_path / "adapters", str(root / f"{kind.removesuffix('-lm')}.jsonl")
    flags = ["--task", "sequence-classification", "--training.steps", "3", "--device", "cpu"]
    flags += ["--optimizer.learning-rate", "0.01", "--training.dtype", "float64"]
    flags += ["--pad-token", "<pad>"] if kind == "llama-lm" else []
    assert main(["finetune", str(root / kind), "--data", data, "--out", str(out), "--lora-rank", "2", *flags]) == 0
    assert main(["finetune", str(root / kind), "--data", data, "--out", str(tmp_path / "all"), *flags]) == 0
    config = json.loads((tmp_path / "all" / "config.json").read_text())
    assert config["label2id"] == {name: number for number, name in enumerate(NAMES)}
    capsys.readouterr()
    texts = ["great fine", "dull"]
    for folder in (out, tmp_path / "all"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"dtype": torch.float64, "num_labels": 3, "pad_token_id": config["pad_token_id"]}
            where = root / kind if folder == out else folder
            model = transformers.AutoModelForSequenceClassification.from_pretrained(where, **options)
            model = peft.PeftModel.from_pretrained(model, folder) if folder == out else model
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert main(["classify", str(folder), "--device", "cpu", "--text", *texts]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for text, line in zip(texts, lines, strict=True):
            with torch.no_grad():
                scores = model.eval()(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
            assert line["label"] == NAMES[int(scores.argmax())]
            assert line["score"] == pytest.approx(float(scores.max()), rel=1e-5)
        assert main(["eval", str(folder), "--data", data, "--device", "cpu"]) == 0
        assert "accuracy" in capsys.readouterr().out
        if folder == out:
            assert main(["export-hf", str(out), "--out", str(tmp_path / "merged"), "--merge"]) == 0
            assert json.loads((tmp_path / "merged" / "config.json").read_text())["label2id"] == config["label2id"]
            capsys.readouterr()


def test_accuracy_and_f1():
    head = Classification("sequence-classification", 4, "single_label_classification")
    objective = HeldOutLabels(head)
    logits = torch.eye(4)[[0, 1, 1, 2, 0]] * 3
    batch = Batch(None, torch.tensor([[0], [1], [0], [2], [-100]]))
    with torch.no_grad():
        loss, counts = objective.sums(logits, batch)
    found = objective.scores([float(loss), *counts.tolist()])
    # Of label 3 there is nothing; 0 and 1 have 2/3 each.
    assert found["held_out_accuracy"] == 3 / 4
    assert found["held_out_f1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    expected = torch.nn.functional.cross_entropy(logits[:4], torch.tensor([0, 1, 0, 2]))
    assert found["held_out_loss"] == pytest.approx(float(expected))
    several = HeldOutLabels(Classification("sequence-classification", 2, "multi_label_classification"))
    labels = torch.tensor([[1.0, 0.0], [1.0, 1.0], [torch.nan, torch.nan]])
    with torch.no_grad():
        loss, counts = several.sums(torch.tensor([[2.0, -1.0], [2.0, -1.0], [0.0, 0.0]]), Batch(None, labels))
    found = several.scores([float(loss), *counts.tolist()])
    assert (found["held_out_accuracy"], found["held_out_f1"]) == (0.5, 0.5)


def text_of(label):
    return LabelledText("here", "a text", None, label)


def test_what_labels_are():
    assert labels_of([text_of("b"), text_of("a")]) == Labels(("a", "b"), "single_label_classification")
    assert labels_of([text_of(0), text_of(2)]) == Labels(
        ("LABEL_0", "LABEL_1", "LABEL_2"), "single_label_classification"
    )
    assert labels_of([text_of(0), text_of(1)], num_labels=1).problem == "regression"
    assert labels_of([text_of(0.5), text_of(1)]) == Labels(("LABEL_0",), "regression")
    with pytest.raises(DataError, match="all labels in the data are 'b'; a classifier needs two"):
        labels_of([text_of("b"), text_of("b")])
    for given, message in (
        ([True, False], "here: the label is a boolean, True; write 0 and 1, or names"),
        ([0, -1], "here: the label is -1, and labels are names, or integers from 0; number them anew"),
    ):
        with pytest.raises(DataError, match=message):
            labels_of([text_of(each) for each in given])
    several = labels_of([text_of(["x", "y"]), text_of([])])
    assert several == Labels(("x", "y"), "multi_label_classification")
    assert several.encode(text_of(["y"])).tolist() == [0.0, 1.0]
    assert Labels(("x",), "regression").encode(text_of(2)).dtype == np.float32


@pytest.mark.parametrize(
    ("labels", "label", "said"),
    [
        (Labels(("a", "b"), "single_label_classification"), "c", "here: the label 'c' is none of the model's: a, b"),
        (Labels(("a", "b"), "single_label_classification"), 2, "the label 2 is out of range; it must be from 0 to 1"),
        (Labels(("a", "b"), "single_label_classification"), -100, "the label -100 is out of range"),
        (
            Labels(("a", "b"), "single_label_classification"),
            True,
            "is a boolean, True; it must be a name or an integer",
        ),
        (
            Labels(("a", "b"), "single_label_classification"),
            0.5,
            "it must be a name or an integer, or the problem a re",
        ),
        (Labels(("a",), "regression"), float("nan"), "the label is nan; it must be a finite number"),
        (Labels(("a", "b"), "multi_label_classification"), [1], "must be 0 or 1 for each of 2 labels"),
        (Labels(("a", "b"), "multi_label_classification"), "a", "it must be a list"),
    ],
)
def test_impossible_labels_are_refused(labels, label, said):
    with pytest.raises(DataError, match=said):
        labels.encode(text_of(label))


@pytest.mark.ranks(1)
def test_impossible_runs_are_refused(group, root, tmp_path, monkeypatch):
    (tmp_path / "none.jsonl").write_text('{"text": "great"}\n')
    (tmp_path / "mixed.jsonl").write_text('{"text": "great", "label": "x"}\n{"text": "dull", "label": 1}\n')
    for kind, changes, error, said in [
        ("llama-lm", {"labels": {"pad_token": None}}, ConfigError, "does not say which token fills up short texts"),
        ("llama-lm", {"labels": {"pad_token": "<none>"}}, ConfigError, "'<none>' is no token of"),
        ("llama", {"labels": {"num_labels": 4}}, ConfigError, "--num-labels is 4, and the head of .* has 3 labels"),
        (
            "llama-lm",
            {"labels": {"num_labels": 4}},
            DataError,
            "--num-labels is 4, and the data has 3 labels: bad, good",
        ),
        ("llama-lm", {"data": (str(tmp_path / "none.jsonl"),)}, DataError, "no 'label' .its keys: 'text'"),
        ("llama-lm", {"data": (str(tmp_path / "mixed.jsonl"),)}, DataError, "the label is 1, and others are names"),
    ]:
        settings = settings_of(root, tmp_path / "out", kind, labels=changes.get("labels", {}))
        settings = FinetuneSettings.from_json(settings.to_json() | {"data": changes.get("data", settings.data)})
        with pytest.raises(error, match=said):
            open_run(settings, root, monkeypatch)
    with pytest.raises(ConfigError, match="--num-labels is for --task sequence-classification or token-"):
        LabelSettings(num_labels=3)
