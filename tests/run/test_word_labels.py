"""Fine-tuning for labels of words: tokens, losses and answers are those of transformers, F1 that of whole entities."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import re
import warnings

import pytest
import torch
from run.test_classifying import bert_config, bert_tokenizer, open_run, settings_of
from storage.adapters.reference_steps import STEPS, reference_losses
from storage.adapters.tiny_models import config_of

from shardwise.cli.main import main
from shardwise.core.errors import ConfigError, DataError
from shardwise.data import Batch, LabelledText, Labels, encode_labelled, labelled_words_of, labels_of
from shardwise.data.json_records import Record
from shardwise.data.tokenizer import Tokenizer
from shardwise.models.classification import Classification
from shardwise.run.settings import LabelSettings, ParallelSettings, PretrainedSettings
from shardwise.run.tasks.labelling import HeldOutLabels, entities, mark_entities

WORDS = {"O": ("in", "the", "went"), "B-LOC": ("Paris", "Rome"), "B-PER": ("Ada",), "I-PER": ("Lovelace",)}
NAMES = tuple(sorted(WORDS))
TASK = {"task": "token-classification"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models by transformers that label tokens, and others without a head, and words with labels."""
    import transformers

    root = tmp_path_factory.mktemp("words")
    draw, records = random.Random(4), []
    for number in range(30):
        tags = [draw.choice(NAMES) for _ in range(draw.randint(1, 6))]
        words = [draw.choice(WORDS[tag]) for tag in tags]
        # No two texts are alike.
        records.append({"tokens": [*words, str(number)], "ner_tags": [*tags, "O"]})
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (root / "llama.jsonl").write_text(lines)
    (root / "bert.jsonl").write_text(lines)
    torch.manual_seed(0)
    sizes = {"id2label": dict(enumerate(NAMES)), "label2id": {name: number for number, name in enumerate(NAMES)}}
    words = [*(word for group in WORDS.values() for word in group), *map(str, range(30))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = bert_config(bert_tokenizer(root / "bert", words), **sizes)
        transformers.BertForTokenClassification(config).double().save_pretrained(root / "bert")
        llama = config_of("llama", vocab_size=301, classifier_dropout=0.0, pad_token_id=1, **sizes)
        transformers.LlamaForTokenClassification(llama).double().save_pretrained(root / "llama")
        plain = config_of("llama", vocab_size=301)
        transformers.LlamaForCausalLM(plain).double().save_pretrained(root / "llama-lm")
    # So few ids that words have several tokens.
    tokenizer = Tokenizer.train([" ".join(words)], 264, ("<|endoftext|>", "<pad>"))
    for name in ("llama", "llama-lm"):
        tokenizer.save(root / name)
    return root


def loss_by_transformers(model, batch):
    options = {"token_type_ids": batch.tokentype_ids, "attention_mask": batch.attention_mask}
    if batch.attention_mask is None:
        options = {"attention_mask": batch.tokens != 1}
    return model(input_ids=batch.tokens, labels=batch.labels, **options).loss


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_ten_steps_are_those_of_transformers(group, root, tmp_path, monkeypatch, kind):
    import transformers

    expected = None
    layouts = [
        ParallelSettings(tp=2, sequence_parallel=True),
        ParallelSettings(pp=2),
        ParallelSettings(cp=2),
        ParallelSettings(),
    ]
    for parallel in layouts:
        session = open_run(settings_of(root, tmp_path / "run", kind, parallel, labels=TASK), root, monkeypatch)
        if expected is None:
            model = transformers.AutoModelForTokenClassification.from_pretrained(root / kind, dtype=torch.float64)
            batches = [next(session.loader.batch(step)) for step in range(STEPS)]
            check_labels(transformers.AutoTokenizer.from_pretrained(root / kind), batches, root / f"{kind}.jsonl")
            expected = reference_losses(model.eval(), batches, loss_by_transformers)
        losses = [session.trainer.train_step(step, session.loader).loss for step in range(STEPS)]
        assert losses == pytest.approx(expected, rel=2e-6), parallel
        assert set(session.trainer.evaluate(session.data.held_out)) == {
            "held_out_accuracy",
            "held_out_f1",
            "held_out_loss",
        }


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_no_dropout_is_none_of_the_head_either(group, root, tmp_path, monkeypatch):
    """Whose class drops a tenth where nothing is said, and each data-parallel rank another one."""
    losses = []
    for parallel in (ParallelSettings(tp=2), ParallelSettings()):
        settings = settings_of(root, tmp_path / "run", "llama-lm", parallel, labels=TASK | {"pad_token": None})
        settings = dataclasses.replace(settings, model=PretrainedSettings(dropout=0.0))
        session = open_run(settings, root, monkeypatch)
        losses.append([session.trainer.train_step(step, session.loader).loss for step in range(2)])
        session.topology.destroy()
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    own = dataclasses.replace(settings, model=PretrainedSettings(dropout=0.25))
    session = open_run(own, root, monkeypatch)
    head = session.data.head
    assert (head.dropout, session.trainer.model.classifier.spec.dropout) == (0.25, 0.25)


def check_labels(tokenizer, batches, data):
    """Rows are what transformers' tokenizer makes of the words, with the label of each at its first token."""
    wanted = set()
    for line in data.read_text().splitlines():
        record = json.loads(line)
        encoded = tokenizer(record["tokens"], is_split_into_words=True)
        words = encoded.word_ids()
        labels = [
            -100 if word is None or word == before else NAMES.index(record["ner_tags"][word])
            for before, word in zip([None, *words[:-1]], words, strict=True)
        ]
        wanted.add((*encoded["input_ids"], "labels", *labels))
    seen = 0
    for batch in batches:
        for row, numbers in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
            length = max(
                end for end in range(1, len(row) + 1) if (*row[:end], "labels", *numbers[:end]) in wanted or end == 1
            )
            assert (*row[:length], "labels", *numbers[:length]) in wanted
            assert set(numbers[length:]) <= {-100}
            seen += 1
    assert seen == STEPS * 4


@pytest.mark.slow
def test_a_trained_head_is_what_peft_and_transformers_read(root, tmp_path, monkeypatch, capsys):
    import peft
    import transformers

    monkeypatch.setenv("SHARDWISE_CACHE", str(root / "cache"))
    out, data = tmp_path / "adapters", str(root / "llama.jsonl")
    flags = ["--task", "token-classification", "--training.steps", "3", "--device", "cpu", "--lora-rank", "2"]
    flags += ["--optimizer.learning-rate", "0.01", "--training.dtype", "float64"]
    assert main(["finetune", str(root / "llama-lm"), "--data", data, "--out", str(out), *flags]) == 0
    assert main(["finetune", str(root / "llama-lm"), "--data", data, "--out", str(out), *flags, "--show", "1"]) == 0
    assert "single_label_classification: B-LOC, B-PER, I-PER, O" in capsys.readouterr().out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"dtype": torch.float64, "num_labels": 4}
        model = transformers.AutoModelForTokenClassification.from_pretrained(root / "llama-lm", **options)
        model = peft.PeftModel.from_pretrained(model, out).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    texts = ["Ada Lovelace went", "Rome"]
    assert main(["classify", str(out), "--device", "cpu", "--text", *texts]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for text, line in zip(texts, lines, strict=True):
        encoded = tokenizer(text.split(), is_split_into_words=True, return_tensors="pt")
        words = encoded.word_ids()
        with torch.no_grad():
            scores = model(**encoded).logits[0].softmax(-1)
        assert [each["word"] for each in line] == text.split()
        for number, each in enumerate(line):
            row = scores[words.index(number)]
            assert each["label"] == NAMES[int(row.argmax())]
            assert each["score"] == pytest.approx(float(row.max()), rel=1e-5)
    # Of the last text there are three tokens, the words of which are told.
    (tmp_path / "some.jsonl").write_text("".join((root / "llama.jsonl").read_text().splitlines(keepends=True)[:6]))
    some = ["--data", str(tmp_path / "some.jsonl"), "--device", "cpu"]
    assert main(["classify", str(out), *some]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    records = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    truth = {(n, *each) for n, record in enumerate(records) for each in entities(record["ner_tags"])}
    found = {(n, *each) for n, line in enumerate(lines) for each in entities([word["label"] for word in line])}
    assert main(["eval", str(out), *some]) == 0
    f1 = float(re.search(r"^entity F1 +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)[1])
    assert f1 == pytest.approx(2 * len(truth & found) / (len(truth) + len(found)), abs=1e-6)
    assert main(["classify", str(out), "--device", "cpu", "--sequence-length", "3", "--text", "Ada Lovelace went"]) == 0
    printed = capsys.readouterr()
    line = json.loads(printed.out)
    assert [each["word"] for each in line] == ["Ada", "Lovelace", "went"]
    assert line[-1] == {"word": "went", "label": None, "score": None}
    assert "note: 1 text cut to 3 tokens (--sequence-length)" in printed.err
    assert main(["classify", str(out), "--device", "cpu", "--text", ""]) == 2
    assert "--text 1: the text has no tokens; remove the record" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(f"\n{texts[0]}\n  \n{texts[1]}\n\n"))
    capsys.readouterr()
    assert main(["classify", str(out), "--device", "cpu"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [said[number] for number in (0, 2, 4)] == [None, None, None]
    assert [[each["word"] for each in said[number]] for number in (1, 3)] == [text.split() for text in texts[:2]]


def test_entities():
    assert mark_entities(NAMES)
    assert not mark_entities(("NOUN", "VERB"))
    assert not mark_entities(("O",))
    for tags, expected in (
        ("O B-PER I-PER O", {("PER", 1, 3)}),
        ("B-PER B-PER", {("PER", 0, 1), ("PER", 1, 2)}),
        ("I-PER I-LOC I-LOC", {("PER", 0, 1), ("LOC", 1, 3)}),
        ("B-LOC I-PER", {("LOC", 0, 1), ("PER", 1, 2)}),
        ("S-LOC S-LOC B-PER E-PER I-PER", {("LOC", 0, 1), ("LOC", 1, 2), ("PER", 2, 4), ("PER", 4, 5)}),
        ("O O", set()),
    ):
        assert entities(tags.split()) == expected, tags


@pytest.mark.parametrize("names", [NAMES, ("NOUN", "VERB", "DET", "X")])
def test_accuracy_and_f1(names):
    objective = HeldOutLabels(Classification("token-classification", 4), names)
    # B-LOC, B-PER, I-PER, O; the second row has padding.
    truth = torch.tensor([[1, 2, -100, 3], [0, -100, -100, -100]])
    mine = torch.tensor([[1, 2, 0, 0], [1, 0, 0, 0]])
    logits = torch.nn.functional.one_hot(mine, 4).double() * 2
    with torch.no_grad():
        loss, counts = objective.sums(logits, Batch(None, truth))
    found = objective.scores([float(loss), *counts.tolist()])
    assert found["held_out_accuracy"] == 2 / 4
    # Of entities one is found, two are wrongly, one is missed. Of labels F1 is 0, 2/3, 1 and 0.
    expected = 2 / (2 + 2 + 1) if names == NAMES else (2 / 3 + 1) / 4
    assert found["held_out_f1"] == pytest.approx(expected)
    counted = truth != -100
    assert found["held_out_loss"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits[counted], truth[counted]))
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"text": "a"}, "no list of words under 'tokens' or 'words' .its keys: 'text'"),
        ({"tokens": []}, "'tokens' is an empty list; remove the record"),
        ({"tokens": ["a"]}, "1 word and no list of labels"),
        ({"tokens": ["a"], "labels": ["O", "O"]}, "1 word and 2 labels"),
        ({"tokens": ["a", 3], "labels": ["O", "O"]}, "a word is no string but a number, 3; make each word a string"),
        ({"tokens": ["\ud800"], "labels": ["O"]}, "surrogate"),
    ],
)
def test_impossible_records_are_refused(value, said):
    with pytest.raises(DataError, match=said):
        labelled_words_of(Record("here", value), "text")


def test_a_key_that_is_given_is_the_one_that_is_read():
    record = Record("here", {"tokens": ["a"], "mine": ["b", "c"], "labels": ["O", "X"]})
    assert labelled_words_of(record, "mine").words == ("b", "c")
    with pytest.raises(DataError, match=r"here: no list of words under 'min' \(its keys: 'tokens', 'mine', 'labels'\)"):
        labelled_words_of(record, "min")


def text_of(tags, words=("Ada", "went")):
    return LabelledText("here", " ".join(words), None, tags, tuple(words))


def encoded(root, texts, labels=None, max_length=32):
    labels = labels or Labels(NAMES, "single_label_classification")
    options = {"pad_id": 0, "kinds": 0, "parse_special": True, "max_length": max_length}
    return encode_labelled(texts, tokenizer=Tokenizer.load(root / "llama"), labels=labels, **options)


def test_texts_without_a_label_that_counts_are_left_out(root):
    texts = [text_of([-100, -100]), text_of(["B-PER", "O"]), text_of(["O"], [""]), text_of([-100, "O"])]
    found = encoded(root, texts)
    assert found.texts == (texts[1], texts[3])
    assert found.rows.labels.tolist() == [2, 1]
    assert found.notes("--long") == (
        "1 word without a token there, whose labels count for nothing",
        "2 texts left out: none of the words has a label that counts",
    )
    cut = encoded(root, texts, max_length=1)
    assert cut.notes("--long", " held out")[:2] == (
        "3 texts held out cut to 1 token (--long)",
        "3 words held out without a token there, whose labels count for nothing",
    )
    with pytest.raises(DataError, match="none of 1 text has a word whose label counts: all labels are -100"):
        encoded(root, texts[:1])


def test_names_and_integers():
    named = [text_of(["B-PER", -100]), text_of([-100, "O"])]
    assert labels_of(named, problem="single_label_classification").names == ("B-PER", "O")
    with pytest.raises(DataError, match="here: the label is 1, and others are names"):
        labels_of([*named, text_of(["O", 1])], problem="single_label_classification")
    with pytest.raises(DataError, match="no label in the data counts: all are -100"):
        labels_of([text_of([-100, -100])], problem="single_label_classification")


@pytest.mark.ranks(1)
def test_names_for_integers(group, root, tmp_path, monkeypatch):
    lines = (root / "llama.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    numbers = [record | {"ner_tags": [NAMES.index(tag) for tag in record["ner_tags"]]} for record in records]
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in numbers))
    names = ("B-LOC", "B-PER", "I-PER", "outside")
    given = TASK | {"label_names": names, "pad_token": None}
    settings = settings_of(root, tmp_path / "run", "llama-lm", labels=given)
    settings = dataclasses.replace(settings, data=(str(tmp_path / "numbers.jsonl"),))
    session = open_run(settings, root, monkeypatch)
    assert session.trainer.objective.label_names == names
    assert "the tokenizer puts no blank between words" in " ".join(session.data.notes)
    session.topology.destroy()
    settings = settings_of(root, tmp_path / "run", "llama", labels=given)
    with pytest.raises(
        ConfigError, match=r"--label-names has 4 names, and the head of .*llama has 4 labels: B-LOC, B-PER"
    ):
        open_run(settings, root, monkeypatch)


def test_impossible_labels_are_refused():
    labels = Labels(("O", "B-X"), "single_label_classification")
    text = LabelledText("here", "a b c", None, ["O", 1, -100], ("a", "b", "c"))
    assert labels.encode_words(text).tolist() == [0, 1, -100]
    for tag, said in (("B-Y", "'B-Y' is none of the model's"), (2, "2 is out of range"), (None, "null")):
        with pytest.raises(DataError, match=said):
            labels.encode_words(LabelledText("here", "a", None, [tag], ("a",)))
    for options, said in (
        ({"problem_type": "regression"}, "--problem-type is for --task sequence-classification: each word has one"),
        ({"pad_token": "<pad>"}, "--pad-token is for --task sequence-classification: labels of words do not depend"),
        ({"label_names": ("a", "a")}, "--label-names 'a' 'a': give at least two names, all different"),
        ({"label_names": ("a", "b"), "num_labels": 3}, "--num-labels is 3, and --label-names has 2; leave one out"),
    ):
        with pytest.raises(ConfigError, match=said):
            LabelSettings(task="token-classification", **options)
